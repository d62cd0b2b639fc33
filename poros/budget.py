"""The device memory a run may take, made into room for blocks when its first batch is known.

With ``vram_budget`` that much is planned for. Without, and without ``slots`` or ``keep_last``, a
GPU's free memory is: what is free when the first batch arrives, less a tenth of the device and at
least 1 GiB for other processes, fragmentation, libraries, and what an evaluation needs beyond a
training step. Whatever goes wrong with a plan that nobody asked for leaves two slots, loudly. On a
CPU nothing is planned unasked.

In the course of a run:

- the first step is planned with the self-check's share, which becomes room as soon as it has
  passed;
- when the optimizer has stepped for the first time, the peak up to then is compared with the plan;
  if it was higher, the difference is taken off the budget, once;
- a batch that is longer or larger than any before is planned for before it trains, and the room is
  the smallest of those that the shapes so far need.

No decision changes a bit of the result.
"""

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy, parse_num_bytes
from poros.errors import VRAMBudgetError
from poros.model.attach import Takeover

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan
    from poros.planning.planner import Planner
    from poros.self_check.check import SelfCheck

logger = logging.getLogger(__name__)

MARGIN_SHARE = 0.1
LEAST_MARGIN = 2**30


class DeviceMemoryError(VRAMBudgetError, torch.OutOfMemoryError):
    """The device ran out: PyTorch's own error, with what a step needs."""


class _Shape(NamedTuple):
    """Of a micro-batch."""

    batch_size: int
    seq_len: int

    def is_within(self, other: "_Shape") -> bool:
        return self.batch_size <= other.batch_size and self.seq_len <= other.seq_len


class _Room(NamedTuple):
    """What a plan decides."""

    num_slots: int
    keep_last: int
    offload_boundaries: bool

    @classmethod
    def of(cls, plan: "MemoryPlan") -> "_Room":
        return cls(plan.num_slots, plan.keep_last, plan.offload_boundaries)

    def within(self, other: "_Room") -> "_Room":
        """The room that fits wherever either does."""
        return _Room(
            min(self.num_slots, other.num_slots),
            min(self.keep_last, other.keep_last),
            self.offload_boundaries or other.offload_boundaries,
        )


class Budget:
    """The budget of one prepared model.

    Args:
        policy: Of the model.
        takeover: What streams it.
        self_check: Of its first step, if any.

    Attributes:
        plan: Of the shape that decides the room; None without a budget, or before the first step.
    """

    def __init__(
        self, policy: StreamingPolicy, takeover: Takeover, self_check: "SelfCheck | None"
    ) -> None:
        self.plan: MemoryPlan | None = None
        self._policy = policy
        self._takeover = takeover
        self._self_check = self_check
        self._is_given = policy.vram_budget is not None
        is_chosen = policy.slots is not None or policy.keep_last is not None
        self._is_off = not self._is_given and (is_chosen or free_memory(takeover.device) is None)
        self._num_bytes = 0
        self._planner: Planner | None = None
        self._measurement: _Measurement | None = None
        self._shapes: list[_Shape] = []
        """Those that need the most; others fit wherever these do."""
        self._conditions: object = None

    def begin(self, args: tuple[Any, ...]) -> None:
        """Make room for a micro-batch before its first layer trains on ``args``.

        Raises:
            VRAMBudgetError: If a given budget is below what such a step needs; the room is what it
                was.
        """
        model = self._takeover.model()
        if self._is_off or model is None or not args or not isinstance(args[0], torch.Tensor):
            return
        shape = _Shape(*args[0].shape[:2])
        if self.plan is None:
            self._num_bytes = self._begin_with(model, args[0])
        elif self._measurement is not None and self._measurement.is_over():
            self._num_bytes = max(1, self._num_bytes - self._measurement.excess())
            self._measurement = None
        shapes = self._shapes
        if not any(map(shape.is_within, shapes)):
            shapes = [*(each for each in shapes if not each.is_within(shape)), shape]
        is_checking = self._self_check is not None and self._self_check.status == "pending"
        conditions = (self._num_bytes, is_checking, self._takeover.adapters())
        if shapes == self._shapes and conditions == self._conditions:
            return
        try:
            self._follow(model, shapes, is_checking)
        except Exception as error:
            if self._is_given:
                raise
            self._give_up(error)
            return
        self._shapes, self._conditions = shapes, conditions

    def explain(self, where: str, error: torch.OutOfMemoryError) -> VRAMBudgetError:
        """The error of the device as one that says what a step needs."""
        text = f"{where}: expected room for the step, found none left on the device"
        if self.plan is not None:
            text += (
                f". Planned were {self.plan.total_num_bytes / 1e9:.2f} GB of a budget of "
                f"{self._num_bytes / 1e9:.2f} GB:\n{self.plan.table()}\nSomething "
                "else takes what is missing (other processes, tensors of the caller, "
                "fragmentation): use a smaller vram_budget, a smaller batch or shorter sequences"
            )
        else:
            text += ". Use vram_budget to have slots and kept layers planned, or fewer slots"
        return DeviceMemoryError(f"{text}. PyTorch says: {error}")

    def _begin_with(self, model: nn.Module, hidden: torch.Tensor) -> int:
        device = self._takeover.device
        if allocated_memory(device) is not None:
            self._measurement = _Measurement(model, hidden, self._takeover)
        if self._policy.vram_budget is not None:
            return parse_num_bytes(self._policy.vram_budget, "vram_budget")
        return (free_memory(device) or 0) + _held(model, self._takeover)

    def _follow(self, model: nn.Module, shapes: list[_Shape], is_checking: bool) -> None:
        """Plan for each of the shapes, and make the room that is enough for all."""
        policy = self._policy
        given = (policy.slots, policy.keep_last, policy.offload_boundaries)
        plans = [self._find(model, each, is_checking, given) for each in shapes]
        rooms = [_Room.of(each) for each in plans]
        chosen = rooms[0]
        for each in rooms[1:]:
            chosen = chosen.within(each)
        if any(each != chosen for each in rooms):
            plans = [self._find(model, each, is_checking, chosen) for each in shapes]
        takeover = self._takeover
        if (chosen.num_slots, chosen.keep_last) != (takeover.num_slots, takeover.keep_last):
            try:
                takeover.resize(chosen.num_slots, chosen.keep_last)
            except torch.OutOfMemoryError as error:
                raise self.explain("vram_budget", error) from error
        if chosen.offload_boundaries != takeover.is_offloading:
            takeover.offload_boundaries(chosen.offload_boundaries)
        self.plan = found = max(plans, key=lambda each: each.total_num_bytes)
        if self._measurement is not None:
            self._measurement.planned(found)
        logger.info(
            "poros: %.2f GB planned of a budget of %.2f GB: %d of %d blocks on the device, %d "
            "layers kept%s",
            found.total_num_bytes / 1e9,
            self._num_bytes / 1e9,
            found.num_slots,
            found.num_blocks,
            found.keep_last,
            ", inputs of layers on the host" if found.offload_boundaries else "",
        )

    def _find(
        self,
        model: nn.Module,
        shape: _Shape,
        is_checking: bool,
        room: tuple[int | None, int | None, bool | None],
    ) -> "MemoryPlan":
        if self._planner is None:
            from poros.planning.planner import Planner

            self._planner = Planner(model)
        from poros.planning.request import PlanRequest

        slots, keep_last, offload_boundaries = room
        request = PlanRequest(
            **shape._asdict(),
            # With its unit: what was measured means bytes, however few they are.
            vram_budget=f"{self._num_bytes}B",
            self_check=is_checking,
            block_size=self._policy.block_size,
            num_slots=None if slots is None else max(slots, MIN_SLOTS),
            keep_last=keep_last,
            offload_boundaries=offload_boundaries,
            # Gradients may be there already: how many passes make a step is not known here.
            accumulation=2,
        )
        try:
            return self._planner.plan(request)
        except VRAMBudgetError as error:
            # In words by which trainers that look for a batch size know it.
            raise VRAMBudgetError(
                f"{error}\nRefused before it could end in a CUDA out of memory."
            ) from None

    def _give_up(self, error: Exception) -> None:
        """Nobody asked for a plan, so what was the default without one has to do."""
        takeover = self._takeover
        if (takeover.num_slots, takeover.keep_last) != (MIN_SLOTS, 0):
            takeover.resize(MIN_SLOTS, 0)
        logger.warning(
            "poros: free memory (%.2f GB) could not be planned; going on with %d slots (%s: %s)",
            self._num_bytes / 1e9,
            takeover.num_slots,
            type(error).__name__,
            error,
        )
        self.plan, self._is_off = None, True


class _Measurement:
    """The peak of the first optimizer step, if it is the highest of the process so far."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor, takeover: Takeover) -> None:
        self._device = takeover.device
        now, self._peak_before = allocated_memory(self._device) or (0, 0)
        # What the process holds besides the model and, of the step, its first layer's input.
        self._others = now - _held(model, takeover) - hidden.untyped_storage().nbytes()
        self._largest: MemoryPlan | None = None
        # Of a LoRA, the first step changes at least the matrix that starts at zero.
        trained = [each for each in model.parameters() if each.requires_grad]
        self._watched = [(each, _sample(each)) for each in trained[-8:]]

    def planned(self, plan: "MemoryPlan") -> None:
        """The step, or part of it, runs with ``plan``."""
        if self._largest is None or plan.total_num_bytes > self._largest.total_num_bytes:
            self._largest = plan

    def is_over(self) -> bool:
        """Whether an optimizer has stepped, or will not change these any more. May wait for it."""
        return any(
            not now.requires_grad or not torch.equal(_sample(now), before)
            for now, before in self._watched
        )

    def excess(self) -> int:
        """Bytes by which the peak is over what was planned."""
        _, peak = allocated_memory(self._device) or (0, 0)
        if peak <= self._peak_before or self._largest is None:
            return 0
        # Tokens and masks were there, and are in the plan.
        others = max(0, self._others - self._largest.terms["inputs"])
        excess = max(0, peak - others - self._largest.total_num_bytes)
        if excess:
            logger.warning(
                "poros: the first step took %.3f GB more than planned; planning with so much less",
                excess / 1e9,
            )
        return excess


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still allocate on a GPU, less the margin (see above)."""
    if device.type != "cuda":
        return None
    free, whole = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.memory.get_per_process_memory_fraction(device) * whole)
    reserved = torch.cuda.memory_reserved(device)
    cached = reserved - torch.cuda.memory_allocated(device)
    margin = max(LEAST_MARGIN, int(MARGIN_SHARE * whole))
    return max(0, min(free, allowed - reserved) + cached - margin)


def allocated_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes that this process has allocated on a GPU, now and at most so far."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Some elements of a parameter: an optimizer's step changes them if it changes any."""
    return parameter.detach().reshape(-1)[:64].clone()


def _held(model: nn.Module, takeover: Takeover) -> int:
    """Bytes on the device that belong to the model and are terms of its plan."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.device == takeover.device and not takeover.small.holds(each)
    }
    return sum(storages.values()) + takeover.device_num_bytes
