"""Blocks that stay on the device: those of the kept layers, which are not recomputed.

Note: No strangers
    The graph of a kept layer refers to its weights from its forward to its backward, which is
    longer than a visit. So these blocks are no part of the ring: each has memory of its own, filled
    once and never written again.
"""

from collections.abc import Sequence

from poros.host import HostStore
from poros.labels import labelled
from poros.ring import Slot, SlotState
from poros.streams import StreamContext
from poros.walk import Phase


class ResidentBlocks:
    """The last blocks of a model, in memory of their own.

    Args:
        host: The bytes of every block.
        blocks: Which of them stay.
        streams: Where they are copied.
    """

    def __init__(self, host: HostStore, blocks: Sequence[int], streams: StreamContext) -> None:
        self._streams = streams
        self._slots: dict[int, Slot] = {}
        for block in blocks:
            with labelled("copy block", str(block)):
                source = host.lend(block)
                buffer = streams.allocate(source.numel())
                # See "Fresh memory is not idle memory" in poros.streams.
                slot = Slot(block, buffer, released=streams.record(), block=block)
                slot.ready = streams.copy(buffer, source, after=slot.released)
            host.lent_until(block, slot.ready)
            slot.state = SlotState.READY
            self._slots[block] = slot

    def slot(self, block: int) -> Slot:
        """The memory of ``block``."""
        return self._slots[block]

    def acquire(self, block: int, phase: Phase) -> Slot:
        """The same; the compute stream waits for its one copy."""
        slot = self.slot(block)
        self._streams.wait(slot.ready)
        return slot

    def is_held(self, block: int) -> bool:
        """No: there is nothing to release, since no one else will write here."""
        return False

    def release(self, block: int) -> None:
        """Nothing to give up."""

    @property
    def num_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self._slots.values())
