"""Takes a layer's arguments and results apart into tensors and a template, and back.

Only tensors, tuples of them and values that nobody can change are taken. A list, a dictionary or
any other object would be a side channel: what a layer writes to it by the side would be lost when
the layer is recomputed, so it is refused by name.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from poros.errors import UnsupportedModelError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


class LeafSpec(NamedTuple):
    """Stands for tensor number ``number`` in a template."""

    number: int


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


def _like(original: tuple[Any, ...], parts: list[Any]) -> Any:
    make: Callable[..., Any] = type(original)
    return make(*parts) if hasattr(original, "_fields") else make(parts)
