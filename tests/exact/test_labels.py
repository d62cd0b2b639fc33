"""What a trace of ``torch.profiler`` says by itself: visits of layers and copies of blocks."""

from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import poros
from poros import cuda_streams as streams_module
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.cuda_streams import CudaStreams
from poros.eager_streams import EagerStreams
from tests.comparing import bits_of, changes
from tests.fake_cuda import FakeCuda, FakeEvent
from tests.journal import Action, keep_journal
from tests.loops import NUM_LAYERS, batches, build

PREFIX = "poros::"


def step(model: Any) -> None:
    torch.manual_seed(5)
    model.train()
    model(**batches()[0]).loss.backward()


def profiled(run: Any, model: Any) -> list[str]:
    """Labels, in the order of time."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run(model)
    found: list[Any] = [each for each in trace.events() or () if each.name.startswith(PREFIX)]
    return [each.name for each in sorted(found, key=lambda each: each.time_range.start)]


def streamed(**policy: Any) -> Any:
    chosen = StreamingPolicy(self_check="off", slots=2, **policy)
    return prepare_with(build(), chosen, streams=EagerStreams(torch.device("cpu")))


def forward_and_backward() -> list[str]:
    layers = range(NUM_LAYERS)
    return [
        *(f"{PREFIX}forward layers.{index}" for index in layers),
        *(f"{PREFIX}backward layers.{index}" for index in reversed(layers)),
    ]


def test_a_trace_shows_each_visit_and_each_copy_in_order() -> None:
    model, journal = streamed(), list[Action]()
    keep_journal(poros.runtime(model).manager, journal)
    found = profiled(step, model)
    others = (f"{PREFIX}copy", f"{PREFIX}head")
    assert [each for each in found if not each.startswith(others)] == forward_and_backward()
    copies = [each.block for each in journal if each.kind == "prefetch"]
    assert len(copies) > NUM_LAYERS
    assert [each for each in found if each.startswith(f"{PREFIX}copy block")] == [
        f"{PREFIX}copy block {block}" for block in copies
    ]
    # The copy that a visit begins with, and the one ahead of it, are queued before the layer runs.
    assert found[:3] == [
        f"{PREFIX}copy block 0",
        f"{PREFIX}copy block 1",
        PREFIX + "forward layers.0",
    ]


def test_the_loss_shows_which_rows_of_the_head_it_reads() -> None:
    model = streamed(stream_head=True)
    found = profiled(step, model)
    # So small a head comes in one piece.
    assert [each for each in found if " rows " in each] == [
        f"{PREFIX}copy head rows 0",
        f"{PREFIX}head rows 0",
    ]
    first, last = (place for place, each in enumerate(found) if " rows " in each)
    assert found.index(PREFIX + f"forward layers.{NUM_LAYERS - 1}") < first < last
    assert last < found.index(PREFIX + f"backward layers.{NUM_LAYERS - 1}")
    resident = streamed(loss="reference", stream_head=False)
    assert not any(" rows " in each for each in profiled(step, resident))


def test_what_a_layer_computes_is_inside_of_its_label_and_has_the_same_bits() -> None:
    model = streamed()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model)
    events: list[Any] = list(trace.events() or ())
    ranges = [each.time_range for each in events if each.name in forward_and_backward()]
    products = [each for each in events if each.name == "bitsandbytes::gemm_4bit"]
    assert products and len(ranges) == 2 * NUM_LAYERS
    for each in products:
        at = each.time_range
        assert any(one.start <= at.start and at.end <= one.end for one in ranges), each
    plain = streamed()
    step(plain)
    assert changes(bits_of(plain), bits_of(model)) == {}
    assert profiled(step, poros.restore(model)) == [], "it does not stream any more"


def test_without_a_profiler_no_range_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("poros.utils.profiling.record_function", refuse)
    model = streamed()
    step(model)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"poros::inference layers\.0"):
        profiled(lambda model: model.eval()(**batches()[0]), model)


def timed_events(clock: Any) -> type[FakeEvent]:
    """Each is a millisecond behind the one before it; the device is where the clock has passed."""

    class TimedEvent(FakeEvent):
        at = 0

        def record(self, stream: Any) -> None:
            super().record(stream)
            clock.recorded += 1
            self.at = clock.recorded

        def query(self) -> bool:
            return self.at <= clock.passed

        def elapsed_time(self, other: "TimedEvent") -> float:
            assert self.query() and other.query(), "the host would have to wait"
            return float(other.at - self.at)

    return TimedEvent


@pytest.mark.parametrize("is_late", [True, False])
def test_a_stall_is_a_wait_for_a_copy_that_is_not_done(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, clock = FakeCuda(), SimpleNamespace(recorded=0, passed=0)
    cuda.torch.cuda.Event = timed_events(clock)
    monkeypatch.setattr(streams_module, "torch", cuda.torch)
    streams = CudaStreams(torch.device("cuda", 0))
    memory = streams.allocate(64)
    source = torch.zeros(64, dtype=torch.uint8)
    event = streams.copy(memory, source, after=streams.record())
    assert (streams.timings().num_bytes, streams.timings().copy_ms) == (0, 0.0), "still in flight"
    clock.passed = 0 if is_late else clock.recorded
    streams.wait(event)
    clock.passed = clock.recorded
    found = streams.timings()
    assert (found.num_bytes, found.copy_ms) == (64, 1.0)
    assert found.stall_ms == (1.0 if is_late else 0.0)


def test_timings_that_are_asked_for_while_they_are_added_up_wait_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector may interrupt the sum and ask: it would wait for what it has interrupted."""
    cuda, asked = FakeCuda(), list[int]()
    monkeypatch.setattr(streams_module, "torch", cuda.torch)
    streams = CudaStreams(torch.device("cuda", 0))

    def query(event: FakeEvent) -> bool:
        asked.append(streams.timings().num_bytes)
        return False

    monkeypatch.setattr(FakeEvent, "query", query)
    memory, source = streams.allocate(64), torch.zeros(64, dtype=torch.uint8)
    thread = Thread(
        target=lambda: streams.copy(memory, source, after=streams.record()), daemon=True
    )
    thread.start()
    thread.join(timeout=10)
    assert asked == [0] and not thread.is_alive()
