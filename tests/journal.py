"""What a manager of slots does, in order, and what it should do in a walk over the blocks."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from poros.slots.manager import BlockManager
from poros.slots.schedule import Phase, missing, predict


class Action(NamedTuple):
    kind: str
    """``prefetch`` queues a copy; ``acquire`` waits for it; ``release`` ends the compute."""
    block: int


class _Journalled(BlockManager):
    journal: list[Action]

    def prefetch(self, block: int) -> None:
        before = self.num_loads
        super().prefetch(block)
        if self.num_loads > before:
            self.journal.append(Action("prefetch", block))

    def _prefetch_next(self, block: int, phase: Phase, in_use: int) -> None:
        self.journal.append(Action("acquire", block))
        super()._prefetch_next(block, phase, in_use)

    def release(self, block: int) -> None:
        super().release(block)
        if not self.is_pinned(block):
            self.journal.append(Action("release", block))

    def evict(self, block: int) -> None:
        was_held = block < self.num_blocks and self.is_held(block)
        super().evict(block)
        if was_held:
            self.journal.append(Action("release", block))
        self.journal.append(Action("evict", block))


def keep_journal(manager: BlockManager, journal: list[Action]) -> None:
    """Have everything that ``manager`` does from now on appended to ``journal``."""
    manager.__class__ = _Journalled
    manager.journal = journal  # type: ignore[attr-defined]


def walk(visits: Iterable[tuple[int, Phase]], num_blocks: int, num_slots: int) -> Iterator[Action]:
    """Everything that happens while ``visits`` take place one after the other, from empty slots.

    The runtime takes its decisions with the same two functions, so its journal equals this walk.
    """
    contents: list[int | None] = [None] * num_slots

    def load(blocks: Iterable[int]) -> Iterator[Action]:
        for block in blocks:
            contents[block % num_slots] = block
            yield Action("prefetch", block)

    for block, phase in visits:
        slot = block % num_slots
        if contents[slot] != block:
            yield from load([block])
        yield Action("acquire", block)
        yield from load(list(missing(contents, slot, predict(block, phase, num_blocks))))
        yield Action("release", block)


def training_visits(num_blocks: int, num_steps: int) -> Iterator[tuple[int, Phase]]:
    """The zigzag: one forward and one backward over all blocks per step."""
    for _ in range(num_steps):
        yield from ((block, Phase.FORWARD) for block in range(num_blocks))
        yield from ((block, Phase.BACKWARD) for block in reversed(range(num_blocks)))


def count(actions: Iterable[Action], kind: str) -> int:
    return sum(action.kind == kind for action in actions)
