"""The copy stream and the compute stream of a GPU, and which streams a device has.

Only this module creates streams and events. A stream is made on first use.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from poros.eager_streams import EagerStreams
from poros.streams import Event, StreamContext, Timings


class CudaStreams(StreamContext):
    """CUDA streams and events.

    The copy stream lets host-to-device copies of the next blocks overlap the compute of this one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copy_stream: torch.cuda.Stream | None = None
        self._last: tuple[object, torch.cuda.Stream] | None = None
        """The compute stream when it was last asked for, behind what PyTorch knows it by."""
        self._is_copying = False
        self._memories: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._settling = threading.Lock()
        self._copied: deque[tuple[int, Event, Event]] = deque()
        self._stalled: deque[tuple[Event, Event]] = deque()

    def beside(self) -> "CudaStreams":
        return CudaStreams(self.device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self._copies())
        self._memories.add(memory)
        return memory

    def abandon(self, memory: torch.Tensor, event: Event) -> None:
        memory.record_stream(self._copies())

    def timings(self) -> Timings:
        self._settle()
        return self._timings

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        stream = self._copies()
        stream.wait_event(after)
        begin = _timed_event(stream)
        self._is_copying = True
        with _OnStream(stream):
            target.copy_(source, non_blocking=True)
        self._is_copying = False
        event = _timed_event(stream)
        self._copied.append((source.numel() * source.element_size(), begin, event))
        self._settle()
        return event

    def wait(self, event: Event) -> None:
        stream = self._compute()
        begin = None if event.query() else _timed_event(stream)
        stream.wait_event(event)
        if begin is not None:
            self._stalled.append((begin, _timed_event(stream)))

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._compute())
        return event

    def has_passed(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def _settle(self) -> None:
        """Add up what is complete; looks at one event more than that, and waits for none."""
        # Not blocking: who else asks at this moment may be a collector that interrupts this.
        if not self._settling.acquire(blocking=False):
            return
        try:
            while self._copied and self._copied[0][2].query():
                num_bytes, begin, end = self._copied.popleft()
                self._timings.num_bytes += num_bytes
                self._timings.copy_ms += begin.elapsed_time(end)
            while self._stalled and self._stalled[0][1].query():
                begin, end = self._stalled.popleft()
                self._timings.stall_ms += begin.elapsed_time(end)
        finally:
            self._settling.release()

    def _copies(self) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)
        return self._copy_stream

    def _compute(self) -> torch.cuda.Stream:
        # A caller may move to another stream between visits. Joining the old one keeps a single
        # order of reads, so that the latest recorded event stands for all of them; and the
        # allocator learns of the new one (see "Fresh memory is not idle memory").
        last = self._last
        if last is not None:
            # PyTorch's own functions, which make a new object each time, take ten times as long.
            if torch._C._cuda_getCurrentStream(last[1].device_index) == last[0]:
                return last[1]
            if self._is_copying and torch.cuda.current_stream(self.device) == self._copy_stream:
                # A copy was interrupted before it had put the compute stream back.
                self._is_copying = False
                _set_current(last[1].stream_id, last[1].device_index, last[1].device_type)
                return last[1]
        stream = torch.cuda.current_stream(self.device)
        if last is not None and stream != last[1]:
            stream.wait_stream(last[1])
            for memory in self._memories:
                memory.record_stream(stream)
        # At last, and at once: an interruption, or another thread, finds either or neither.
        self._last = torch._C._cuda_getCurrentStream(stream.device_index), stream
        return stream


class _OnStream:
    """As ``torch.cuda.stream``, which looks everything up by way of Python, several times."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> None:
        stream = self._stream
        if torch._C._cuda_getDevice() != stream.device_index:
            self._before = torch.cuda.stream(stream)
            self._before.__enter__()
        else:
            self._before = torch._C._cuda_getCurrentStream(stream.device_index)
            _set_current(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: Any) -> None:
        if isinstance(self._before, tuple):
            _set_current(*self._before)
        else:
            self._before.__exit__(*error)


def _set_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def recording_stream(
    device: torch.device, others: Sequence[torch.cuda.Stream] = ()
) -> torch.cuda.Stream:
    """A stream to record on, none of ``others``, on which nothing else is queued.

    PyTorch has a bounded pool of streams of each priority, and hands them out again and again. This
    one is of another priority than those for copies, so it is none of them.
    """
    taken = [torch.cuda.current_stream(device), *others]
    stream = torch.cuda.Stream(device, priority=-1)
    while stream in taken:
        stream = torch.cuda.Stream(device, priority=-1)
    return stream


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def streams_for(device: torch.device) -> StreamContext:
    """The context for ``device``: CUDA streams on a GPU, eager ones on a CPU."""
    return CudaStreams(device) if device.type == "cuda" else EagerStreams(device)
