"""Whose code runs inside of layers, and between them.

Micro-batches that go together run their layers in another order than one after the other. Code may
pass values from one call to another in objects, in classes, in global variables, which nothing
sees. Libraries that are known do not in their layers; so only models of these go together.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from poros.stream.body import LayerBody

LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "liger_kernel", "peft", "poros", "torch", "transformers"}
)


def foreign_code(layers: Sequence[LayerBody], modules: Iterable[nn.Module]) -> str | None:
    """The name of code in layers, or in what calls them, that is of no library that is known.

    Args:
        layers: Of a model.
        modules: All of the model.
    """
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
    for each in [each for each in code if isinstance(each, partial)]:
        code[each.func] = code.pop(each)
    known = {each: str(getattr(each, "__module__", "")).partition(".")[0] for each in code}
    return next((code[each] for each, root in known.items() if root not in LIBRARIES), None)
