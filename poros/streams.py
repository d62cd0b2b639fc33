"""Two queues, the copy stream and the compute stream, behind one small interface.

A ``StreamContext`` is built without touching a device. Those of a GPU are ``poros.cuda_streams``,
which says how one is had for a device too; those of a CPU are ``poros.eager_streams``.

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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Event = Any
"""A point on one of the two streams. Opaque to everyone but the context that made it."""


@dataclass
class Timings:
    """How long the copies took that are complete. Times are the device's."""

    num_bytes: int = 0
    copy_ms: float = 0.0
    stall_ms: float = 0.0
    """For how long the compute stream had nothing to do but wait for a copy."""


def gb_per_s(num_bytes: float, ms: float) -> float:
    """The rate of copies that took ``ms``; 0 if there were none."""
    return num_bytes / ms / 1e6 if ms else 0.0


class StreamContext(ABC):
    """The copy stream and the compute stream of one device.

    The compute stream is whatever stream is current on the device when a method is called.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timings = Timings()

    @abstractmethod
    def beside(self) -> "StreamContext":
        """A second copy stream of the device, with the same compute stream."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 device tensor that the copy stream will write. Contents are undefined."""

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A device tensor for one copy, in the compute stream's memory. Contents are undefined.

        The allocator does not learn of the copy stream, and hands the memory on as the compute
        stream's own. So it must be kept until the compute stream has waited for the copy, or be
        given to ``abandon``.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)

    @abstractmethod
    def abandon(self, memory: torch.Tensor, event: Event) -> None:
        """Give up borrowed memory, or the source of a copy, which is in flight until ``event``.

        The allocator then keeps it until the copy stream is done. From any thread and stream.
        """

    def timings(self) -> Timings:
        """What the copies up to now have taken; copies that are not complete do not count yet."""
        return self._timings

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        """Queue ``target <- source`` on the copy stream, behind ``after``.

        One of the two is on the device, the other on the host: page-locked, or the copy is not
        asynchronous.

        Args:
            target: Bytes written until the returned event.
            source: Bytes of the same size; must stay alive and unchanged until the returned event
                has passed.
            after: Event of the compute stream behind which ``target`` is no longer read and
                ``source`` is complete.

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
