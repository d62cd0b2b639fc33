"""Two queues, the copy stream and the compute stream, behind one small interface.

Only this module creates streams and events. A ``StreamContext`` is built without touching a device;
the stream itself is made on first use.

Note: Slot lifetime
    A slot may be overwritten only after the *device* has finished the last read of it. That Python
    has returned from a kernel launch proves nothing. So whoever ends a read records an event on the
    compute stream (``record``), and the copy that overwrites the slot waits for that event on the
    copy stream (``copy(..., after=event)``). In the other direction the compute stream waits for
    the copy's event (``wait``) before it reads. The host never waits in either direction.

Note: Fresh memory is not idle memory
    The caching allocator hands out blocks that kernels already queued on the compute stream may
    still read or write: correct for that stream, wrong for the copy stream. So the first copy into
    fresh memory waits like any other, for an event recorded when the memory was allocated. In the
    other direction, memory that is freed while a copy is still queued must not be handed out before
    the copy is done: ``allocate`` tells the allocator about the copy stream.
"""

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

Event = Any
"""A point on one of the two streams. Opaque to everyone but the context that made it."""


class StreamContext(ABC):
    """The copy stream and the compute stream of one device.

    The compute stream is whatever stream is current on the device when a method is called.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 device tensor that the copy stream will write. Contents are undefined."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        """Queue ``target <- source`` on the copy stream, behind ``after``.

        Args:
            target: Device bytes, written until the returned event.
            source: Host bytes of the same size; must stay alive and unchanged until the returned
                event has passed. Page-locked, or the copy is not asynchronous.
            after: Event of the compute stream behind which ``target`` is no longer read.

        Returns:
            The event at which the copy is complete.

        Streams:
            Queues on the copy stream; blocks neither the host nor the compute stream.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make everything queued on the compute stream from now on run behind ``event``."""

    @abstractmethod
    def record(self) -> Event:
        """The event at which everything queued on the compute stream so far is complete."""

    @abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Whether the device is past ``event``. Does not wait."""

    @abstractmethod
    def synchronize(self, event: Event) -> None:
        """Block the host until the device is past ``event``."""


class CudaStreams(StreamContext):
    """CUDA streams and events.

    The copy stream lets host-to-device copies of the next blocks overlap the compute of this one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copy_stream: torch.cuda.Stream | None = None
        self._last_compute: torch.cuda.Stream | None = None
        self._memories: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self._copies())
        self._memories.add(memory)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        stream = self._copies()
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, event: Event) -> None:
        self._compute().wait_event(event)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._compute())
        return event

    def has_passed(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def _copies(self) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)
        return self._copy_stream

    def _compute(self) -> torch.cuda.Stream:
        # A caller may move to another stream between visits. Joining the old one keeps a single
        # order of reads, so that the latest recorded event stands for all of them; and the
        # allocator learns of the new one (see "Fresh memory is not idle memory").
        stream = torch.cuda.current_stream(self.device)
        if self._last_compute is not None and stream != self._last_compute:
            stream.wait_stream(self._last_compute)
            for memory in self._memories:
                memory.record_stream(stream)
        self._last_compute = stream
        return stream


class EagerStreams(StreamContext):
    """The stand-in for a CPU: one queue, every copy done before ``copy`` returns."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        target.copy_(source)
        return None

    def wait(self, event: Event) -> None:
        pass

    def record(self) -> Event:
        return None

    def has_passed(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        pass


def streams_for(device: torch.device) -> StreamContext:
    """The context for ``device``: CUDA streams on a GPU, the eager stand-in on a CPU."""
    return CudaStreams(device) if device.type == "cuda" else EagerStreams(device)
