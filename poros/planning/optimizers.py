"""Counts what optimizers keep on the device for the adapters."""

from collections.abc import Sequence
from dataclasses import dataclass

from poros.errors import PolicyError
from poros.planning.request import PlanRequest

_MIN_8BIT_NUM_ELEMENTS, _8BIT_BLOCK = 4096, 256
"""bitsandbytes keeps smaller states in float32, and one float32 scale per block of others."""


COUNTED = (
    *("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
    "sgd",
)
"""Optimizers whose states are counted as they are."""


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer."""

    state: int
    temporaries: int = 0
    """During its step."""


def optimizer_cost(request: PlanRequest, adapter_sizes: Sequence[tuple[int, int]]) -> OptimizerCost:
    """Count what an optimizer keeps for a model's adapters, and needs during its step.

    Args:
        request: Names it.
        adapter_sizes: Elements and bytes of every trainable parameter.

    Raises:
        PolicyError: If it is not one of those known here.
    """
    if request.optimizer_num_bytes is not None:
        return OptimizerCost(request.optimizer_num_bytes)
    adapters = sum(size for _, size in adapter_sizes)
    known = {
        "adamw_torch_fused": OptimizerCost(2 * adapters),
        # The foreach implementation takes the roots of all second moments at once.
        "adamw_torch": OptimizerCost(2 * adapters, adapters),
        **dict.fromkeys(
            # Paged states leave the device only while something else needs the room.
            ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
            OptimizerCost(sum(_two_8bit_states(number) for number, _ in adapter_sizes)),
        ),
        "sgd": OptimizerCost(0),
    }
    if request.optimizer not in known:
        raise PolicyError(
            f"optimizer: expected one of {', '.join(known)}, found {request.optimizer!r}; for "
            "another one give poros.plan optimizer_num_bytes"
        )
    return known[request.optimizer]


def _two_8bit_states(num_elements: int) -> int:
    if num_elements < _MIN_8BIT_NUM_ELEMENTS:
        return 2 * 4 * num_elements
    return 2 * (num_elements + 4 * -(-num_elements // _8BIT_BLOCK))
