"""The manager: slot states and what may follow what, counters, journal, a device that refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.errors import PorosError, SlotStateError
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase, count, walk
from poros.streams import Event
from tests.slots import Slots
from tools.adversary import AdversarialStreams

FREE, LOADING, READY, IN_USE = SlotState.FREE, SlotState.LOADING, SlotState.READY, SlotState.IN_USE
FORWARD, BACKWARD, INFERENCE = Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE


def make(num_blocks: int = 4, num_slots: int = 2) -> Slots:
    return Slots(num_blocks, num_slots, AdversarialStreams())


# Illegal transitions.


Act = Callable[[Slots], object]


def hold(slots: Slots) -> None:
    slots.manager.acquire(0, FORWARD)


# What came before, what is done, and what is said of the slot.
ILLEGAL: dict[str, tuple[Act, Act, str]] = {
    "acquire twice": (
        hold,
        hold,
        r"acquire of block 0: .*slot 0 .*free, loading or ready.*in use with block 0",
    ),
    "acquire into a slot in use": (
        hold,
        lambda slots: slots.manager.acquire(2, FORWARD),
        r"acquire of block 2: .*slot 0 .*in use with block 0",
    ),
    "prefetch into a slot in use": (
        hold,
        lambda slots: slots.manager.prefetch(2),
        r"prefetch of block 2: .*slot 0 .*in use with block 0",
    ),
    "release of a free slot": (
        lambda slots: None,
        lambda slots: slots.manager.release(1),
        r"release of block 1: .*slot 1 .*in use by this block.*free with block None",
    ),
    "release while loading": (
        lambda slots: slots.manager.prefetch(1),
        lambda slots: slots.manager.release(1),
        r"release of block 1: .*slot 1 .*loading with block 1",
    ),
    "release twice": (
        lambda slots: slots.visit(3, FORWARD),
        lambda slots: slots.manager.release(3),
        r"release of block 3: .*slot 1 .*ready with block 3",
    ),
    "release of another block": (
        hold,
        lambda slots: slots.manager.release(2),
        r"release of block 2: .*slot 0 .*in use with block 0",
    ),
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


@pytest.mark.parametrize("block", [-1, 4, 100])
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


# Prefetch.


def test_a_block_that_lost_its_slot_or_was_evicted_is_loaded_again() -> None:
    """There are other bytes on the host since then: only a new copy brings them."""
    slots = make(4, 2)
    slots.visit(0, FORWARD)
    slots.visit(2, FORWARD)
    slots.host.slabs[0].bytes.bitwise_xor_(0x0F)
    slots.visit(0, FORWARD)
    slots.visit(1, INFERENCE)
    slots.manager.evict(1)
    assert slots.states()[1] == (FREE, None)
    slots.host.slabs[1].bytes.bitwise_xor_(0x0F)
    slots.visit(1, INFERENCE)


def test_a_block_is_replaced_by_another_of_its_slot() -> None:
    slots = make(5, 2)
    slots.visit(2, INFERENCE)
    slots.manager.replace(2)
    assert slots.states()[0] == (LOADING, 0)
    slots.manager.replace(0)
    assert slots.states()[0] == (LOADING, 2)
    alone = make(2, 2)
    alone.visit(1, INFERENCE)
    before = alone.states()
    alone.manager.replace(1)
    assert alone.states() == before, "its slot is nobody else's"


# Counters and journal.


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(1, 2), (2, 2), (5, 2), (5, 3), (6, 6)])
def test_counters_agree_with_the_copy_stream_and_with_the_walk(
    num_blocks: int, num_slots: int
) -> None:
    slots = make(num_blocks, num_slots)
    num_slots = min(num_blocks, num_slots)
    streams: Any = slots.streams
    for steps in range(1, 4):
        slots.train()
        loads = 2 * num_blocks - num_slots + 2 * (num_blocks - num_slots) * (steps - 1)
        assert slots.manager.num_loads == streams.num_copies == loads
        assert slots.manager.h2d_num_bytes == streams.num_bytes
        assert count(slots.journal, "prefetch") == loads
        # What was not loaded for a visit was still there.
        assert slots.manager.num_hits == 2 * num_blocks * steps - loads
    copied = [action.block for action in slots.journal if action.kind == "prefetch"]
    sizes = [slab.layout.num_bytes for slab in slots.host.slabs]
    assert slots.manager.h2d_num_bytes == sum(sizes[block] for block in copied)


@settings(deadline=None)
@given(st.data())
def test_the_journal_of_any_visits_is_the_walk(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 8))
    num_slots = data.draw(st.integers(1, num_blocks))
    visit = st.tuples(st.integers(0, num_blocks - 1), st.sampled_from(Phase))
    visits = data.draw(st.lists(visit, max_size=30))
    slots = make(num_blocks, num_slots)
    for block, phase in visits:
        slots.visit(block, phase)
        slots.check_ready_bytes()
    assert slots.journal == list(walk(visits, num_blocks, num_slots))


# Copies that fail.


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
