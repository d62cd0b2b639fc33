"""Maps a checkpoint's tensor names to a model's, by transformers' rules."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple


class OwnName(NamedTuple):
    """A model's name for a tensor of a checkpoint."""

    name: str
    is_part: bool
    """Whether the model's tensor is made of this one and others, or is a piece of it."""


def own_names(model: Any, names: Iterable[str]) -> "dict[str, OwnName]":
    """Map each tensor of a checkpoint to its name in ``model``, as ``from_pretrained`` does.

    What the model does not have keeps the name that the rules give it.

    Args:
        model: A transformers model, on any device.
        names: Of the checkpoint.
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
    import torch

    from poros.model.vision import find_towers

    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config))
    towers = tuple(f"{name}." for name in find_towers(model))
    own = own_names(model, names)
    return [name for name in own if not own[name].name.startswith(towers)]
