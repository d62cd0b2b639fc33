"""Ctrl-C within the streams of a GPU, on stand-ins that see what no event orders."""

import pytest
import torch

from poros import streams as streams_module
from poros.streams import CudaStreams
from tests.fake_cuda import FakeCuda, FakeStream, FakeTensor

NUM_BYTES = 16


def bytes_of(value: int) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setattr(streams_module, "torch", found.torch)
    return found


def visit(streams: CudaStreams, memory: FakeTensor, value: int) -> None:
    """The next block: its copy behind the last read, then a read of it."""
    copied = streams.copy(memory, bytes_of(value), after=streams.record())  # type: ignore[arg-type]
    streams.wait(copied)
    assert memory.read().tolist() == [value] * NUM_BYTES


def begin() -> tuple[CudaStreams, FakeTensor]:
    streams = CudaStreams(torch.device("cuda", 0))
    memory: FakeTensor = streams.allocate(NUM_BYTES)  # type: ignore[assignment]
    visit(streams, memory, 1)
    return streams, memory


def test_as_another_compute_stream_is_met(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is joined again, or what comes next would be ordered behind the wrong stream."""
    streams, memory = begin()
    genuine = FakeStream.wait_stream

    def struck(self: FakeStream, stream: FakeStream) -> None:
        genuine(self, stream)
        raise KeyboardInterrupt

    with cuda.on(FakeStream(name="another compute stream")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FakeStream, "wait_stream", struck)
            streams.record()
        for value in (2, 3):
            visit(streams, memory, value)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_as_a_copy_is_queued(cuda: FakeCuda, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stream does not stay the current one."""
    streams, memory = begin()
    genuine, calls = streams_module._set_current, [0]

    def struck(*key: int) -> None:
        calls[0] += 1
        if where == "behind" and calls[0] == 2:
            raise KeyboardInterrupt
        genuine(*key)
        if where == "before":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(streams_module, "_set_current", struck)
        streams.copy(memory, bytes_of(2), after=streams.record())  # type: ignore[arg-type]
    assert cuda.current_stream() is not cuda.compute, "as PyTorch's own context would leave it"
    streams.record()
    assert cuda.current_stream() is cuda.compute
    visit(streams, memory, 3)
