"""Checks what transformers assumes of a checkpoint's names and dtypes.

It stacks experts in the order of their numbers without looking for gaps, and casts whatever it
finds to the dtype to load in: both give a model, and not the one that was saved.
"""

import re
from collections import defaultdict
from typing import Any

from poros.errors import quoted
from poros.kernels.quantized import state_of
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.renaming import own_names
from poros.stream.adapters import named_tensors

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


def require_floats(checkpoint: Checkpoint, model: Any) -> None:
    """Refuse whole numbers that were cast to floating point, such as weights of 8 bits.

    Args:
        checkpoint: Where the tensors are from.
        model: As it is loaded.

    Raises:
        CheckpointFormatError: If one of its tensors was made of whole numbers, and is none.
    """
    packed = {name.partition(_STATE)[0] for name in checkpoint.names if _STATE in name}
    whole = [
        name for name in checkpoint.names if not checkpoint.entry(name).dtype.is_floating_point
    ]
    tensors = dict(named_tensors(model))
    for name, own in own_names(model, whole).items():
        tensor = tensors.get(own.name)
        if tensor is None or name in packed:
            continue
        if tensor.is_floating_point() or state_of(tensor) is not None:
            raise defect(
                checkpoint.entry(name).file,
                "expected weights in floating point for this configuration, found "
                f"{checkpoint.entry(name).dtype}",
                tensor=name,
                remedy="load the checkpoint that it was made from, which is not quantized",
            )
