"""The walk: what is loaded when, checked against optimal replacement computed on its own."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.slots.schedule import (
    Action,
    Phase,
    count,
    divide,
    missing,
    training_visits,
    walk,
)

Visit = tuple[int, Phase]

PHASES = st.sampled_from(Phase)
SIZES = [(blocks, slots) for blocks in range(1, 13) for slots in range(1, blocks + 1)]
sizes = st.sampled_from(SIZES)


@st.composite
def any_visits(draw: st.DrawFn) -> tuple[int, int, list[Visit]]:
    """Blocks, slots and visits in no order that anything predicts."""
    num_blocks, num_slots = draw(sizes)
    block = st.integers(0, num_blocks - 1)
    return num_blocks, num_slots, draw(st.lists(st.tuples(block, PHASES), max_size=40))


def num_loads(visits: Sequence[Visit], num_blocks: int, num_slots: int) -> int:
    return count(walk(visits, num_blocks, num_slots), "prefetch")


def check_safe(actions: Sequence[Action], num_slots: int) -> list[int]:
    """Replay a walk with slots of our own; the blocks in the order they were acquired."""
    contents: dict[int, int] = {}
    in_use: int | None = None
    acquired = []
    for kind, block in actions:
        slot = block % num_slots
        if kind == "prefetch":
            assert slot != in_use, f"block {block} is copied into a slot that computes: {actions}"
            assert contents.get(slot) != block, f"block {block} is copied twice: {actions}"
            contents[slot] = block
        elif kind == "acquire":
            assert in_use is None
            assert contents.get(slot) == block, f"block {block} is not in its slot: {actions}"
            in_use = slot
            acquired.append(block)
        else:
            assert kind == "release" and in_use == slot and contents[slot] == block
            in_use = None
    assert in_use is None
    return acquired


def belady(blocks: Sequence[int], num_slots: int) -> int:
    """Loads of a cache of that many blocks, freely placed, that evicts the block used latest."""
    held: set[int] = set()
    loads = 0
    for position, block in enumerate(blocks):
        if block in held:
            continue
        loads += 1
        if len(held) == num_slots:
            later = blocks[position + 1 :]
            held.remove(max(held, key=lambda b: later.index(b) if b in later else len(blocks)))
        held.add(block)
    return loads


def fewest_loads(blocks: Sequence[int], num_slots: int) -> int:
    """The same by trying every choice: the cheapest way to each set of held blocks."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for block in blocks:
        reached: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            if block in held:
                choices = [(held, cost)]
            elif len(held) < num_slots:
                choices = [(held | {block}, cost + 1)]
            else:
                choices = [((held - {victim}) | {block}, cost + 1) for victim in held]
            for choice, price in choices:
                reached[choice] = min(price, reached.get(choice, price))
        costs = reached
    return min(costs.values())


def totals(prefix: Sequence[Visit], one: Sequence[Visit], size: tuple[int, int]) -> list[int]:
    """Loads of none to four repetitions of ``one`` behind ``prefix``."""
    return [num_loads([*prefix, *list(one) * times], *size) for times in range(5)]


def differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(values)]


# The training zigzag, for every number of blocks and slots.


def test_zigzag_loads_2k_minus_s_first_and_2_k_minus_s_when_warm_which_is_optimal() -> None:
    """No cache of S blocks, wherever it may put them, loads fewer: neither cold nor warm."""
    for num_blocks, num_slots in SIZES:
        found = totals([], list(training_visits(num_blocks, 1)), (num_blocks, num_slots))
        assert found[1] == 2 * num_blocks - num_slots
        assert differences(found[1:]) == [2 * (num_blocks - num_slots)] * 3
        for steps in (1, 2, 3):
            blocks = [block for block, _ in training_visits(num_blocks, steps)]
            optimum = belady(blocks, num_slots)
            assert found[steps] == optimum
            if num_blocks <= 6:
                assert fewest_loads(blocks, num_slots) == optimum


def test_the_oracle_finds_a_better_way_where_there_is_one() -> None:
    """Cyclic passes, and blocks that share a slot, are where a fixed place is not optimal."""
    forwards = [(block, Phase.INFERENCE) for block in range(4)] * 3
    blocks = [block for block, _ in forwards]
    assert belady(blocks, 3) == fewest_loads(blocks, 3) < num_loads(forwards, 4, 3)
    assert fewest_loads([0, 2, 0, 2, 0, 2], 2) == belady([0, 2, 0, 2, 0, 2], 2) == 2


def test_zigzag_is_safe_and_copies_overlap_with_compute() -> None:
    """Every copy but the very first has the compute of another block to hide behind."""
    for num_blocks, num_slots in SIZES:
        visits = list(training_visits(num_blocks, 3))
        actions = list(walk(visits, num_blocks, num_slots))
        assert check_safe(actions, num_slots) == [block for block, _ in visits]
        assert count(actions, "acquire") == count(actions, "release") == 6 * num_blocks
        is_computing = False
        for position, (kind, block) in enumerate(actions):
            if num_slots > 1 and kind == "prefetch" and position > 0 and not is_computing:
                following = next(
                    action for action in actions[position:] if action.kind == "acquire"
                )
                assert following.block != block
            is_computing = kind == "acquire" or (is_computing and kind == "prefetch")


# Anything else.


@settings(deadline=None)
@given(any_visits())
def test_any_walk_is_safe(case: tuple[int, int, list[Visit]]) -> None:
    num_blocks, num_slots, visits = case
    actions = list(walk(visits, num_blocks, num_slots))
    assert check_safe(actions, num_slots) == [block for block, _ in visits]


@settings(deadline=None)
@given(any_visits())
def test_training_is_warm_again_one_step_after_anything(
    case: tuple[int, int, list[Visit]],
) -> None:
    num_blocks, num_slots, visits = case
    step = list(training_visits(num_blocks, 1))
    once, twice = (num_loads([*visits, *step * steps], num_blocks, num_slots) for steps in (1, 2))
    assert twice - once == 2 * (num_blocks - num_slots)


# The two decisions by themselves.


@pytest.mark.parametrize(
    ("contents", "in_use", "expected", "wanted"),
    [
        ([0, None], 0, [1, 2, 3], [1]),
        ([0, 1], 1, [2, 3], [2]),
        ([0, 1], 0, [2, 3], []),
        ([2, 1], 0, [1, 0], []),
        ([2, 3], 1, [3, 2, 1, 0], []),
        ([2, 3, 4], 1, [2, 1, 0], [2]),
        ([0, None, None], 0, [1, 2, 2, 1, 0], [1, 2]),
        ([0, 4, 2], 1, [5, 6, 7], [5, 6]),
        ([None], 0, [0], []),
    ],
)
def test_missing_stops_at_a_slot_in_use_and_at_a_promised_one(
    contents: list[int | None], in_use: int, expected: list[int], wanted: list[int]
) -> None:
    assert list(missing(contents, in_use, expected)) == wanted


@pytest.mark.parametrize(
    ("asked", "division"),
    [
        # layers, layers a block, slots, layers to keep -> blocks that stream and stay, slots;
        # layers recomputed, layers to keep rounded
        ((6, 1, 2, 0), (6, 0, 2, 6, 0)),
        ((6, 1, 5, 2), (4, 2, 3, 4, 2)),
        ((6, 2, 2, 0), (3, 0, 2, 6, 0)),
        ((6, 2, 3, 3), (2, 1, 2, 4, 2)),  # three layers are one whole block
        ((6, 2, 2, 4), (1, 2, 1, 2, 4)),  # one block needs but one slot
        ((5, 2, 2, 1), (3, 0, 2, 5, 0)),  # the last block has one layer, and is not rounded up to
        ((5, 2, 2, 2), (2, 1, 2, 4, 2)),
        ((5, 2, 2, 5), (0, 3, 0, 0, 5)),  # all layers: the short block too
        ((5, 2, 9, 0), (3, 0, 3, 5, 0)),
        ((6, 1, 2, 4), (2, 4, 2, 2, 4)),  # two slots for those that stream, whatever stays
        ((3, 4, 2, 2), (1, 0, 1, 3, 0)),
        ((3, 4, 2, 3), (0, 1, 0, 0, 3)),
        ((3, 1, 2, 7), (0, 3, 0, 0, 3)),
    ],
)
def test_kept_layers_are_rounded_to_blocks(
    asked: tuple[int, int, int, int], division: tuple[int, ...]
) -> None:
    assert divide(*asked) == division
