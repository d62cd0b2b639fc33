"""Decides how a run divides its budget between slots and layers that keep their graph.

Note: What the budget means
    Bytes on the device that PyTorch's allocator holds for the model and its training: tensors, and
    gaps between them. Not counted are the context of CUDA, other processes, and memory that this
    process held besides the model when its first step began.

On a GPU only the floor is estimated. Training begins with two slots. When the self-check has passed
and the optimizer has stepped, one whole step is measured (``poros.model.measuring``). Then the rest
of the budget, but for a fiftieth, is spent: a slot costs exactly its bytes, and a layer that keeps
its graph the bytes that its recomputation kept. The next step is measured again.

On a CPU, whose allocator has no statistics, a given budget is spent by the estimate of
``poros.plan``.

Once all blocks have a slot, micro-batches have no load to share. A layer that keeps its graph saves
each separate micro-batch a recomputation, but only one of those that go together. So where most
layers can keep their graph, micro-batches run one after the other: see ``is_quicker_alone``.

In both cases room for a batch larger than any before is made before it trains, and a batch that
cannot fit is refused. No decision changes a bit of the result.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from poros.config import MIN_SLOTS, StreamingPolicy, parse_num_bytes
from poros.errors import VRAMBudgetError
from poros.host.layout import BlockLayout, slot_sizes
from poros.slots.schedule import divide
from poros.utils.formatting import size

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan

logger = logging.getLogger(__name__)

LEAST_KEPT = 0.5
"""Share of the layers that keep their graph from which on micro-batches are quicker alone. With the
kernels of 7B at 512 tokens, measured on an H200 (8 together share dense weights as well), the two
are equal at 0.55 there, and at 0.4 with the rates of an RTX 3090."""
SURELY_KEPT = 0.75
"""The same share for an estimate that nothing has measured yet."""


class DeviceMemoryError(VRAMBudgetError, torch.OutOfMemoryError):
    """The device ran out: PyTorch's own error, with what a step needs."""


class Shape(NamedTuple):
    """The shape of a micro-batch."""

    batch_size: int
    seq_len: int
    micro_batches: int = 1
    """Micro-batches that go through the blocks together."""

    def is_within(self, other: "Shape") -> bool:
        return all(own <= others for own, others in zip(self, other, strict=True))


class ResidencyPlan(NamedTuple):
    """The room that blocks and graphs get on the device."""

    num_slots: int
    """All slots, those of blocks that stay included."""
    keep_last: int
    """Layers at the end that keep their graph."""
    offload_inputs: bool = False
    """Whether inputs of the other layers wait for their backward on the host."""

    def within(self, other: "ResidencyPlan") -> "ResidencyPlan":
        """The room that fits wherever either does."""
        return ResidencyPlan(
            min(self.num_slots, other.num_slots),
            min(self.keep_last, other.keep_last),
            self.offload_inputs or other.offload_inputs,
        )


class Wanted(NamedTuple):
    """The fields of a room that a policy fixes; None leaves a field to the budget."""

    num_slots: int | None
    keep_last: int | None
    offload_inputs: bool | None


Estimate = Callable[[Shape, "int | None", Wanted, bool, bool], "MemoryPlan"]
"""Estimates a step with micro-batches of a shape, for a budget in bytes and a wanted room, with the
self-check's share or without, with room for recorded visits or without. Raises ``VRAMBudgetError``
if it does not fit."""


@dataclass(frozen=True)
class BlockSizes:
    """The blocks of one model, as they are divided among slots.

    Attributes:
        layouts: One layout per block.
        num_layers: Layers of all blocks.
        block_size: Layers of a block; the last may have fewer.
        head: Bytes of a head that moves to the device when every block has a slot.
    """

    layouts: Sequence[BlockLayout]
    num_layers: int
    block_size: int
    head: int = 0

    def num_bytes(self, room: ResidencyPlan) -> int:
        """Bytes of all slots, and of the head if it is on the device."""
        division = divide(self.num_layers, self.block_size, room.num_slots, room.keep_last)
        streamed = self.layouts[: division.num_streamed]
        pinned = self.layouts[division.num_streamed :]
        ring = slot_sizes(streamed, division.ring_slots) if streamed else []
        head = self.head if self.holds_all(room) else 0
        return sum(ring) + sum(layout.num_bytes for layout in pinned) + head

    def holds_all(self, room: ResidencyPlan) -> bool:
        """Whether every block has a slot."""
        return room.num_slots >= len(self.layouts)


class Needs(NamedTuple):
    """Bytes that a step needs besides its slots."""

    persistent: int
    """Bytes held between steps too: adapters, optimizer state, embedding, head."""
    transient: int
    """Bytes held within a step in which every layer is recomputed."""
    graph: int
    """Bytes that one layer's graph keeps."""

    def scaled(self, factor: float) -> "Needs":
        """Scale the needs to a batch that takes ``factor`` times as much."""
        return Needs(self.persistent, int(self.transient * factor), int(self.graph * factor))


def most_of(steps: Iterable[Needs]) -> Needs:
    """Return the maximum of each need over these steps."""
    return Needs(*map(max, zip(*steps, strict=True)))


def step_num_bytes(room: ResidencyPlan, sizes: BlockSizes, needs: Needs) -> int:
    """Bytes that a step takes in ``room``."""
    graphs = min(room.keep_last, sizes.num_layers) * needs.graph
    return needs.persistent + needs.transient + graphs + sizes.num_bytes(room)


def affordable(
    budget: int, sizes: BlockSizes, needs: Needs, wanted: Wanted, offload: bool
) -> ResidencyPlan | None:
    """Return the most room for a budget, or None if not even the least room fits.

    Slots come first, and kept layers when every block has a slot.
    A slot saves two copies of a block in each step, a kept layer its recomputation.

    Args:
        budget: In bytes.
        needs: Needs besides the slots; as long as no graph was measured, no layer is kept.
        offload: Whether inputs of layers wait on the host.
    """
    num_blocks = len(sizes.layouts)
    choices = range(min(MIN_SLOTS, num_blocks), num_blocks + 1)
    slots = [wanted.num_slots] if wanted.num_slots else choices
    rooms = [ResidencyPlan(num_slots, wanted.keep_last or 0, offload) for num_slots in slots]
    fitting = [room for room in rooms if step_num_bytes(room, sizes, needs) <= budget]
    if not fitting:
        return None
    best = fitting[-1]
    if wanted.keep_last is None and best.num_slots >= num_blocks and needs.graph:
        numbers = {*range(0, sizes.num_layers, sizes.block_size), sizes.num_layers}
        rooms = [best._replace(keep_last=number) for number in sorted(numbers)]
        best = [room for room in rooms if step_num_bytes(room, sizes, needs) <= budget][-1]
    return best


def growth(shape: Shape, known: Shape) -> float:
    """Return an upper bound of the ratio between the memory of a batch and that of a known one.

    The memory of a step grows no faster than the rows, and no faster than the square of their
    length (attention without a fused kernel; everything else grows with the length itself).
    """
    rows, length = shape.batch_size / known.batch_size, shape.seq_len / known.seq_len
    together = max(1.0, shape.micro_batches / known.micro_batches)
    return max(1.0, rows * length * max(1.0, length) * together)


def is_quicker_alone(
    room: ResidencyPlan, num_blocks: int, num_layers: int, share: float = LEAST_KEPT
) -> bool:
    """Whether micro-batches take less time one after the other than together.

    Args:
        room: The room that one micro-batch after the other has.
        share: Least share of the layers that keep their graph.
    """
    return room.num_slots >= num_blocks and room.keep_last >= share * num_layers


class Sizer:
    """Decides on the room of one run, by estimates.

    Args:
        estimate: See ``Estimate``.

    Attributes:
        budget: Budget in bytes; None if nothing is sized.
    """

    def __init__(self, policy: StreamingPolicy, estimate: Estimate) -> None:
        self.budget: int | None = None
        self.wanted = Wanted(
            None if policy.slots is None else max(policy.slots, MIN_SLOTS),
            policy.keep_last,
            policy.offload_boundaries,
        )
        if policy.vram_budget is not None:
            self.budget = parse_num_bytes(policy.vram_budget, "vram_budget")
        self.decides = self.budget is not None
        """Whether ``begin`` has to be asked."""
        self._estimate = estimate
        self._shapes: list[Shape] = []
        """The shapes that need the most; others fit wherever these do."""
        self._conditions: object = None
        self._plan: MemoryPlan | None = None
        self.replays = True
        """Whether there is room for recorded visits."""
        self.is_quicker_alone = False
        """Whether micro-batches are to go one after the other, because that takes less time."""
        self.shares_dense = True
        """Whether there is room for a layer's dense weights, which micro-batches share."""
        self.check_kernels = "peft"
        """Adapter kernels of the resident layers that the self-check compares with."""

    @property
    def plan(self) -> "MemoryPlan | None":
        """The estimate for the shape that needs the most; None before the first step."""
        return self._plan

    def begin(
        self, shape: Shape, room: ResidencyPlan, is_checking: bool, adapters: object
    ) -> ResidencyPlan:
        """Return the room in which a micro-batch is to train.

        Args:
            is_checking: Whether the self-check is not complete yet.
            adapters: Compares unequal if other adapters are trained.

        Raises:
            VRAMBudgetError: If the budget is below what such a step needs.
        """
        shapes = with_shape(self._shapes, shape)
        conditions = (is_checking, adapters)
        if shapes == self._shapes and conditions == self._conditions:
            return room
        plans = [self.estimated(known, self.wanted, is_checking) for known in shapes]
        rooms = [room_of(plan) for plan in plans]
        chosen = reduce(ResidencyPlan.within, rooms)
        if any(other != chosen for other in rooms):
            fixed = Wanted(*chosen)
            plans = [self.estimated(known, fixed, is_checking) for known in shapes]
        self._plan = max(plans, key=lambda plan: plan.total_num_bytes)
        self._shapes, self._conditions = shapes, conditions
        return chosen

    def made_room(self) -> None:
        """The blocks have got the room that ``begin`` gave."""

    def recorded(self) -> None:
        """Visits were recorded, which takes memory from now on."""

    def refused(self, where: str, error: torch.OutOfMemoryError) -> Exception | None:
        """Return the error for a device without memory for that room; None to go on with less."""
        self._shapes, self._conditions = [], None
        return self.explain(where, error)

    def estimated(self, shape: Shape, wanted: Wanted, is_checking: bool) -> "MemoryPlan":
        """Estimate a step, or raise an error by which trainers know that a batch is too large."""
        try:
            plan = self._estimate(shape, self.budget, wanted, is_checking, True)
            self.replays, self.shares_dense = plan.replays, plan.shares_dense
            if is_checking:
                self.check_kernels = plan.check_kernels
            return plan
        except VRAMBudgetError as error:
            raise VRAMBudgetError(
                f"{error}\nRefused before CUDA could run out of memory."
            ) from None

    def explain(self, where: str, error: torch.OutOfMemoryError) -> VRAMBudgetError:
        """Turn an out-of-memory error into one that names what a step needs."""
        text = f"{where}: expected room for the step, found none left on the device"
        plan = self.plan
        if plan is not None and self.budget is not None:
            text += (
                f". Estimated were {size(plan.total_num_bytes)} of a budget of "
                f"{size(self.budget)}:\n{plan.table()}\nSomething "
                "else takes what is missing (other processes, tensors of the caller, "
                "fragmentation): use a smaller vram_budget, a smaller batch or shorter sequences"
            )
        else:
            text += ". Use vram_budget to have slots and kept layers chosen, or fewer slots"
        return DeviceMemoryError(f"{text}. PyTorch says: {error}")


def room_of(plan: "MemoryPlan") -> ResidencyPlan:
    """The room that an estimate is for."""
    return ResidencyPlan(plan.num_slots, plan.keep_last, plan.offload_boundaries)


def with_shape(shapes: Sequence[Shape], shape: Shape) -> list[Shape]:
    """``shapes`` and ``shape``, without those that are within another."""
    if any(map(shape.is_within, shapes)):
        return list(shapes)
    return [*(known for known in shapes if not known.is_within(shape)), shape]


def shape_of(args: Sequence[Any], kwargs: dict[str, Any], micro_batches: int = 1) -> Shape | None:
    """Return the micro-batch's shape from a model's arguments, or None if no argument shows it."""
    named = (kwargs.get(key) for key in ("inputs_embeds", "input_ids", "hidden_states"))
    for value in (*named, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return Shape(value.shape[0], value.shape[1], micro_batches)
    return None
