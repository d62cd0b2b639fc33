"""The device memory a run may take, made into room for blocks when its first batch is known.

With ``vram_budget`` that much is planned for. Without, and without ``slots`` or ``keep_last``, a
GPU's free memory is: what is free when the first batch arrives, less a tenth of the device and at
least 1 GiB for other processes, fragmentation and libraries. On a CPU nothing is planned unasked.

In the course of a run:

- the first step is planned with the self-check's share, which becomes room as soon as it has
  passed;
- when the optimizer has stepped for the first time, the peak up to then is compared with the plan;
  if it was higher, the difference is taken off the budget, once;
- a batch that is longer or larger than any before is planned for before it trains.

No decision changes a bit of the result.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import StreamingPolicy, parse_num_bytes
from poros.errors import UnsupportedModelError, VRAMBudgetError
from poros.takeover import Takeover

if TYPE_CHECKING:
    from poros.gates.self_check import SelfCheck
    from poros.planner import Planner
    from poros.terms import MemoryPlan

logger = logging.getLogger(__name__)

MARGIN_SHARE = 0.1
LEAST_MARGIN = 2**30


class Budget:
    """The budget of one prepared model.

    Args:
        policy: Of the model.
        takeover: What streams it.
        self_check: Of its first step, if any.

    Attributes:
        plan: What the budget is planned into; None without one, or before the first step.
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
        self._planned: dict[str, Any] = {}
        self._measurement: _Measurement | None = None

    def begin(self, args: tuple[Any, ...]) -> None:
        """Make room for a micro-batch before its first layer trains on ``args``.

        Raises:
            VRAMBudgetError: If a given budget is below what such a step needs; the room is what it
                was.
        """
        model = self._takeover.model()
        if self._is_off or model is None or not args or not isinstance(args[0], torch.Tensor):
            return
        batch_size, seq_len = args[0].shape[:2]
        if self.plan is None:
            self._num_bytes = self._begin_with(model, args[0])
        elif self._measurement is not None and self._measurement.is_over():
            self._num_bytes = max(1, self._num_bytes - self._measurement.excess(self.plan))
            self._measurement = None
        wanted = {
            "batch_size": max(batch_size, self._planned.get("batch_size", 0)),
            "seq_len": max(seq_len, self._planned.get("seq_len", 0)),
            "vram_budget": self._num_bytes,
            "self_check": self._self_check is not None and self._self_check.status == "pending",
        }
        if wanted != self._planned:
            self._follow(model, wanted)

    def explain(self, where: str, error: torch.OutOfMemoryError) -> VRAMBudgetError:
        """The error of the device as one that says what a step needs."""
        text = f"{where}: expected room for the step, found none left on the device"
        if self.plan is not None:
            rows = "\n".join(
                f"  {name:<12} {size / 1e9:8.3f} GB"
                for name, size in self.plan.terms.items()
                if size
            )
            text += (
                f". Planned were {self.plan.total_num_bytes / 1e9:.2f} GB of a budget of "
                f"{self._num_bytes / 1e9:.2f} GB:\n{rows}\nSomething else takes what is missing "
                "(other processes, tensors of the caller, fragmentation): use a smaller "
                "vram_budget, a smaller batch or shorter sequences"
            )
        else:
            text += ". Use vram_budget to have slots and kept layers planned, or fewer slots"
        return VRAMBudgetError(f"{text}. PyTorch says: {error}")

    def _begin_with(self, model: nn.Module, hidden: torch.Tensor) -> int:
        device = self._takeover.device
        if allocated_memory(device) is not None:
            self._measurement = _Measurement(model, hidden, self._takeover)
        if self._policy.vram_budget is not None:
            return parse_num_bytes(self._policy.vram_budget, "vram_budget")
        return (free_memory(device) or 0) + _held(model, self._takeover)

    def _follow(self, model: nn.Module, wanted: dict[str, Any]) -> None:
        try:
            found = self._find(model, wanted)
        except (VRAMBudgetError, UnsupportedModelError) as error:
            if self._is_given:
                raise
            # Nobody asked for a plan: what was the default without one may do.
            logger.warning(
                "poros: free memory (%.2f GB) was not planned; going on with %d slots: %s",
                self._num_bytes / 1e9,
                self._takeover.num_slots,
                error,
            )
            self._is_off = True
            return
        takeover = self._takeover
        if (found.num_slots, found.keep_last) != (takeover.num_slots, takeover.keep_last):
            try:
                takeover.resize(found.num_slots, found.keep_last)
            except torch.OutOfMemoryError as error:
                raise self.explain("vram_budget", error) from error
        if found.offload_boundaries != takeover.is_offloading:
            takeover.offload_boundaries(found.offload_boundaries)
        self.plan, self._planned = found, wanted
        logger.info(
            "poros: %.2f GB planned of a budget of %.2f GB: %d of %d blocks on the device, %d "
            "layers kept%s",
            found.total_num_bytes / 1e9,
            self._num_bytes / 1e9,
            found.num_slots,
            found.num_blocks,
            found.keep_last,
            ", inputs of layers offloaded" if found.offload_boundaries else "",
        )

    def _find(self, model: nn.Module, wanted: dict[str, Any]) -> "MemoryPlan":
        if self._planner is None:
            from poros.planner import Planner

            self._planner = Planner(model)
        with torch.random.fork_rng(devices=[]):
            return self._planner.plan(
                **wanted,
                block_size=self._policy.block_size,
                num_slots=self._policy.slots,
                keep_last=self._policy.keep_last,
                offload_boundaries=self._policy.offload_boundaries,
                # Gradients may be there already: how many passes make a step is not known here.
                accumulation=2,
            )


class _Measurement:
    """The peak of the first optimizer step, if it is the highest of the process so far."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor, takeover: Takeover) -> None:
        self._device = takeover.device
        now, self._peak_before = allocated_memory(self._device) or (0, 0)
        # What the process holds besides the model and, of the step, its first layer's input.
        self._others = now - _held(model, takeover) - hidden.untyped_storage().nbytes()
        trained = [each for each in model.parameters() if each.requires_grad]
        # Both matrices of one LoRA: the first step changes at least the one that starts at zero.
        self._watched = [(each, each.detach().clone()) for each in trained[:2]]

    def is_over(self) -> bool:
        """Whether an optimizer has stepped. Waits for the device."""
        return any(not torch.equal(now, before) for now, before in self._watched)

    def excess(self, plan: "MemoryPlan") -> int:
        """Bytes by which the peak is over ``plan``."""
        _, peak = allocated_memory(self._device) or (0, 0)
        if peak <= self._peak_before:
            return 0
        # Tokens and masks were there, and are in the plan.
        others = max(0, self._others - plan.terms["inputs"])
        excess = max(0, peak - others - plan.total_num_bytes)
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
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + cached - max(LEAST_MARGIN, int(MARGIN_SHARE * whole)))


def allocated_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes that this process has allocated on a GPU, now and at most so far."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def _held(model: nn.Module, takeover: Takeover) -> int:
    """Bytes on the device that belong to the model and are terms of its plan."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.device == takeover.device
    }
    return sum(storages.values()) + takeover.device_num_bytes
