"""The request of a plan: one step's shape, budget and policy, and what its optimizer keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from poros.config import StreamingPolicy, parse_num_bytes
from poros.errors import PolicyError

_MIN_8BIT_NUM_ELEMENTS, _8BIT_BLOCK = 4096, 256
"""bitsandbytes keeps smaller states in float32, and one float32 scale per block of others."""
_8BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
COUNTED = ("adamw_torch_fused", "adamw_torch", *_8BIT, "sgd")
"""Optimizers whose states the plan counts exactly."""


@dataclass(frozen=True)
class Speeds:
    """Measured or given rates, for the forecast of time."""

    copy_gb_per_s: float
    """Rate of copies from page-locked host memory to the device, and of copies back meanwhile."""
    tflop_per_s: float
    """Rate of the model's linear layers, dequantization included; taken for all products."""
    dense_tokens: float = 400.0
    """Tokens whose product with a weight takes as long as making its 4 bits dense twice. By
    published rates 200 on an RTX 3060, 220 on an RTX 3090, 420 on an RTX 4090, 660 on an H100."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One training step to plan. The model belongs to ``Planner``.

    Args:
        seq_len: Tokens per row; the plan assumes full rows.
        batch_size: Rows per micro-batch.
        accumulation: Micro-batches per optimizer step; with several, all gradients and the layers'
            inputs are in memory at the same time.
        micro_batches: How many of these are to go through the blocks together. The plan takes as
            many as fit: all of them, half of them, and so on. With a budget that lets most layers
            keep their graph it takes long ones one after the other, which is faster then.
        policy: How the base moves. ``vram_budget=None`` plans two slots and reports what that
            needs; other fields that are None are chosen for the budget. With ``loss="reference"``
            the head counts as if it were resident; what an order of ``lora_paths`` needs for
            W + sAB and X'dY counts as workspace; ``share_dense`` and ``cuda_graphs`` of None are
            planned for a GPU. Its ``self_check`` and ``device`` are not read.
        without_recordings: With ``cuda_graphs=None``, plan a run in which nothing is recorded, as
            where there is no room for it.
        self_check: Plan for the first step too, in which every layer is checked.
        optimizer: As in ``TrainingArguments.optim``.
        optimizer_num_bytes: The state, in bytes, of an optimizer that is not known by name.
        library_num_bytes: Workspaces of matrix libraries on the device; None measures those of the
            current GPU, and takes 0 without one.
        speeds: Rates for a forecast of the step's time.

    Raises:
        PolicyError: If a value is invalid.
    """

    seq_len: int
    batch_size: int = 1
    accumulation: int = 1
    micro_batches: int = 1
    policy: StreamingPolicy = field(default_factory=StreamingPolicy)
    without_recordings: bool = False
    self_check: bool = False
    optimizer: str = "adamw_torch_fused"
    optimizer_num_bytes: int | None = None
    library_num_bytes: int | None = None
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "accumulation", "micro_batches"):
            require_positive(name, getattr(self, name))
        if not isinstance(self.self_check, bool):
            raise PolicyError(f"self_check: expected a bool in a plan, found {self.self_check!r}")
        for name in ("optimizer_num_bytes", "library_num_bytes"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, int) and value >= 0)):
                raise PolicyError(f"{name}: expected bytes as a whole number, found {value!r}")
        for name in ("copy_gb_per_s", "tflop_per_s"):
            rate = getattr(self.speeds, name, 1.0)
            if not (math.isfinite(rate) and rate > 0):
                raise PolicyError(f"{name}: expected a rate above zero, found {rate!r}")

    @classmethod
    def of(cls, *, seq_len: int, **others: Any) -> "PlanRequest":
        """Make a request from its fields and its policy's, as ``override`` takes them."""
        return cls(seq_len=seq_len).override(**others)

    def override(self, **changes: Any) -> "PlanRequest":
        """Copy this request with other fields, its own or its policy's.

        Args:
            **changes: By name; ``num_slots`` is the policy's ``slots``, which a plan calls so too.

        Raises:
            PolicyError: If there is no such field, or its value makes no sense.
        """
        if "num_slots" in changes:
            changes["slots"] = changes.pop("num_slots")
        own = {name: changes.pop(name) for name in _FIELDS & changes.keys()}
        policy = own.pop("policy", self.policy).override(**changes)
        return replace(self, policy=policy, **own)

    @property
    def libraries(self) -> int:
        """``library_num_bytes``, measured or assumed."""
        if self.library_num_bytes is None:
            # A request can be made and checked before anything slow is imported.
            from poros.utils.devices import default_device, library_workspace

            return library_workspace(default_device())
        return self.library_num_bytes

    @property
    def budget(self) -> int | None:
        """The policy's ``vram_budget`` in bytes."""
        budget = self.policy.vram_budget
        return None if budget is None else parse_num_bytes(budget, "vram_budget")


_FIELDS = {each.name for each in fields(PlanRequest)}


def require_positive(name: str, value: object) -> None:
    """Raise ``PolicyError`` unless ``value`` is a whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name}: expected a positive whole number, found {value!r}")


class OptimizerCost(NamedTuple):
    """Bytes of an optimizer."""

    state: int
    temporaries: int = 0
    """Bytes that its step allocates beside the state."""


def optimizer_cost(request: PlanRequest, adapter_sizes: Sequence[tuple[int, int]]) -> OptimizerCost:
    """Count the bytes of an optimizer's state for a model's adapters, and of its step.

    Args:
        adapter_sizes: Elements and bytes of every trainable parameter.

    Raises:
        PolicyError: If the optimizer is not one of ``COUNTED``.
    """
    name = request.optimizer
    if request.optimizer_num_bytes is not None:
        return OptimizerCost(request.optimizer_num_bytes)
    if name not in COUNTED:
        raise PolicyError(
            f"optimizer: expected one of {', '.join(COUNTED)}, found {name!r}; for another one "
            "give poros.plan optimizer_num_bytes"
        )
    adapters = sum(size for _, size in adapter_sizes)
    if name in _8BIT:
        # Paged states leave the device only while something else needs the room.
        return OptimizerCost(sum(_two_8bit_states(number) for number, _ in adapter_sizes))
    if name == "sgd":
        return OptimizerCost(0)
    # The foreach implementation takes the roots of all second moments at once.
    return OptimizerCost(2 * adapters, adapters if name == "adamw_torch" else 0)


def _two_8bit_states(num_elements: int) -> int:
    if num_elements < _MIN_8BIT_NUM_ELEMENTS:
        return 2 * 4 * num_elements
    return 2 * (num_elements + 4 * -(-num_elements // _8BIT_BLOCK))
