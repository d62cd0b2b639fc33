"""Kinds of PEFT adapters in a model, by the names under which the gate knows them.

A kind is PEFT's type in small letters (``vera``, ``ia3``, ``prompt_tuning``). Variants of LoRA that
compute something else than LoRA are kinds of their own (``dora``, ``kasa``); those that only scale
or initialise it differently (rsLoRA, PiSSA) are not.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

IN_CACHE = ("prefix_tuning", "cartridge")
"""Kinds that train keys and values, which layers are given in their KV cache."""

_VARIANT = re.compile(r"_?(\w+?)(Linear|Embedding|Conv\w*)Variant")


class Found(NamedTuple):
    """One kind of adapter that is in a model."""

    kind: str
    peft_type: str
    """PEFT's own name of it."""
    where: str
    """The class that it was found by."""

    def __str__(self) -> str:
        return f"{self.kind} (PEFT's {self.peft_type}, {self.where})"


def adapter_kinds(model: nn.Module) -> dict[str, Found]:
    """All kinds of adapters in a model, active or not, by kind."""
    found = {each.kind: each for module in model.modules() for each in _of_module(module)}
    return {**configured_kinds(getattr(model, "peft_config", None) or {}), **found}


def configured_kinds(configs: Mapping[str, Any]) -> dict[str, Found]:
    """Kinds that configurations of PEFT name; of LoRA, only layers tell which variant it is."""
    names = {
        str(getattr(each.peft_type, "value", each.peft_type)): type(each).__qualname__
        for each in configs.values()
    }
    return {
        name.lower(): Found(name.lower(), name, where)
        for name, where in names.items()
        if name != "LORA"
    }


def _of_module(module: Any) -> Iterator[Found]:
    if not isinstance(module, BaseTunerLayer):
        return
    where = type(module).__qualname__
    # A class that is derived from another kind's (AdaLoRA's from LoRA's) comes before it.
    packages = [each.__module__.split(".") for each in type(module).__mro__]
    known = [each[2] for each in packages if each[:2] == ["peft", "tuners"] and len(each) > 3]
    kind = known[0] if known else where
    if kind != "lora":
        yield Found(kind, kind.upper(), where)
        return
    variants = {type(each).__qualname__ for each in getattr(module, "lora_variant", {}).values()}
    if len(variants) < len(getattr(module, "lora_A", ())) or not variants:
        yield Found("lora", "LORA", where)
    for name in sorted(variants):
        match = _VARIANT.fullmatch(name)
        yield Found(match[1].lower() if match else name, "LORA", name)
