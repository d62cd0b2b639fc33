"""Whose code runs inside of layers, and between them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their layers; so only models of these go together.
"""

from collections.abc import Sequence
from itertools import repeat
from types import FunctionType
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from poros.stream.body import LayerBody

LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "liger_kernel", "peft", "poros", "torch", "transformers"}
)


def is_of_library(code: Any) -> bool:
    """Whether a library that is known has written a class or function, and all put around it."""
    code = getattr(code, "func", code)  # of functools.partial
    while code is not None:
        where = getattr(code, "__globals__", {}).get("__name__", getattr(code, "__module__", ""))
        if str(where).partition(".")[0] not in LIBRARIES:
            return False
        code = getattr(code, "__wrapped__", None)
    return True


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
    code: dict[Any, str] = {}
    for owner in (*inside, *parents):
        kind: Any = type(owner)
        code |= {kind: kind.__qualname__, kind.forward: f"{kind.__qualname__}.forward"}
        own, config = vars(owner).get("forward"), vars(owner).get("config")
        if own is not None:
            own = getattr(own, "__func__", own)
            code[own if isinstance(own, FunctionType) else type(own)] = (
                f"{kind.__qualname__}.forward"
            )
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str) and name in ALL_ATTENTION_FUNCTIONS:
            code[ALL_ATTENTION_FUNCTIONS[name]] = f"attention {name!r}"
    code |= {layer.own_forward: layer.own_forward.__qualname__ for layer in layers}
    return next((name for each, name in code.items() if not is_of_library(each)), None)
