"""Leaves that stand in for the adapters of a layer while it is recomputed or recorded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from poros.stream.layer_index import Adapter


class ProxyLeaf(NamedTuple):
    """One place of a trained parameter in a layer, and the leaf that is to be there in a visit."""

    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter
    leaf: nn.Parameter


def proxy_leaves(adapters: Sequence[Adapter]) -> tuple[list[ProxyLeaf], dict[int, nn.Parameter]]:
    """Leaves for these places, which meet no other graph and have no hooks.

    Returns:
        One for each place; and the leaves by the ids of the parameters, each over the memory and
        the version counter of its own.
    """
    parameters = {id(each.parameter): each.parameter for each in adapters}
    leaves = {number: nn.Parameter(each.detach()) for number, each in parameters.items()}
    return [ProxyLeaf(*each, leaves[id(each.parameter)]) for each in adapters], leaves
