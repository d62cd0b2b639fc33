"""Whose code runs inside of layers, between them and around them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their models; so only these go together, and only without
hooks of others on modules outside the layers. Hooks inside of layers are looked for elsewhere.
"""

from collections.abc import Sequence
from itertools import repeat

from torch import nn

from poros.kernels.forwards import HOOKS, foreign_code, is_of_library
from poros.stream.body import LayerBody


class ForeignCode:
    """Code in the layers of one model that is of no library that is known.

    It is looked for anew when a module, its class, hooks, own ``forward`` or attention is another.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._found: str | None = None

    def find(self, layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
        """Where it runs, in words; None if there is none."""
        spaces = list(map(vars, modules))
        configs = {id(each): each for each in map(dict.get, spaces, repeat("config"))}
        key = (
            list(map(type, modules)),
            list(map(dict.get, spaces, repeat("forward"))),
            [hook for space in spaces for kind in HOOKS for hook in space[kind].values()],
            [getattr(each, "_attn_implementation", None) for each in configs.values()],
        )
        if key != self._key:
            self._key, self._found = key, _find(layers, modules)
        return self._found


def _find(layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
    if (found := foreign_code(modules)) is not None:
        return f"the model runs {found}"
    inside = {id(module) for layer in layers for module in layer.contents().modules()}
    for module in modules:
        hooks = [hook for name in HOOKS for hook in vars(module)[name].values()]
        if id(module) not in inside and not all(map(is_of_library, hooks)):
            return f"{type(module).__qualname__} has a hook"
    return None
