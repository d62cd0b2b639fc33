"""Recording on a GPU, by a model of what PyTorch does about it: no GPU is needed."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from poros.replay import graphs
from poros.replay.graphs import CudaRecorder


class Cuda:
    """What PyTorch keeps of recordings, and refuses.

    Attributes:
        is_capturing: Whether random numbers are taken for recorded ones.
        pools: By handle, how many graphs have memory in it.
        underway: Those that take the memory of a recording now. Nothing can be given back then.
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self.pools: dict[int, int] = {}
        self.underway: set[int] = set()
        self.ends_badly = False

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def handle(self) -> int:
        self.pools[len(self.pools)] = -1  # new
        return len(self.pools) - 1


class Graph:
    cuda: Cuda

    def __init__(self, keep_graph: bool = False) -> None:
        assert not keep_graph  # as there is no driver that joins graphs

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.cuda.is_capturing = True
        if self.cuda.pools[pool] == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        if pool in self.cuda.underway:
            raise RuntimeError("already recording to mempool_id")
        self.cuda.underway.add(pool)
        self.cuda.pools[pool] = max(0, self.cuda.pools[pool]) + 1
        self.pool = pool

    def capture_end(self) -> None:
        if self.cuda.ends_badly:
            self.cuda.ends_badly = False
            raise RuntimeError("operation failed due to a previous error during capture")
        if not hasattr(self, "pool"):
            raise RuntimeError("capture_end() called before capture_begin()")
        self.cuda.is_capturing = False
        self.cuda.underway.remove(self.pool)

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.cuda.pools[self.pool] -= 1


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(Graph, "cuda", cuda, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", cuda.handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(graphs, "recording_stream", lambda *_: Stream())
    return cuda


def nothing() -> None:
    pass


def test_recordings_share_memory_as_long_as_there_is_one(cuda: Cuda) -> None:
    """Into memory whose recordings are gone, as when every adapter has moved, none is recorded."""
    recorder = CudaRecorder(torch.device("cpu"))
    kept = [recorder.record(nothing) for _ in range(3)]
    assert list(cuda.pools.values()) == [3]
    del kept[1:]
    kept.append(recorder.record(nothing))
    assert list(cuda.pools.values()) == [2]
    kept.clear()
    for _ in range(2):
        recorder.record(nothing).replay()
    assert not cuda.is_capturing and len(cuda.pools) == 3
    # The collector waits, and goes on.
    seen = []
    recorder.record(lambda: seen.append(gc.isenabled()))
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("ends_badly", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("recovers", [True, False], ids=["", "control"])
def test_a_recording_that_fails_leaves_random_numbers_alone(
    error: type[BaseException],
    ends_badly: bool,
    recovers: bool,
    cuda: Cuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not recovers:
        monkeypatch.setattr(CudaRecorder, "_recover", lambda self, pool: None)
    recorder = CudaRecorder(torch.device("cpu"))
    kept = recorder.record(nothing)

    def run() -> None:
        cuda.ends_badly = ends_badly
        raise error("no room")

    with pytest.raises(error):
        recorder.record(run)
    assert cuda.is_capturing == (ends_badly and not recovers)
    if recovers:
        assert not cuda.underway
        recorder.record(nothing)
    del kept


def test_one_that_could_not_begin_leaves_them_alone_too(cuda: Cuda) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    kept = recorder.record(nothing)
    cuda.pools[0] = 0  # PyTorch would say that all is gone
    with pytest.raises(RuntimeError, match="use_count"):
        recorder.record(nothing)
    assert not cuda.is_capturing
    cuda.pools[0] = 1
    del kept
