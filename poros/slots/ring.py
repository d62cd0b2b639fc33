"""The preallocated device slots and their states.

Note: Preallocated
    All device memory for streaming is allocated once, when the ring is built. The caching allocator
    is not in the loop afterwards, so the peak is a formula: the sum of the slots.

Block k always lives in slot k mod S ("The zigzag and the slots" in ``poros.slots.schedule``), so
the views of a block's tensors are built once.

Note: No strangers
    The graph of a kept layer refers to its weights from its forward to its backward, which is
    longer than a visit. So the blocks of kept layers have pinned slots: one each, filled once and
    never written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from poros.host.layout import BlockLayout, slot_sizes
from poros.streams import Event, StreamContext


class SlotState(Enum):
    """What a slot's bytes are. Only ``poros.slots.manager`` changes it."""

    FREE = "free"
    """From allocation, or a load that failed: the bytes mean nothing."""
    LOADING = "loading"
    """From the moment a copy is queued: the bytes are those of ``block`` behind ``ready``."""
    READY = "ready"
    """From release: the bytes are those of ``block``, and the last read ends at ``released``."""
    IN_USE = "in use"
    """From acquire: kernels that read the slot are being queued; it must not be overwritten."""


@dataclass(slots=True, eq=False)
class Slot:
    """One device buffer, the block in it, and the events that order its use."""

    index: int
    buffer: torch.Tensor
    released: Event
    """Behind this point of the compute stream nothing reads the buffer."""
    ready: Event = None
    """Behind this point of the copy stream the buffer holds ``block``."""
    block: int | None = None
    state: SlotState = SlotState.FREE


class DeviceRing:
    """The slots of one prepared model, for blocks of these ``layouts``.

    Attributes:
        slots: Those that the first ``num_blocks`` blocks pass through, at most one for each.
        pinned: Those of the last ``num_pinned`` blocks, which stay.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        num_slots: int,
        streams: StreamContext,
        num_pinned: int = 0,
    ) -> None:
        self.num_blocks = len(layouts) - num_pinned
        sizes = slot_sizes(layouts[: self.num_blocks], min(num_slots, self.num_blocks))
        sizes += [layout.num_bytes for layout in layouts[self.num_blocks :]]
        buffers = [streams.allocate(num_bytes) for num_bytes in sizes]
        # See "Fresh memory is not idle memory" in poros.streams.
        allocated = streams.record()
        slots = [Slot(i, buffer, released=allocated) for i, buffer in enumerate(buffers)]
        first = len(slots) - num_pinned
        self.slots, self.pinned = slots[:first], slots[first:]

    def slot(self, block: int) -> Slot:
        """The one slot in which ``block`` may live."""
        if block >= self.num_blocks:
            return self.pinned[block - self.num_blocks]
        return self.slots[block % len(self.slots)]

    @property
    def num_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in (*self.slots, *self.pinned))
