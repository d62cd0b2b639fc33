"""What a layer is called with and gives, taken apart into tensors and a template, and back.

A recording is made of one call and replayed for others: a template says what all of them have in
common, and where the tensors go.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from poros.errors import UnsupportedModelError
from poros.stream.args import PLAIN, like


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
        return like(
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
        return like(template, [tree_unflatten(item, tensors) for item in template])
    return template
