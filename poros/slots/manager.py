"""Moves blocks through the slots: prefetch, acquire, release.

Only this module changes a slot's state. *prefetch* queues a copy, *acquire* makes the compute
stream wait for it, *release* records the event behind which the slot may be overwritten.
"""

from poros.errors import SlotStateError
from poros.host.store import HostStore
from poros.slots.ring import DeviceRing, Slot, SlotState
from poros.slots.schedule import Phase, loads, missing, predict
from poros.streams import StreamContext
from poros.utils.profiling import labelled


class BlockManager:
    """Keeps the slots filled ahead of the walk, one compute stream, one copy stream.

    The ring is allocated with the same ``streams``.

    Attributes:
        num_blocks: Blocks that pass through the slots, from the first on; the others are pinned.
        num_loads: Copies of these queued so far. Likewise ``num_hits`` and ``h2d_num_bytes``.
    """

    def __init__(self, host: HostStore, ring: DeviceRing, streams: StreamContext) -> None:
        self._slabs, self._lender = host.slabs, host.lender
        self._streams = streams
        self.num_loads = 0
        self.num_hits = 0
        self.h2d_num_bytes = 0
        self.use(ring)

    def use(self, ring: DeviceRing) -> None:
        """Move the blocks through the slots of ``ring`` from now on, and fill its pinned ones.

        Streams:
            The copies into pinned slots wait as all do; nobody waits for them yet.

        Raises:
            CheckpointFormatError: If a pinned block is on a disk and cannot be read.
        """
        # Before anything is borrowed: from here on the store knows which copies it has to wait for.
        if self._lender is not None:
            self._lender.start(self._streams)
        self._ring = ring
        self._visit: tuple[int, Phase] | None = None
        self.num_blocks = ring.num_blocks
        for number, slot in enumerate(ring.pinned):
            self._load(self.num_blocks + number, slot)

    def is_pinned(self, block: int) -> bool:
        """Whether ``block`` stays in a slot of its own."""
        return 0 <= block - self.num_blocks < len(self._ring.pinned)

    def prefetch(self, block: int) -> None:
        """Queue the copy of ``block`` into its slot, unless it is there or on its way.

        Streams:
            The copy waits on the copy stream for the last read of the slot. Blocks the host only
            if the slab is pageable, or on a disk and not read yet.

        Raises:
            CheckpointFormatError: If the block is on a disk and cannot be read.
            SlotStateError: If the slot is in use by another block.
            ValueError: If ``block`` is out of range.
        """
        self._require_in_range(block)
        slot = self._ring.slot(block)
        if slot.block == block:
            return
        if slot.state is SlotState.IN_USE:
            raise _bad_state("prefetch", block, slot, "free, loading or ready")
        self.h2d_num_bytes += self._load(block, slot)
        self.num_loads += 1

    def _load(self, block: int, slot: Slot) -> int:
        """Queue the copy of ``block`` into ``slot``; its number of bytes."""
        lender = self._lender
        # Until the copy is queued the slot holds nothing, should queueing it fail.
        slot.state, slot.block = SlotState.FREE, None
        with labelled("copy block", str(block)):
            source = self._slabs[block].bytes if lender is None else lender.borrow(block)
            target = slot.buffer[: source.numel()]
            slot.ready = self._streams.copy(target, source, after=slot.released)
        if lender is not None:
            lender.borrowed_until(block, slot.ready)
        slot.state, slot.block = SlotState.LOADING, block
        return source.numel()

    def acquire(self, block: int, phase: Phase) -> Slot:
        """Make ``block`` readable on the compute stream and hold it in its slot until release.

        Queues the copy first if nobody prefetched it, then the copies of the blocks that will be
        needed next and whose slots are not in use; the phase only steers which. A pinned block is
        there for good, unheld.

        Streams:
            The compute stream waits for the copy. Blocks the host only if a slab is pageable.

        Raises:
            SlotStateError: If the block's slot is in use already.
            ValueError: If ``block`` is out of range.
        """
        if self.is_pinned(block):
            return self._waited_for(self._ring.slot(block))
        self._require_in_range(block)
        slot = self._ring.slot(block)
        if slot.state is SlotState.IN_USE:
            raise _bad_state("acquire", block, slot, "free, loading or ready")
        # The layers of one block follow each other: together they are one visit.
        is_new_visit = self._visit != (block, phase)
        if is_new_visit and slot.block == block and slot.state is SlotState.READY:
            self.num_hits += 1
        self.prefetch(block)
        # Held before anything else is loaded, so that a wrong prediction cannot take the slot; and
        # not held if that fails, because the caller never gets to release what it did not get.
        before, slot.state = slot.state, SlotState.IN_USE
        try:
            self._prefetch_next(block, phase, in_use=slot.index)
            self._waited_for(slot)
        except BaseException:
            slot.state = before
            raise
        self._visit = (block, phase)
        return slot

    def _waited_for(self, slot: Slot) -> Slot:
        self._streams.wait(slot.ready)
        return slot

    def slot(self, block: int) -> Slot:
        """The one slot in which ``block`` may live, whatever it holds."""
        return self._ring.slot(block)

    def is_held(self, block: int) -> bool:
        """Whether ``block`` was acquired and not released yet."""
        slot = self._ring.slot(block)
        return slot.block == block and slot.state is SlotState.IN_USE

    def release(self, block: int) -> None:
        """End the visit: behind this point of the compute stream the slot may be overwritten.

        Of a pinned block, nothing is given up.

        Streams:
            Records on the compute stream. The copy that takes the slot over is queued by the next
            acquire, not here: the next layer may be of the same block.

        Raises:
            SlotStateError: If ``block`` is not in use.
        """
        if self.is_pinned(block):
            return
        slot = self._ring.slot(block)
        if slot.block != block or slot.state is not SlotState.IN_USE:
            raise _bad_state("release", block, slot, "in use by this block")
        slot.released = self._streams.record()
        slot.state = SlotState.READY

    def evict(self, block: int) -> None:
        """Forget ``block``, held or not: the next access loads it anew.

        Streams:
            As ``release`` if it is held.

        Raises:
            SlotStateError: If the block is not in its slot, or on its way.
            ValueError: If ``block`` is out of range.
        """
        self._require_in_range(block)
        slot = self._ring.slot(block)
        if slot.block != block or slot.state not in (SlotState.READY, SlotState.IN_USE):
            raise _bad_state("evict", block, slot, "in use or ready with this block")
        if slot.state is SlotState.IN_USE:
            slot.released = self._streams.record()
        slot.state, slot.block = SlotState.FREE, None

    def replace(self, block: int) -> None:
        """Queue the copy of another block into the slot of ``block``, if there is another.

        Raises:
            SlotStateError: If the block is in use.
            ValueError: If ``block`` is out of range.
        """
        self._require_in_range(block)
        num_slots = len(self._ring.slots)
        others = (k for k in range(block % num_slots, self.num_blocks, num_slots) if k != block)
        other = next(others, None)
        if other is not None:
            self.prefetch(other)

    def _require_in_range(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is out of range: there are {self.num_blocks} blocks")

    def _prefetch_next(self, block: int, phase: Phase, in_use: int) -> None:
        contents = [slot.block for slot in self._ring.slots]
        # A slot for each block, and every block in its own: nothing is ever missing again.
        if len(contents) < self.num_blocks or None in contents:
            expected = predict(block, phase, self.num_blocks)
            for upcoming in list(missing(contents, in_use, expected)):
                self.prefetch(upcoming)
        if self._lender is not None:
            contents = [slot.block for slot in self._ring.slots]
            expected = predict(block, phase, self.num_blocks)
            self._lender.read_ahead(loads(contents, expected))


def _bad_state(verb: str, block: int, slot: Slot, expected: str) -> SlotStateError:
    return SlotStateError(
        f"{verb} of block {block}: expected slot {slot.index} to be {expected}, found it "
        f"{slot.state.value} with block {slot.block}; a layer was entered twice without leaving"
    )
