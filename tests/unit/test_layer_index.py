"""A layer's adapters are looked up once, and again after any change that matters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.stream.layer_index import LayerIndex


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
    return LayerIndex(layer, {id(layer.base.weight)})


Places = list[tuple[Any, ...]]


def places(tree: LayerIndex) -> Places:
    """What ``adapters`` says: owners, keys, parameters, and the memory of these."""
    found = tree.adapters()
    where = dict(zip(found.ids, zip(*found.where, strict=True), strict=True))
    return [
        (id(each.owner), each.key, id(each.parameter), *where[id(each.parameter)])
        for each in found.places
    ]


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
    """A new parameter in the place of one."""
    return lambda layer: getattr(layer, module)._parameters.__setitem__(key, new(*shape))


def give(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Layer], object]:
    """Other memory to the same parameter."""
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
    found = tree.adapters()
    assert [each.parameter for each in found.places] == [layer.first.weight, layer.second.weight]
    with torch.no_grad():
        layer.first.weight.mul_(2)
    assert tree.adapters() is found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a list that is never looked up again is wrong."""
    layers = Layer(), Layer()
    trees = [tree_of(layer) for layer in layers]
    before = [tree.adapters() for tree in trees]
    for layer in layers:
        CHANGES[name](layer)
    # As a tree sees it that has looked for the first time.
    assert places(trees[0]) == places(tree_of(layers[0]))
    found = trees[0].adapters()
    assert found is not before[0]
    assert all(each.owner.get(each.key) is each.parameter for each in found.places)
    expected = places(tree_of(layers[1]))
    monkeypatch.setattr(LayerIndex, "_are_current", lambda *_: True)
    assert places(trees[1]) != expected
