"""Decides how a run divides its budget between slots and layers that keep their graph.

Note: What the budget means
    Bytes on the device that PyTorch's allocator holds for the model and its training: tensors, and
    gaps between them. Not counted are the context of CUDA, other processes, and memory that this
    process held besides the model when its first step began.

Estimates are those of ``poros.plan``. On a GPU training begins with two slots. When the self-check
has passed and the optimizer has stepped, one whole step is measured (``poros.model.measuring``).
Then the rest of the budget, but for a fiftieth, is spent by estimates, corrected by what the step
took beyond its own. The next step is measured again.

On a CPU, whose allocator has no statistics, a given budget is spent by the estimate alone.

Once all blocks have a slot, micro-batches have no load to share, but still the work of making a
layer's 4-bit weights dense. Layers that keep their graph save each micro-batch a recomputation, and
there is memory for more of them if micro-batches are separate. So these run one after the other
where most layers can keep their graph and each has so many tokens that this takes less time: see
``keeps_most``.

In both cases room for a batch larger than any before is made before it trains, and a batch that
cannot fit is refused. No decision changes a bit of the result.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from poros.config import StreamingPolicy, parse_num_bytes
from poros.errors import PorosError, VRAMBudgetError
from poros.replay.graphs import SAVED_TOGETHER
from poros.utils.formatting import size

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan

LEAST_KEPT = 0.5
"""Share of the layers that keep their graph from which on micro-batches may be quicker alone."""
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

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.seq_len * self.micro_batches

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


def share_kept(plan: "MemoryPlan") -> float:
    """The share of the layers that keep their graph."""
    return plan.keep_last / (plan.num_blocks * plan.block_size)


def keeps_most(plan: "MemoryPlan", share: float, num_together: int, kept_together: float) -> bool:
    """Whether micro-batches take less time in this plan of a single one than so many together.

    No block is loaded, at least this share of the layers keep their graph, and what they save more
    than if micro-batches went together (``kept_together``: the share that would keep its graph) is
    more by a quarter than what making weights dense for each micro-batch costs, instead of once for
    all: those that go together cost the host less.
    """
    kept = share_kept(plan)
    num_tokens = plan.options["batch_size"] * plan.options["seq_len"]
    shared = 1.25 * plan.dense_tokens * (1 - 1 / num_together)
    is_quicker = (kept - SAVED_TOGETHER * kept_together) * num_tokens >= shared
    return plan.num_slots >= plan.num_blocks and kept >= share and is_quicker


class Sizer:
    """Decides on the room of one run, by estimates.

    Args:
        estimate: See ``Estimate``.

    Attributes:
        budget: Budget in bytes; None if nothing is sized.
        decides: Whether ``begin`` has to be asked.
        replays: Whether there is room for recorded visits.
        is_quicker_alone: Whether micro-batches are to go one after the other, because that takes
            less time.
        shares_dense: Whether there is room for a layer's dense weights, which micro-batches share.
        check_kernels: Adapter kernels of the resident layers that the self-check compares with.
    """

    def __init__(self, policy: StreamingPolicy, estimate: Estimate) -> None:
        given = policy.vram_budget
        self.budget = None if given is None else parse_num_bytes(given, "vram_budget")
        self.wanted = Wanted(policy.slots, policy.keep_last, policy.offload_boundaries)
        self.decides = self.budget is not None
        self.replays = self.shares_dense = True
        self.is_quicker_alone = False
        self.check_kernels = "peft"
        self._estimate = estimate
        self._shapes: list[Shape] = []
        """Shapes that the room was made for; what is within them fits wherever they do."""
        self._conditions: object = None
        self._largest: tuple[Shape, ResidencyPlan] | None = None
        """The latest batch that was larger than those before it, and the latest room."""
        self._planned: tuple[object, MemoryPlan | None] = (None, None)

    @property
    def plan(self) -> "MemoryPlan | None":
        """The estimate for the largest batch in the latest room; None before the first step.

        The share of the self-check, which only the first step has, is left out.
        """
        known = (self._largest, self._conditions, self.replays)
        if self._largest is not None and self._planned[0] != known:
            shape, room = self._largest
            try:
                plan = self._estimate(shape, None, Wanted(*room), False, self.replays)
            except PorosError:
                plan = None  # a kind of adapters that cannot be estimated
            self._planned = (known, plan)
        return self._planned[1]

    @property
    def joins(self) -> bool:
        """Whether there is room for what visits take besides, once they are joined."""
        plan = self.plan if self.decides else None
        return plan is None or plan.joins

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
        rooms = [room_of(self.estimated(known, self.wanted, is_checking)) for known in shapes]
        room = reduce(ResidencyPlan.within, rooms)
        self._shapes, self._conditions = shapes, conditions
        self._note(shape, room)
        return room

    def _note(self, shape: Shape, room: ResidencyPlan) -> None:
        largest = shape if self._largest is None else self._largest[0]
        self._largest = (largest if shape.is_within(largest) else shape), room

    def made_room(self) -> None:
        """The blocks have got the room that ``begin`` gave."""

    def recorded(self) -> None:
        """Visits were recorded, which takes memory from now on."""

    def refused(self, where: str, error: torch.OutOfMemoryError) -> Exception | None:
        """Return the error for a device without memory for that room; None to go on with less."""
        self._shapes = []
        return self.explain(where, error)

    def estimated(
        self, shape: Shape, wanted: Wanted, is_checking: bool, budget: int | None = None
    ) -> "MemoryPlan":
        """Estimate a step, or raise an error by which trainers know that a batch is too large.

        Args:
            budget: In bytes; None for the whole budget.
        """
        try:
            plan = self._estimate(shape, budget or self.budget, wanted, is_checking, True)
        except VRAMBudgetError as error:
            raise VRAMBudgetError(
                f"{error}\nRefused before CUDA could run out of memory."
            ) from None
        self.replays = plan.replays
        if plan.micro_batches > 1:  # a single one has nobody to share with
            self.shares_dense = plan.shares_dense
        if is_checking:
            self.check_kernels = plan.check_kernels
        return plan

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
