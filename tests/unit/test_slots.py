"""Slots: what a walk loads and when, which bytes its visits read, and what is refused.

Any walk at all, under the worst copy engine, reads its own blocks; what the runtime does equals the
walk.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.errors import PorosError, SlotStateError
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase, divide
from poros.streams import Event
from tests.journal import count, training_visits, walk
from tests.slots import Slots
from tools.adversary import AdversarialStreams

FREE, LOADING, READY, IN_USE = SlotState.FREE, SlotState.LOADING, SlotState.READY, SlotState.IN_USE
FORWARD, BACKWARD, INFERENCE = Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE
SIZES = [(blocks, slots) for blocks in range(1, 13) for slots in range(1, blocks + 1)]


def make(num_blocks: int = 4, num_slots: int = 2) -> Slots:
    return Slots(num_blocks, num_slots, AdversarialStreams())


# What is loaded when.


def test_training_loads_as_few_blocks_as_it_can_and_copies_beside_compute() -> None:
    """2K - S blocks first and 2 (K - S) when warm; only the very first copy is waited for."""
    for num_blocks, num_slots in SIZES:
        found = []
        for steps in range(1, 5):
            visits = list(training_visits(num_blocks, steps))
            actions = list(walk(visits, num_blocks, num_slots))
            found.append(count(actions, "prefetch"))
        assert found[0] == 2 * num_blocks - num_slots
        warm = [after - before for before, after in pairwise(found)]
        assert warm == [2 * (num_blocks - num_slots)] * 3
        if num_slots > 1:
            pairs = enumerate(pairwise(actions))
            on_demand = [
                place
                for place, (left, right) in pairs
                if left.kind == "prefetch" and right == ("acquire", left.block)
            ]
            assert on_demand == [0]
        ahead = [("prefetch", block) for block in range(1, num_slots)]
        assert actions[2 : num_slots + 1] == ahead


@pytest.mark.parametrize(
    ("asked", "division"),
    [
        # layers, layers a block, slots, layers to keep -> blocks that stream and stay, slots;
        # layers recomputed, layers to keep rounded
        ((6, 1, 2, 0), (6, 0, 2, 6, 0)),
        ((6, 1, 5, 2), (4, 2, 3, 4, 2)),
        ((6, 2, 3, 3), (2, 1, 2, 4, 2)),  # three layers are one whole block
        ((6, 2, 2, 4), (1, 2, 1, 2, 4)),  # one block needs but one slot
        ((5, 2, 2, 1), (3, 0, 2, 5, 0)),  # the last block has one layer, and is not rounded up to
        ((5, 2, 2, 5), (0, 3, 0, 0, 5)),  # all layers: the short block too
        ((5, 2, 9, 0), (3, 0, 3, 5, 0)),
        ((6, 1, 2, 4), (2, 4, 2, 2, 4)),  # two slots for those that stream, whatever stays
        ((3, 1, 2, 7), (0, 3, 0, 0, 3)),
    ],
)
def test_kept_layers_are_rounded_to_blocks(
    asked: tuple[int, int, int, int], division: tuple[int, ...]
) -> None:
    assert divide(*asked) == division


# What is read.


class Interrupted(Exception):
    """Something in a layer that is none of the runtime's business."""


def visit(slots: Slots, block: int, phase: Phase, is_interrupted: bool = False) -> None:
    try:
        with slots.visiting(block, phase):
            slots.read(block)
            assert [state for state, _ in slots.states()].count(IN_USE) == 1
            slots.check_ready_bytes()
            if is_interrupted:
                raise Interrupted
            slots.read(block)
    except Interrupted:
        assert is_interrupted
    assert IN_USE not in [state for state, _ in slots.states()]
    slots.check_ready_bytes()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_whatever_is_visited_reads_its_own_bytes_and_the_next_step_is_warm(
    data: st.DataObject,
) -> None:
    """Parts of passes, up or down, some interrupted, and prefetches that nothing predicts."""
    num_blocks, num_slots = data.draw(st.sampled_from(SIZES[:36]), label="blocks and slots")
    slots = make(num_blocks, num_slots)
    streams: Any = slots.streams
    block = st.integers(0, num_blocks - 1)
    parts = st.tuples(st.sampled_from(Phase), block, block, st.booleans()) | block
    visits: list[tuple[int, Phase]] = []
    is_plain = True
    with streams.watch():
        for part in data.draw(st.lists(parts, max_size=8), label="parts"):
            if isinstance(part, int):
                slots.manager.prefetch(part)
                is_plain = False
                continue
            phase, first, last, is_interrupted = part
            for each in range(first, last, 1 if last > first else -1):
                visit(slots, each, phase)
                visits.append((each, phase))
            visit(slots, last, phase, is_interrupted)
            visits.append((last, phase))
        if is_plain:
            assert slots.journal == list(walk(visits, num_blocks, num_slots))
        slots.train()
        before = slots.manager.num_loads, slots.manager.num_hits
        slots.train()
    loads = 2 * (num_blocks - num_slots)
    assert slots.manager.num_loads - before[0] == loads
    # What was not loaded for a visit was still there.
    assert slots.manager.num_hits - before[1] == 2 * num_blocks - loads
    copied = [action.block for action in slots.journal if action.kind == "prefetch"]
    assert slots.manager.num_loads == streams.num_copies == len(copied)
    sizes = [slab.layout.num_bytes for slab in slots.host.slabs]
    assert slots.manager.h2d_num_bytes == streams.num_bytes == sum(sizes[each] for each in copied)
    needed = [max(sizes[slot::num_slots]) for slot in range(num_slots)]
    assert [slot.buffer.numel() for slot in slots.ring.slots] == needed


def test_a_block_is_replaced_by_another_of_its_slot() -> None:
    slots = make(5, 2)
    slots.visit(2, INFERENCE)
    for replaced, other in ((2, 0), (0, 2)):
        slots.manager.replace(replaced)
        assert slots.states()[0] == (LOADING, other)
    alone = make(2, 2)
    alone.visit(1, INFERENCE)
    before = alone.states()
    alone.manager.replace(1)
    assert alone.states() == before, "its slot is nobody else's"


# What is refused, and copies that fail.

Act = Callable[[Slots], object]


def hold(slots: Slots) -> None:
    slots.manager.acquire(0, FORWARD)


HELD = r"slot 0 .*in use with block 0"
# What came before, what is done, and what is said of the slot.
ILLEGAL: dict[str, tuple[Act, Act, str]] = {
    "acquire twice": (hold, hold, "acquire of block 0: .*" + HELD),
    "acquire into a slot in use": (hold, lambda s: s.manager.acquire(2, FORWARD), HELD),
    "prefetch into a slot in use": (hold, lambda s: s.manager.prefetch(2), HELD),
    "release of a free slot": (
        lambda slots: None,
        lambda slots: slots.manager.release(1),
        r"release of block 1: .*slot 1 .*in use by this block.*free with block None",
    ),
    "release while loading": (
        lambda slots: slots.manager.prefetch(1),
        lambda slots: slots.manager.release(1),
        r"slot 1 .*loading with block 1",
    ),
    "release of another block": (hold, lambda s: s.manager.release(2), HELD),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_transition_raises_and_changes_nothing(case: str) -> None:
    arrange, act, message = ILLEGAL[case]
    slots = make()
    arrange(slots)
    states, journal = slots.states(), list(slots.journal)
    with pytest.raises(SlotStateError) as caught:
        act(slots)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value
    assert isinstance(caught.value, PorosError | RuntimeError)
    assert slots.states() == states and slots.journal == journal


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_out_of_range_is_refused(block: int) -> None:
    """-1 would otherwise be the last block under another number."""
    slots = make()
    slots.manager.prefetch(block % 2)
    before = slots.states()
    for act in (
        lambda: slots.manager.acquire(block, FORWARD),
        lambda: slots.manager.prefetch(block),
        lambda: slots.manager.evict(block),
        lambda: slots.manager.replace(block),
    ):
        with pytest.raises(ValueError, match=rf"{block}.*4 blocks"):
            act()
        assert slots.states() == before and slots.manager.num_loads == 1


class CopyFails(AdversarialStreams):
    """The copy with this number (from 1) is refused, once: before or after it has been queued."""

    def __init__(self, number: int, is_queued: bool = False) -> None:
        super().__init__()
        self.countdown = number
        self.is_queued = is_queued

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        self.countdown -= 1
        if self.countdown == 0:
            if self.is_queued:
                super().copy(target, source, after=after)
            raise OSError("the copy was refused")
        return super().copy(target, source, after=after)


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("number", range(1, 11))
def test_training_goes_on_after_any_copy_failed(number: int, is_queued: bool) -> None:
    """Whether it was wanted now or ahead of time; and no slot says that it holds what it lost."""
    slots = Slots(4, 2, CopyFails(number, is_queued))
    with pytest.raises(OSError, match="refused"):
        slots.train(2)
    assert not any(state is IN_USE for state, _ in slots.states()), slots.states()
    slots.check_ready_bytes()
    slots.train(2)
