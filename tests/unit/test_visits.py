"""What a layer visit makes the host do: counted, because times depend on the machine.

Only what Poros does itself is counted: from the moment a layer's forward or backward is entered to
the moment it is left, without the layer's own forward; so is what each saved tensor costs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.eager_streams import EagerStreams
from poros.replay.remat import RematerializeLayer
from poros.slots.manager import BlockManager
from poros.stream import general
from poros.stream.boundary import StreamedLayer
from poros.stream.condition import Condition
from poros.stream.general import RecomputedCall
from poros.stream.rng import RngStash
from tests.loops import batches, build
from tests.replaced import Plant, in_place_of
from tests.support import prepare_plain

NUM_LAYERS = 4
CPU = torch.device("cpu")

# These make views, or no use of the device's memory: random states are compared on the host, and a
# load is one copy into a part of a slot.
HARMLESS = {"alias", "as_strided", "detach", "slice", "view", "copy_", "equal"}

ASKED = ("allocate", "copy", "wait", "record", "has_passed", "synchronize")


def within(around: Callable[[], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """What does the same in the context that ``around`` makes."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return call(*args, **kwargs)

    return wrapped


def counting_streams() -> tuple[EagerStreams, Counter[str]]:
    """Eager streams, and what is asked of them."""
    streams, calls = EagerStreams(CPU), Counter[str]()

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        calls[name] += 1
        yield

    for name in ASKED:
        setattr(streams, name, within(partial(counted, name), getattr(streams, name)))
    return streams, calls


class Visits(TorchDispatchMode):
    """Counts operators and captures of random states, by kind of visit."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.num_states: Counter[str] = Counter()
        self.kind: str | None = None

    @contextmanager
    def during(self, kind: str | None) -> Iterator[None]:
        """Count the body for visits of ``kind``, or not at all."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind:
            self.operators[self.kind][func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def prepare(num_slots: int) -> tuple[Any, Counter[str]]:
    """A prepared model after two steps, and what it asks of its streams."""
    streams, calls = counting_streams()
    policy = StreamingPolicy(self_check="off", slots=num_slots, loss="reference")
    model = prepare_with(build(num_layers=NUM_LAYERS, dropout=0.0), policy, streams=streams)
    step(model)
    step(model)
    calls.clear()
    return model, calls


def step(model: Any) -> None:
    model(**batches(1)[0]).loss.backward()


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(**batches(1)[0])


def watch(model: Any, run: Callable[[Any], None] = step) -> Visits:
    """What one step or evaluation does, in all its visits together."""
    visits = Visits()
    genuine = torch.default_generator

    class Generator:
        @staticmethod
        def get_state() -> torch.Tensor:
            visits.num_states[visits.kind or "elsewhere"] += 1
            return genuine.get_state()

        set_state = genuine.set_state

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, kind in (
            (StreamedLayer, "forward", "forward"),
            (StreamedLayer, "run", None),
            (RecomputedCall, "_pack", "forward"),
            (RecomputedCall, "_recompute", "backward"),
            (RecomputedCall, "_unpack", "backward"),
        ):
            patch.setattr(owner, name, within(partial(visits.during, kind), getattr(owner, name)))
        patch.setattr(torch, "default_generator", Generator)
        with visits:
            run(model)
    return visits


def problems(num_slots: int) -> list[str]:
    """What a warm step does that a visit must not."""
    model, asked = prepare(num_slots)
    visits = watch(model)
    calls = +asked
    evaluated = watch(model, evaluate).operators["forward"]
    num_loads = 2 * (NUM_LAYERS - num_slots)
    found = []
    # A backward holds its block to recompute with it, and to read it.
    expected = {"copy": num_loads, "wait": 3 * NUM_LAYERS, "record": 3 * NUM_LAYERS}
    if calls != +Counter(expected):
        found.append(f"streams were asked for {dict(calls)}")
    for kind, operators in {**visits.operators, "evaluation": evaluated}.items():
        if operators.keys() - HARMLESS:
            found.append(f"{kind}: operators {sorted(operators.keys() - HARMLESS)}")
    operators = visits.operators["forward"] + visits.operators["backward"]
    if operators["copy_"] != num_loads:
        found.append(f"{operators['copy_']} copies instead of {num_loads}")
    if operators["equal"] != NUM_LAYERS:
        found.append(f"{operators['equal']} comparisons of tensors")
    if visits.num_states != {"forward": 2 * NUM_LAYERS, "backward": 2 * NUM_LAYERS}:
        found.append(f"random states captured: {dict(visits.num_states)}")
    return found


@pytest.mark.parametrize("num_slots", [2, NUM_LAYERS])
def test_a_visit_copies_once_and_neither_waits_nor_allocates(num_slots: int) -> None:
    assert problems(num_slots) == []


@in_place_of(BlockManager, "release")
def wait_at_release(genuine: Any, self: BlockManager, block: int) -> None:
    genuine(self, block)
    self._streams.synchronize(self._ring.slot(block).released)


@in_place_of(StreamedLayer, "condition")
def read_a_value(genuine: Any, self: StreamedLayer) -> Condition:
    found: Condition = genuine(self)
    assert found.parameters[0].view(-1)[0].item() < float("inf")
    return found


@in_place_of(general, "copied")
def copy_inputs(genuine: Any, value: Any, _: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.enable_grad()(torch.clone), value)


@in_place_of(EagerStreams, "copy")
def copy_twice(genuine: Any, self: EagerStreams, target: Any, source: Any, **given: Any) -> Any:
    target.copy_(source)
    return genuine(self, target, source, **given)


@in_place_of(RngStash, "capture")
def capture_twice(genuine: Any, device: torch.device) -> Any:
    genuine(device)
    return genuine(device)


CONTROLS = {
    wait_at_release: "synchronize",
    read_a_value: "_local_scalar_dense",
    copy_inputs: "clone",
    copy_twice: "copies instead of",
    capture_twice: "random states",
}


@pytest.mark.parametrize("spoil", CONTROLS, ids=lambda each: each.__name__)
def test_control_a_costly_visit_is_noticed(spoil: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    assert CONTROLS[spoil] in " ".join(problems(2))


@contextmanager
def refusing_to_wait(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the visits of the body, torch raises if a CUDA call makes the host wait."""

    @contextmanager
    def refusing() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.context() as inner:
        inner.setattr(StreamedLayer, "forward", within(refusing, StreamedLayer.forward))
        inner.setattr(RecomputedCall, "_recompute", within(refusing, RecomputedCall._recompute))
        backward = within(refusing, RematerializeLayer.backward)
        inner.setattr(RematerializeLayer, "backward", staticmethod(backward))
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [None, False])
def test_no_visit_on_a_gpu_waits(cuda_graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = {"slots": 2, "self_check": "off", "cuda_graphs": cuda_graphs}
    model = prepare_plain(build(num_layers=NUM_LAYERS, dropout=0.0), device="cuda", **policy)
    batch = {key: each.cuda() for key, each in batches(1)[0].items()}
    for _ in range(3):  # visits are recorded for the second, and the recordings compared in it
        model(**batch).loss.backward()
    with refusing_to_wait(monkeypatch):
        model(**batch).loss.backward()
    read_a_value(monkeypatch)
    with refusing_to_wait(monkeypatch), pytest.raises(RuntimeError, match="synchronizing"):
        model(**batch).loss.backward()
