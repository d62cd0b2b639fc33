"""Real slots with known bytes, for tests of everything below the model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from support import same_bits

from poros.host.layout import BlockLayout
from poros.host.store import HostStore
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing, Slot, SlotState
from poros.slots.schedule import Phase
from poros.streams import StreamContext
from tests.journal import Action, keep_journal, training_visits


def random_store(sizes: Sequence[int]) -> HostStore:
    """A host store of blocks of these sizes in bytes (rounded up), each of bytes of its own."""
    layouts = [
        BlockLayout.pack([("weight", torch.empty(size, dtype=torch.uint8))]) for size in sizes
    ]
    host = HostStore.allocate(layouts)
    for block, slab in enumerate(host.slabs):
        generator = torch.Generator().manual_seed(block)
        # Below the poison, so that no byte of a block can be mistaken for it.
        slab.bytes.copy_(torch.randint(255, slab.bytes.shape, generator=generator))
    return host


@dataclass
class Slots:
    """A manager over real host slabs and real slots, and reads that know what they should see."""

    num_blocks: int
    num_slots: int
    streams: StreamContext
    sizes: Sequence[int] = ()
    journal: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = self.sizes or [256 * (1 + block % 3) for block in range(self.num_blocks)]
        self.host = random_store(sizes)
        layouts = [slab.layout for slab in self.host.slabs]
        self.ring = DeviceRing(layouts, self.num_slots, self.streams)
        self.manager = BlockManager(self.host, self.ring, self.streams)
        keep_journal(self.manager, self.journal)

    def read(self, block: int) -> None:
        """What a kernel of this block would do: read its bytes from its slot."""
        slot = self.ring.slot(block)
        assert (slot.state, slot.block) == (SlotState.IN_USE, block)
        source = self.host.slabs[block].bytes
        assert same_bits(slot.buffer[: source.numel()], source), f"block {block}: other bytes"

    @contextmanager
    def visiting(self, block: int, phase: Phase) -> Iterator[Slot]:
        """A visit as a layer makes it: released however its body ends."""
        slot = self.manager.acquire(block, phase)
        try:
            yield slot
        finally:
            self.manager.release(block)

    def visit(self, block: int, phase: Phase) -> None:
        with self.visiting(block, phase):
            self.read(block)

    def give_up(self, block: int) -> None:
        """A visit that ends in the middle: what is held is forgotten, and loaded anew."""
        self.manager.acquire(block, Phase.FORWARD)
        self.read(block)
        self.manager.evict(block)
        self.visit(block, Phase.FORWARD)

    def train(self, num_steps: int = 1) -> None:
        for block, phase in training_visits(self.num_blocks, num_steps):
            self.visit(block, phase)

    def infer(self) -> None:
        for block in range(self.num_blocks):
            self.visit(block, Phase.INFERENCE)

    def states(self) -> list[tuple[SlotState, int | None]]:
        return [(slot.state, slot.block) for slot in self.ring.slots]

    def check_ready_bytes(self) -> None:
        """Every slot that says READY holds its block, looked at behind the back of any watch."""
        for slot in self.ring.slots:
            if slot.state is SlotState.READY:
                assert slot.block is not None
                expected: Any = self.host.slabs[slot.block].bytes.numpy()
                found: Any = slot.buffer.numpy()[: expected.size]
                assert (found == expected).all(), f"slot {slot.index} lost block {slot.block}"
