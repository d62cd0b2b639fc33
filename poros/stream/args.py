"""What a layer is called with, and what it may write to: copied.

A layer may talk past its return values: it writes to a list or a mapping that it was given. What is
recomputed gets copies of these; what is replayed is given none.

Note: Side outputs
    Two known families of models let layers do so. Gemma 4 passes one mutable mapping through all
    layers, in which some leave their keys and values for later ones. Mixtures of experts have their
    router logits recorded by transformers from inside the layer, for the auxiliary loss. Both are
    part of the graph of a layer's forward, so such a layer keeps that graph.

Source:
    transformers: ``cache_utils.KVSharingDict`` (older versions: ``collections.UserDict``) and
    ``utils.output_capturing``.
"""

from collections import UserDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from transformers.utils.output_capturing import _active_collector

from poros.errors import UnsupportedModelError

RESULTS = "hidden_states"
"""What is recorded from what layers return."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def recorded_outputs() -> set[str]:
    """What transformers records inside layers, or of what they return, at the moment."""
    return {key for key in _active_collector.get() or () if not key.startswith("_")}


def is_shared_mapping(value: Any) -> bool:
    """A mapping of tensors and nothing else; of other classes what a copy would lose is unknown."""
    modules = ("collections", "transformers.cache_utils")
    return isinstance(value, UserDict) and type(value).__module__ in modules


def is_empty_mapping(value: Any) -> bool:
    """Such a mapping that holds nothing, nor has anything been bound to it."""
    return is_shared_mapping(value) and vars(value) == {"data": {}}


def copied(value: Any, where: str) -> Any:
    """The argument ``value`` with lists and mappings of its own, over the same tensors.

    Raises:
        UnsupportedModelError: If it may be written to otherwise; ``where`` says what it is.
    """
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return value
    if isinstance(value, tuple | list):
        parts = [copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return like(value, parts)
    if type(value) is dict or is_shared_mapping(value):
        return type(value)({key: copied(each, f"{where}[{key!r}]") for key, each in value.items()})
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples, lists and dictionaries of them or plain values, found "
        f"a {type(value).__qualname__}. What a layer writes to such an object by the side it would "
        "write twice, so streaming it is refused"
    )


def like(original: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """A (named) tuple or a list as ``original``, of other ``parts``."""
    make: Callable[..., Any] = type(original)
    return make(*parts) if hasattr(original, "_fields") else make(parts)


def as_result(tensor: torch.Tensor, is_leaf: bool = False) -> torch.Tensor:
    """A tensor over the same memory that needs a gradient, and is no leaf unless ``is_leaf``.

    As the result of a layer before is: of a leaf, autocast has all modules share one cast.
    """
    with torch.enable_grad():
        leaf = tensor.detach().requires_grad_()
        return leaf if is_leaf else leaf.view_as(leaf)
