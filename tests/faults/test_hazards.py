"""Streaming under the worst copy engine: cells stay exact, and every read is of its own block.

Copies are as late and overwrites as early as the events allow (see ``poros.gates.adversary``), and
every operator's reads are observed.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poros
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams
from poros.gates.reference import TrainingSpec, Trajectory, train
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase, count, training_visits, walk
from tests.slots import Slots
from tests.snapshots import assert_same_run
from tests.support import AdversarialPrepare, make_model

NUM_LAYERS = 6


def expected_loads(num_blocks: int, num_slots: int, num_passes: int) -> int:
    """2K - S for the first forward and backward, 2 (K - S) for each one after it."""
    return 2 * num_blocks - num_slots + (num_passes - 1) * 2 * (num_blocks - num_slots)


class Residents:
    """Resident runs, each made once.

    They are observed like the streamed ones: under autocast an observed 4-bit matmul computes in
    another precision, because autocast ends where the observation begins.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Trajectory] = {}

    def of(self, cell: "Cell") -> Trajectory:
        if cell not in self._made:
            with AdversarialStreams().watch() if cell.watched else nullcontext():
                self._made[cell] = train(cell.build(), cell.batches(), cell.spec())
        return self._made[cell]


class Cell(NamedTuple):
    """What is trained, whatever streams."""

    architecture: str = "qwen2"
    num_layers: int = NUM_LAYERS
    dtype: torch.dtype = torch.bfloat16
    autocast_dtype: torch.dtype | None = torch.bfloat16
    accumulation: int = 1
    watched: bool = True

    def build(self) -> Any:
        sizes = {"num_layers": self.num_layers, "hidden_size": 64}
        return make_model(self.architecture, dropout=0.05, dtype=self.dtype, **sizes)

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return tiny.make_batches(2 * self.accumulation, num_tokens=12)

    def spec(self) -> TrainingSpec:
        return TrainingSpec(
            num_steps=2, accumulation=self.accumulation, autocast_dtype=self.autocast_dtype
        )


@pytest.fixture(scope="module")
def residents() -> Residents:
    return Residents()


def check_cell(residents: Residents, cell: Cell, **policy: int) -> None:
    prepare = AdversarialPrepare()
    with prepare.watching() if cell.watched else nullcontext():
        model = prepare(cell.build(), **policy)
        found = train(model, cell.batches(), cell.spec())
    assert_same_run(residents.of(cell), found)
    runtime = poros.runtime(model)
    stats, num_blocks, num_slots = runtime.stats(), runtime.num_blocks, runtime.num_slots
    assert num_blocks == -(-cell.num_layers // policy.get("block_size", 1))
    assert num_slots == min(policy.get("slots", 2), num_blocks)
    passes = 2 * cell.accumulation
    loads = expected_loads(num_blocks, num_slots, passes)
    # Three that count for themselves: the runtime, the copy stream, and the walk.
    assert stats["num_loads"] == prepare.streams.num_copies == loads
    copied = [block for kind, block in prepare.journal if kind == "prefetch"]
    num_bytes = sum(runtime.host_slab(block).numel() for block in copied)
    assert stats["h2d_num_bytes"] == prepare.streams.num_bytes == num_bytes
    plan = walk(training_visits(num_blocks, passes), num_blocks, num_slots)
    assert count(plan, "prefetch") == count(prepare.journal, "prefetch") == loads
    assert stats["num_hits"] == 2 * num_blocks * passes - loads


def block_sizes_and_slots() -> Iterator[Any]:
    """Beyond one slot too many, further ones are the same walk: slow."""
    for block_size in (1, 2, 3, NUM_LAYERS):
        for slots in (2, 3, 4, NUM_LAYERS):
            is_slow = slots > max(2, NUM_LAYERS // block_size + 1) or (slots == 4) != (
                block_size == 1
            )
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(block_size, slots, marks=marks)


@pytest.mark.parametrize(("block_size", "slots"), list(block_sizes_and_slots()))
def test_every_block_size_and_number_of_slots_is_exact(
    block_size: int, slots: int, residents: Residents
) -> None:
    check_cell(residents, Cell(), block_size=block_size, slots=slots)


OTHERS: dict[str, tuple[Cell, dict[str, int]]] = {
    # With states that pass beside layers; the tests of cells have the other architectures.
    **{name: (Cell(name, 4), {}) for name in ("gemma4_shared_kv", "mixtral")},
    "accumulation": (Cell(accumulation=2), {"slots": 3}),
    "autocast": (Cell(dtype=torch.float32), {}),
    "autocast, unwatched": (Cell(dtype=torch.float32, watched=False), {}),
    "unwatched": (Cell(watched=False), {}),
    "blocks of 4 and 2 layers": (Cell(), {"block_size": 4}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_exact(name: str, residents: Residents) -> None:
    cell, policy = OTHERS[name]
    check_cell(residents, cell, **policy)


# Any walk at all.


class Interrupted(Exception):
    """Something in a layer that is none of the runtime's business."""


class Layers:
    """Layers in blocks, visited in ways that nothing predicts; every read is checked."""

    def __init__(self, num_layers: int, block_size: int, num_slots: int) -> None:
        self.blocks = [layer // block_size for layer in range(num_layers)]
        self.streams = AdversarialStreams()
        self.slots = Slots(self.blocks[-1] + 1, num_slots, self.streams)

    def visit(self, layer: int, phase: Phase) -> None:
        block = self.blocks[layer]
        with self.slots.visiting(block, phase):
            self.slots.read(block)
            states = [state for state, _ in self.slots.states()]
            assert states.count(SlotState.IN_USE) == 1
            self.slots.check_ready_bytes()
            self.slots.read(block)

    def forward(self, phase: Phase = Phase.FORWARD, stop: int | None = None) -> None:
        for layer in range(len(self.blocks))[:stop]:
            self.visit(layer, phase)

    def backward(self, stop: int | None = None) -> None:
        for layer in list(reversed(range(len(self.blocks))))[:stop]:
            self.visit(layer, Phase.BACKWARD)

    def interrupt(self, layer: int, phase: Phase, reads: bool) -> None:
        """A pass up to a layer in whose visit something raises."""
        if phase is Phase.BACKWARD:
            self.forward()
            self.backward(len(self.blocks) - 1 - layer)
        else:
            self.forward(phase, layer)
        block = self.blocks[layer]
        with pytest.raises(Interrupted), self.slots.visiting(block, phase):
            if reads:
                self.slots.read(block)
            raise Interrupted

    def act(self, what: str, layer: int, phase: Phase, flag: bool) -> None:
        match what:
            case "train":
                self.forward()
                self.backward()
            case "evaluate between forward and backward":
                self.forward()
                self.forward(Phase.INFERENCE, layer + 1 if flag else None)
                self.backward()
            case "two forwards, then two backwards":
                self.forward()
                self.forward()
                self.backward()
                self.backward()
            case "part of a pass":
                self.forward(phase, layer)
                self.backward(layer if flag else 0)
            case "interrupt":
                self.interrupt(layer, phase, reads=flag)
            case "one layer":
                self.visit(layer, phase)
            case "prefetch":
                self.slots.manager.prefetch(self.blocks[layer])

    def require_idle(self) -> None:
        assert SlotState.IN_USE not in [state for state, _ in self.slots.states()]
        self.slots.check_ready_bytes()


ACTIONS = (
    "train",
    "evaluate between forward and backward",
    "two forwards, then two backwards",
    "part of a pass",
    "interrupt",
    "one layer",
    "prefetch",
)


@settings(deadline=None, max_examples=75)
@given(st.data())
def test_no_walk_reads_a_slot_that_does_not_hold_its_block(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 3), label="block_size")
    num_blocks = data.draw(st.integers(1, 6), label="blocks")
    # The last block may be smaller.
    num_layers = block_size * num_blocks - data.draw(st.integers(0, block_size - 1), label="less")
    num_slots = data.draw(st.integers(2, num_blocks + 1), label="slots")
    layers = Layers(num_layers, block_size, num_slots)
    action = st.tuples(
        st.sampled_from(ACTIONS),
        st.integers(0, num_layers - 1),
        st.sampled_from(Phase),
        st.booleans(),
    )
    with layers.streams.watch():
        for what, layer, phase, flag in data.draw(st.lists(action, max_size=8), label="actions"):
            layers.act(what, layer, phase, flag)
            layers.require_idle()
        # Whatever happened, one healthy step later the walk is warm.
        manager = layers.slots.manager
        layers.act("train", 0, Phase.FORWARD, False)
        before = manager.num_loads, layers.streams.num_copies
        layers.act("train", 0, Phase.FORWARD, False)
        layers.require_idle()
    loads = 2 * (manager.num_blocks - len(layers.slots.ring.slots))
    assert (manager.num_loads - before[0], layers.streams.num_copies - before[1]) == (loads,) * 2
    assert manager.num_loads == layers.streams.num_copies == count(layers.slots.journal, "prefetch")
