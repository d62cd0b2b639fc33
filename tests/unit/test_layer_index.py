"""A layer's adapters are looked up once, and again after any change that matters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.stream.condition import Condition
from poros.stream.layer_index import LayerIndex
from poros.stream.visit import LayerBindings


class Layer(nn.Module):
    """A frozen weight with its bias, two adapters, one that is switched off, and a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.off = nn.Linear(4, 4, bias=False)
        self.act = nn.Identity()
        for each in (self.base, self.off):
            each.requires_grad_(False)


def tree_of(layer: Layer) -> LayerIndex:
    return LayerIndex({"": layer}, {id(layer.base.weight)})


def facts(layer: Layer, tree: LayerIndex) -> list[tuple[Any, ...]]:
    """Owners, keys, parameters of adapters as ``tree`` has them, and the memory of these."""
    if not tree.has_same_tensors():  # then stock is taken again
        tree = tree_of(layer)
    return [
        (id(owner), key, id(each), each.data_ptr(), each.dtype, each.shape)
        for owner, key, each in tree.adapters().places
    ]


BINDINGS = LayerBindings([])


def condition(tree: LayerIndex) -> Condition:
    return Condition("a layer", tree, BINDINGS)


def new(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


def rename(layer: Layer) -> None:
    table: dict[str, Any] = layer.first._parameters
    table["other"] = table.pop("weight")


def hand_over(layer: Layer) -> None:
    """The same parameters in the same order, but one in another module."""
    table: dict[str, Any] = layer.first._parameters
    table["weight"], layer.off._parameters["weight"] = layer.off.weight, table["weight"]


def put_in_the_place_of_none(layer: Layer) -> None:
    del layer.first._parameters["bias"]
    layer.first._parameters["scale"] = new(4)


def put(module: str, key: str, *shape: int) -> Callable[[Layer], object]:
    return lambda layer: getattr(layer, module)._parameters.__setitem__(key, new(*shape))


def give(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Layer], object]:
    return lambda layer: setattr(layer.first.weight, "data", change(layer.first.weight.data))


CHANGES: dict[str, Callable[[Layer], object]] = {
    "rename": rename,
    "hand over": hand_over,
    "put in the place of None": put_in_the_place_of_none,
    "replace a bias": put("base", "bias", 4),
    "replace": put("first", "weight", 4, 4),
    "delete": lambda layer: layer.second._parameters.pop("weight"),
    "move memory": give(torch.clone),
    "cast": give(torch.Tensor.bfloat16),
    "reshape in place": give(lambda values: values.view(2, 8)),
    "freeze": lambda layer: layer.first.weight.requires_grad_(False),
    "switch on": lambda layer: layer.off.weight.requires_grad_(True),
    "train a bias": lambda layer: layer.base.bias.requires_grad_(True),
    "register": lambda layer: layer.act.register_parameter("scale", new(4)),
    "register a bias": lambda layer: layer.first.register_parameter("bias", new(4)),
}


def test_the_list_is_the_same_as_long_as_nothing_changes() -> None:
    layer = Layer()
    tree = tree_of(layer)
    found, before = tree.adapters(), condition(tree)
    assert [each.parameter for each in found.places] == [layer.first.weight, layer.second.weight]
    with torch.no_grad():
        layer.first.weight.mul_(2)
    assert tree.adapters() is found
    assert condition(tree).reads_as(before) and not condition(tree).equals(before)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    layer = Layer()
    tree = tree_of(layer)
    before = condition(tree)
    CHANGES[name](layer)
    # As a tree sees it that has looked for the first time.
    assert facts(layer, tree) == facts(layer, tree_of(layer))
    assert not (tree.has_same_tensors() and condition(tree).reads_as(before))


def test_code_of_classes_that_comes_and_goes_is_seen() -> None:
    layer = Layer()
    tree = tree_of(layer)
    before, own = condition(tree), nn.Identity.forward
    try:
        nn.Identity.forward = nn.Linear.forward  # type: ignore[method-assign,assignment]
        assert not condition(tree).reads_as(before)
    finally:
        nn.Identity.forward = own  # type: ignore[method-assign]
    assert condition(tree).reads_as(before)
