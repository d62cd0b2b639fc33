"""Checks what transformers assumes of a checkpoint's names and dtypes.

It stacks experts in the order of their numbers without looking for gaps, and casts whatever it
finds to the dtype to load in: both give a model, and not the one that was saved.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from poros.errors import quoted
from poros.kernels.nf4 import state_of
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
_STATE = ".quant_state."


def require_whole_experts(checkpoint: Checkpoint) -> None:
    """Refuse experts whose numbers do not count from 0: stacked, each would be another's.

    Raises:
        CheckpointFormatError: If a number is missing or left over; the message names a tensor.
    """
    experts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in checkpoint.names:
        match = _EXPERT.fullmatch(name)
        if match:
            experts[match[1], match[3]].append(match[2])
    for (prefix, suffix), numbers in experts.items():
        expected = {str(number) for number in range(len(numbers))}
        surplus = sorted(set(numbers) - expected)
        if surplus:
            missing = sorted(expected - set(numbers), key=int)
            raise defect(
                checkpoint.path,
                f"expected {len(numbers)} experts numbered from 0, found none of number "
                f"{quoted(missing[0], is_bare=True)}",
                tensor=f"{prefix}.{surplus[0]}.{suffix}",
                remedy="check that no expert was left out or renamed",
            )


def require_floats(checkpoint: Checkpoint, taken: Iterable[str], model: Any) -> None:
    """Refuse whole numbers that were cast to floating point, such as weights of 8 bits.

    Args:
        checkpoint: Where the tensors are from.
        taken: Names of the tensors that went into the model.
        model: As it is loaded, under the names that transformers gave its tensors.

    Raises:
        CheckpointFormatError: If more tensors of whole numbers went in than there are in it.
    """
    packed = {name.partition(_STATE)[0] for name in checkpoint.names if _STATE in name}
    whole = [
        name
        for name in sorted(taken)
        if not checkpoint.entry(name).dtype.is_floating_point
        and not (packed and _weight_of(name) in packed)
    ]
    model_whole = {
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.is_floating_point() and state_of(tensor) is None
    }
    if len(whole) > len(model_whole):
        name = next((candidate for candidate in whole if candidate not in model_whole), whole[0])
        raise defect(
            checkpoint.entry(name).file,
            "expected weights in floating point for this configuration, found "
            f"{checkpoint.entry(name).dtype}",
            tensor=name,
            remedy="load the checkpoint that it was made from, which is not quantized",
        )


def _weight_of(name: str) -> str:
    """Return the name of the 4-bit weight that a tensor may be a part of."""
    for end in (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map"):
        name = name.removesuffix(end)
    return name.partition(_STATE)[0]
