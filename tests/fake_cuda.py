"""A CUDA of the worst kind, on a CPU: whatever no event orders may happen in any order.

It stands in for the part of torch that ``poros.cuda_streams.CudaStreams`` uses. Every stream
carries a vector clock; an event takes the clock of its stream, a wait merges it into that of
another. Two accesses of the same memory, one of them a write, must be ordered by these clocks, else
some GPU on some day runs them the other way round: ``SlotHazard`` (Lamport 1978; Fidge 1988 for the
clocks).

The allocator works like the caching allocator: memory that is freed is handed out again on the
stream it came from, though kernels that are still queued there may use it. It waits only for the
other streams that were recorded for the memory, as far as they had come when it was freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tools.adversary import SlotHazard

Clock = dict["FakeStream", int]


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


class FakeStream:
    """An in-order queue; ``clock`` says how far each stream has come before what is queued next."""

    def __init__(self, device: object = None, name: str = "copy stream") -> None:
        self.name = name
        self.clock: Clock = {self: 0}
        self.stream_id, self.device_index, self.device_type = id(self), 0, 1

    def wait_event(self, event: "FakeEvent | None") -> None:
        # torch refuses None; here it orders nothing, so that the hazard itself is seen.
        if event is not None:
            merge(self.clock, event.clock)

    def wait_stream(self, stream: "FakeStream") -> None:
        merge(self.clock, stream.clock)


class FakeEvent:
    """A point of a stream. Waiting for one that was never recorded returns at once, as in CUDA."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream) -> None:
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        """No device is ever sure to be past anything."""
        return False


class Block:
    """Device memory, and the accesses that a later one may collide with."""

    def __init__(self, cuda: "FakeCuda", num_bytes: int, stream: FakeStream) -> None:
        self.cuda = cuda
        self.stream = stream
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.reads: dict[FakeStream, int] = {}
        self.write: tuple[FakeStream, int] | None = None
        self.users: set[FakeStream] = set()
        self.freed: Clock = {}

    def access(self, *, is_write: bool) -> None:
        """A kernel or copy on the current stream touches this memory."""
        stream = self.cuda.current_stream()
        earlier = [self.write] if self.write else []
        if is_write:
            earlier += self.reads.items()
        for other, time in earlier:
            if stream.clock.get(other, 0) < time:
                kind = "write" if is_write else "read"
                raise SlotHazard(
                    f"a {kind} on the {stream.name} may run before an access on the {other.name}"
                )
        stream.clock[stream] += 1
        if is_write:
            self.write, self.reads = (stream, stream.clock[stream]), {}
        else:
            self.reads[stream] = stream.clock[stream]


class FakeTensor:
    """As much of a flat uint8 CUDA tensor as ``CudaStreams`` and the ring need."""

    def __init__(self, block: Block, num_bytes: int) -> None:
        self.block = block
        self.num_bytes = num_bytes

    def __getitem__(self, part: slice) -> "FakeTensor":
        assert part.start is None and part.step is None
        return FakeTensor(self.block, min(part.stop, self.num_bytes))

    def numel(self) -> int:
        return self.num_bytes

    def record_stream(self, stream: FakeStream) -> None:
        if stream is not self.block.stream:
            self.block.users.add(stream)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking, "the host would wait for the copy"
        assert self.block.cuda.current_stream().name == "copy stream", "no copy engine"
        assert source.numel() == self.num_bytes
        self.block.access(is_write=True)
        self.block.bytes[: self.num_bytes] = source

    def read(self) -> torch.Tensor:
        """What a kernel on the current stream reads."""
        self.block.access(is_write=False)
        return self.block.bytes[: self.num_bytes]

    def fill_(self, value: int) -> None:
        """What a kernel on the current stream writes."""
        self.block.access(is_write=True)
        self.block.bytes[: self.num_bytes] = value


class FakeCuda:
    """Its ``torch`` goes into ``poros.cuda_streams`` and ``poros.streams``."""

    def __init__(self) -> None:
        self.compute = FakeStream(name="compute stream")
        self._current = self.compute
        self._streams: dict[int, FakeStream] = {self.compute.stream_id: self.compute}
        self._free: list[Block] = []
        self.torch: Any = SimpleNamespace(
            uint8=torch.uint8,
            empty=self.empty,
            cuda=SimpleNamespace(
                Stream=self.new_stream,
                Event=FakeEvent,
                current_stream=self.current_stream,
                stream=self.on,
            ),
            _C=SimpleNamespace(
                _cuda_getDevice=lambda: 0,
                _cuda_getCurrentStream=self.current_key,
                _cuda_setStream=self.set_current,
            ),
        )

    def current_stream(self, device: object = None) -> FakeStream:
        return self._current

    def new_stream(self, device: object = None) -> FakeStream:
        found = FakeStream(device)
        self._streams[found.stream_id] = found
        return found

    def current_key(self, device_index: int) -> tuple[int, int, int]:
        """``torch._C._cuda_getCurrentStream``."""
        self._streams.setdefault(self._current.stream_id, self._current)
        return self._current.stream_id, self._current.device_index, self._current.device_type

    def set_current(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        """``torch._C._cuda_setStream``."""
        self._current = self._streams[stream_id]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: object) -> FakeTensor:
        assert dtype is torch.uint8
        for block in self._free:
            if block.stream is self._current and block.bytes.numel() >= num_bytes:
                self._free.remove(block)
                # The host has seen the recorded streams pass this point.
                merge(self._current.clock, block.freed)
                return FakeTensor(block, num_bytes)
        return FakeTensor(Block(self, num_bytes, self._current), num_bytes)

    def free(self, tensor: FakeTensor) -> None:
        """The last reference to ``tensor`` is gone."""
        block = tensor.block
        block.freed = {}
        for stream in block.users:
            merge(block.freed, stream.clock)
        block.users.clear()
        self._free.append(block)
