"""Plans deep models of equal layers from four of them.

The first layer's input is the embedding's output and the last one's goes to the norm, so the two in
between stand for all that are left out. What a model of four layers needs is put beside what one of
three needs; every size grows by the same with each further layer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from poros.model.inspect import find_layers
from poros.planning.formula import Shapes

NUM_LAYERS = 4
_Item = TypeVar("_Item")
_LARGEST = ("dense_layer", "dense_weight")
"""Sizes that do not grow with each layer."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def shorten(model: nn.Module) -> int:
    """Leave ``NUM_LAYERS`` layers of a model without adapters, if they are alike.

    Returns:
        How many were taken out.
    """
    name, layers = find_layers(model)
    left_out = len(layers) - NUM_LAYERS
    if left_out < 1 or not are_alike(layers):
        return 0
    every: Any = model.get_submodule(name)
    del every[NUM_LAYERS:]
    return left_out


def are_alike(layers: Sequence[nn.Module]) -> bool:
    """Whether layers differ in nothing but their index."""
    first = _form(layers[0])
    return all(_form(layer) == first for layer in layers[1:])


def _form(layer: nn.Module) -> object:
    """Return a key that is equal for layers that differ only in their index."""
    return [
        (
            name,
            type(module),
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, _PLAIN) and key != "layer_idx"
            },
            [
                (key, tensor.shape, tensor.dtype)
                for table in (module._parameters, module._buffers)
                for key, tensor in table.items()
                if tensor is not None
            ],
        )
        for name, module in layer.named_modules()
    ]


def lengthen(items: Sequence[_Item], left_out: int) -> list[_Item]:
    """Expand a list to one item per layer of the whole model."""
    return [*items[:2], *[items[1]] * left_out, *items[2:]]


def shapes_of_all(shapes: Shapes, fewer: Shapes, left_out: int) -> Shapes:
    """Compute the sizes of the whole model.

    Args:
        shapes: Of the shortened model.
        fewer: Of the same with one layer less.
        left_out: How many layers that model lacks.
    """
    changes: dict[str, Any] = {
        each.name: value + left_out * (value - getattr(fewer, each.name))
        for each in fields(Shapes)
        if isinstance(value := getattr(shapes, each.name), int) and each.name not in _LARGEST
    }
    sizes = Counter(shapes.adapter_sizes)
    sizes.subtract(fewer.adapter_sizes)
    further = [size for size, number in sizes.items() for _ in range(number)]
    return replace(
        shapes,
        **changes,
        layers=lengthen(shapes.layers, left_out),
        layer_adapters=lengthen(shapes.layer_adapters, left_out),
        adapter_sizes=[*shapes.adapter_sizes, *further * left_out],
    )
