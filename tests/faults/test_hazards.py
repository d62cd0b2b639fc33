"""Any walk at all of blocks in slots, under the worst copy engine: each read is of its own block.

Copies are as late and overwrites as early as the events allow (see ``tools.adversary``). That
models trained so are exact is in ``tests/exact/test_cells``.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.slots.ring import SlotState
from poros.slots.schedule import Phase, count
from tests.slots import Slots
from tools.adversary import AdversarialStreams


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


@settings(deadline=None, max_examples=100)
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
