"""Whose code runs inside of layers, and between them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their layers; so only models of these go together.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from poros.stream.body import LayerBody

LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "liger_kernel", "peft", "poros", "torch", "transformers"}
)


def _root_of(code: Any) -> str:
    """The library that a function, a method or a class is of."""
    code = getattr(code, "func", code)  # of functools.partial
    return str(getattr(code, "__module__", "")).partition(".")[0]


class ForeignCode:
    """Code in the layers of one model that is of no library that is known.

    It is looked for anew when a module, its class, its own ``forward`` or its attention is another.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._found: str | None = None

    def find(self, layers: Sequence[LayerBody], modules: Sequence[nn.Module]) -> str | None:
        """Its name; None if there is none.

        Args:
            layers: Of the model.
            modules: All of the model.
        """
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
    owners = [*inside, *parents]
    code: dict[Any, str] = {}
    for kind in set(map(type, owners)):
        forward: Any = kind.forward  # type: ignore[attr-defined]
        code |= {kind: kind.__qualname__, forward: f"{kind.__qualname__}.forward"}
    for layer in layers:
        code[layer.own_forward] = layer.own_forward.__qualname__
    for owner in owners:
        own, config = vars(owner).get("forward"), vars(owner).get("config")
        if own is not None:
            code[getattr(own, "__func__", type(own))] = f"{type(owner).__qualname__}.forward"
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str) and name in ALL_ATTENTION_FUNCTIONS:
            code[ALL_ATTENTION_FUNCTIONS[name]] = f"attention {name!r}"
    return next((name for each, name in code.items() if _root_of(each) not in LIBRARIES), None)
