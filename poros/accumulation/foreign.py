"""Whose code runs inside of layers, between them and around them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their layers; so only models of these go together. Outside
the layers others' hooks and forwards run in their order: ``poros.accumulation.names`` looks at what
these pass on.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from torch import nn

from poros.kernels.forwards import HOOKS, foreign_code, is_of_library
from poros.stream.body import LayerBody
from poros.stream.layer_index import values_of


class ForeignCode:
    """Code in one model that is of no library that is known.

    It is looked for anew when a module, its class, hooks, own ``forward`` or attention is another.

    Attributes:
        around: Hooks and forwards outside the layers, as they were found last.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._found: str | None = None
        self.around: list[Any] = []

    def find(self, layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
        """Its name, in ``layers`` and what holds them; None if there is none."""
        spaces = list(map(vars, modules))
        configs = {id(each): each for each in map(dict.get, spaces, repeat("config"))}
        key = (
            list(map(type, modules)),
            list(map(dict.get, spaces, repeat("forward"))),
            [values_of(map(dict.__getitem__, spaces, repeat(kind))) for kind in HOOKS],
            [getattr(each, "_attn_implementation", None) for each in configs.values()],
        )
        if key != self._key:
            self._key = key
            self._found, self.around = _find(layers, modules)
        return self._found


def _find(
    layers: Sequence[LayerBody], modules: Sequence[nn.Module]
) -> tuple[str | None, list[Any]]:
    """The name of code in layers and what holds them, if any; and code outside the layers."""
    inside = [module for layer in layers for module in layer.contents().modules()]
    stacked = {id(layer.module()) for layer in layers}
    parents = [each for each in modules if stacked & set(map(id, each._modules.values()))]
    lists = set(map(id, parents))
    parents += [each for each in modules if lists & set(map(id, each._modules.values()))]
    own = set(map(id, inside))
    around = [
        code
        for module in modules
        if id(module) not in own
        for code in (
            *(hook for name in HOOKS for hook in vars(module)[name].values()),
            vars(module).get("forward"),
            type(module).forward,
        )
        if code is not None and not is_of_library(code)
    ]
    return foreign_code((*inside, *parents)), around
