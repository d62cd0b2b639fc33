"""Maps a checkpoint's tensor names to a model's, and checks what transformers assumes of them.

transformers stacks experts in the order of their numbers without looking for gaps, and casts every
tensor to the dtype to load in. Both give a model, but not the one that was saved.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from poros.errors import quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.model.vision import find_towers

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")
_STATE = ".quant_state."


class OwnName(NamedTuple):
    """A model's name for a tensor of a checkpoint."""

    name: str
    is_part: bool
    """Whether the model's tensor is made of this one and others, or is a piece of it."""


def own_names(model: Any, names: Iterable[str]) -> dict[str, OwnName]:
    """Map each tensor of a checkpoint to its name in ``model``, as ``from_pretrained`` does.

    A tensor that the model does not have gets the name that the rules give it.

    Args:
        model: A transformers model, on any device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    # A module with an adapter holds its weight one level below.
    known = {name.replace(".base_layer.", "."): each for name, each in model.state_dict().items()}
    prefix = model.base_model_prefix
    found = {}
    for name in names:
        own, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if own not in known and name in known:
            own, pattern = rename_source_key(name, [], [], prefix, known)
        found[name] = OwnName(own, pattern is not None)
    return found


def without_towers(model_class: Any, config: Any, names: Iterable[str]) -> list[str]:
    """List the tensors that a model without its towers needs."""
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config))
    towers = tuple(f"{name}." for name in find_towers(model))
    own = own_names(model, names)
    return [name for name in own if not own[name].name.startswith(towers)]


def require_whole_experts(checkpoint: Checkpoint) -> None:
    """Refuse experts whose numbers do not count from 0: stacked, each would be another's."""
    experts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in checkpoint.entries:
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


def require_floats(checkpoint: Checkpoint, model: Any, floats: Collection[str]) -> None:
    """Refuse whole numbers in place of weights, such as those of 8 bits; transformers casts them.

    Args:
        floats: Names of the model's tensors that the configuration wants in floating point.
    """
    packed = {name.partition(_STATE)[0] for name in checkpoint.entries if _STATE in name}
    whole = [
        name for name, entry in checkpoint.entries.items() if not entry.dtype.is_floating_point
    ]
    for name, own in own_names(model, whole).items():
        if own.name in floats and name not in packed:
            raise defect(
                checkpoint.entries[name].file,
                "expected weights in floating point for this configuration, found "
                f"{checkpoint.entries[name].dtype}",
                tensor=name,
                remedy="load the checkpoint that it was made from, which is not quantized",
            )
