"""Copies and stalls of CUDA streams are timed by events, and nobody waits for one."""

from typing import Any

import pytest
import torch

from poros import streams as streams_module
from poros.streams import CudaStreams
from tests.fake_cuda import FakeCuda, FakeEvent


class Clock:
    """Where the device is; every event is a millisecond behind the one before it."""

    def __init__(self) -> None:
        self.recorded = 0
        self.passed = 0


def timed_events(clock: Clock) -> type[FakeEvent]:
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
    cuda, clock = FakeCuda(), Clock()
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
