"""What a layer is called with and gives: copied, taken apart into tensors and a template, and back.

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
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from transformers.utils.output_capturing import _active_collector

from poros.errors import UnsupportedModelError

RESULTS = "hidden_states"
"""What is recorded from what layers return."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


class LeafSpec(NamedTuple):
    """Stands for tensor number ``number`` in a template."""

    number: int


def recorded_outputs() -> set[str]:
    """What transformers records inside layers, or of what they return, at the moment."""
    return {key for key in _active_collector.get() or () if not key.startswith("_")}


def is_shared_mapping(value: Any) -> bool:
    """A mapping of tensors and nothing else; of other classes what a copy would lose is unknown."""
    modules = ("collections", "transformers.cache_utils")
    return isinstance(value, UserDict) and type(value).__module__ in modules


def copied(value: Any, where: str) -> Any:
    """``value`` with lists and mappings of its own, over the same tensors.

    Args:
        value: An argument.
        where: What it is, for the error.

    Raises:
        UnsupportedModelError: If it may be written to otherwise.
    """
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return value
    if isinstance(value, tuple | list):
        parts = [copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return _like(value, parts)
    if type(value) is dict or is_shared_mapping(value):
        return type(value)({key: copied(each, f"{where}[{key!r}]") for key, each in value.items()})
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples, lists and dictionaries of them or plain values, found "
        f"a {type(value).__qualname__}. What a layer writes to such an object by the side it would "
        "write twice, so streaming it is refused"
    )


def tree_flatten(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """``value`` with each distinct tensor moved to ``tensors`` and its place left behind.

    Args:
        value: A tensor, a plain value, or a (named) tuple of such.
        where: What it is, for the error.
        tensors: Extended; a tensor that is in it already is not added again.

    Raises:
        UnsupportedModelError: If there is anything else in ``value``.
    """
    if isinstance(value, torch.Tensor):
        for number, known in enumerate(tensors):
            if known is value:
                return LeafSpec(number)
        tensors.append(value)
        return LeafSpec(len(tensors) - 1)
    if isinstance(value, tuple):
        return _like(
            value, [tree_flatten(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        )
    if isinstance(value, PLAIN):
        return value
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples of them or plain values, found a "
        f"{type(value).__qualname__}. What a layer reads from or writes to such an object by the "
        "side would be lost when it is recomputed, so streaming it is refused"
    )


def tree_unflatten(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that ``template`` was made of, with ``tensors`` in the places."""
    if isinstance(template, LeafSpec):
        return tensors[template.number]
    if isinstance(template, tuple):
        return _like(template, [tree_unflatten(item, tensors) for item in template])
    return template


def _like(original: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    make: Callable[..., Any] = type(original)
    return make(*parts) if hasattr(original, "_fields") else make(parts)
