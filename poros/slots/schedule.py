"""The order in which blocks are visited and loaded, as a pure function.

Note: The zigzag and the slots
    Training visits blocks 0..K-1, K-1..0, 0..K-1, and so on. With S slots, block k always lives in
    slot k mod S. On a zigzag that is the optimal eviction: the last S blocks are still there at
    the turn, the first S at the next one, so a warm forward and backward loads 2 (K - S) blocks
    and a forward-only pass at most K. With S = K nothing is loaded: resident is the limit of the
    same mechanism, not another code path.

The prediction only ever decides what to prefetch. A visit that was not predicted (an evaluation in
the middle, two forwards in a row, an exception) is correct, only slower.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import NamedTuple

from poros.config import MIN_SLOTS


class Phase(Enum):
    """What a visit belongs to, which is all that predicts the next ones."""

    FORWARD = "forward"
    """A forward whose backward will follow: the walk turns after the last block."""
    BACKWARD = "backward"
    """A backward: the walk turns after block 0, into the next forward."""
    INFERENCE = "inference"
    """A forward without gradient: the walk starts again at block 0 after the last block."""


class Division(NamedTuple):
    """Which blocks pass through how many slots, and which stay on the device."""

    num_streamed: int
    """Blocks that pass through slots: the first ones."""
    num_pinned: int
    """Blocks that stay: the last ones, whose layers keep their graph."""
    ring_slots: int
    """Slots for those that stream."""
    num_recomputed: int
    """Layers of the blocks that stream."""
    keep_last: int
    """Layers that were asked to be kept, rounded."""


def divide(num_layers: int, block_size: int, num_slots: int, keep_last: int) -> Division:
    """Divide the blocks as ``StreamingPolicy`` says; ``num_slots`` are those of all blocks.

    The last block may have fewer layers. ``keep_last`` is rounded down to whole blocks, or is all.
    """
    num_blocks = -(-num_layers // block_size)
    num_pinned = min(keep_last // block_size, num_blocks)
    if keep_last >= num_layers:
        num_pinned = num_blocks
    num_streamed = num_blocks - num_pinned
    ring_slots = min(max(MIN_SLOTS, num_slots - num_pinned), num_streamed)
    return Division(
        num_streamed=num_streamed,
        num_pinned=num_pinned,
        ring_slots=ring_slots,
        num_recomputed=min(num_streamed * block_size, num_layers),
        keep_last=min(num_pinned * block_size, num_layers),
    )


def predict(block: int, phase: Phase, num_blocks: int) -> Iterator[int]:
    """The visits expected after ``block``, nearest first, for at least one full pass."""
    if phase is Phase.FORWARD:
        return chain(range(block + 1, num_blocks), reversed(range(num_blocks)))
    if phase is Phase.BACKWARD:
        return chain(reversed(range(block)), range(num_blocks))
    return chain(range(block + 1, num_blocks), range(num_blocks))


def missing(contents: Sequence[int | None], in_use: int, expected: Iterable[int]) -> Iterator[int]:
    """The blocks to load now, in the order they will be needed.

    Looks ahead until a block needs a slot that is in use or promised to an earlier visit: loading
    past that point would evict what is needed sooner. ``contents`` are the blocks that the slots
    hold or are being filled with, ``in_use`` is the slot whose block computes now.
    """
    num_slots = len(contents)
    promised: dict[int, int] = {}
    for block in expected:
        slot = block % num_slots
        if slot in promised:
            if promised[slot] != block:
                return
            continue
        promised[slot] = block
        if contents[slot] != block:
            if slot == in_use:
                return
            yield block
        if len(promised) == num_slots:
            return


def loads(contents: Sequence[int | None], expected: Iterable[int]) -> Iterator[int]:
    """The blocks that ``expected`` visits will load, in order: what to read ahead from a disk."""
    held = list(contents)
    for block in expected:
        if held[block % len(held)] != block:
            held[block % len(held)] = block
            yield block
