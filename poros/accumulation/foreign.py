"""Whose code runs inside of layers, and between them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their layers; so only models of these go together.
"""

from collections.abc import Sequence
from itertools import repeat

from torch import nn

from poros.kernels.forwards import foreign_code
from poros.stream.body import LayerBody


class ForeignCode:
    """Code in the layers of one model that is of no library that is known.

    It is looked for anew when a module, its class, its own ``forward`` or its attention is another.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._found: str | None = None

    def find(self, layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
        """Its name, in ``layers`` and what holds them; None if there is none."""
        spaces = list(map(vars, modules))
        configs = {id(each): each for each in map(dict.get, spaces, repeat("config"))}
        key = (
            list(map(type, modules)),
            list(map(dict.get, spaces, repeat("forward"))),
            [getattr(each, "_attn_implementation", None) for each in configs.values()],
        )
        if key != self._key:
            self._key, self._found = key, _find(layers, modules)
        return self._found


def _find(layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
    inside = [module for layer in layers for module in layer.contents().modules()]
    stacked = {id(layer.module()) for layer in layers}
    parents = [each for each in modules if stacked & set(map(id, each._modules.values()))]
    lists = set(map(id, parents))
    parents += [each for each in modules if lists & set(map(id, each._modules.values()))]
    return foreign_code((*inside, *parents))
