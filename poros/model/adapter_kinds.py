"""Names the kinds of PEFT adapters in a model, as the gate does.

A kind is PEFT's type in small letters (``vera``, ``ia3``, ``prompt_tuning``). Variants of LoRA that
compute something else than LoRA are kinds of their own (``dora``, ``kasa``); those that only scale
or initialise it differently (rsLoRA, PiSSA) are not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from poros.errors import PolicyError

IN_CACHE = ("prefix_tuning", "cartridge")
"""Kinds that train keys and values, which layers are given in their KV cache."""

_VARIANT = re.compile(r"_?(\w+?)(Linear|Embedding|Conv\w*)Variant")


def adapter_kinds(model: nn.Module) -> dict[str, str]:
    """Find all kinds of adapters in a model, active or not.

    Returns:
        Descriptions by kind, for messages: with PEFT's own name, and the class it was found by.
    """
    attached = {kind: text for module in model.modules() for kind, text in _of_module(module)}
    return {**configured_kinds(getattr(model, "peft_config", None) or {}), **attached}


def configured_kinds(configs: Mapping[str, Any]) -> dict[str, str]:
    """Find the kinds that configurations of PEFT name; LoRA's variants show only in layers."""
    names = {
        str(getattr(config.peft_type, "value", config.peft_type)): type(config).__qualname__
        for config in configs.values()
    }
    return {
        name.lower(): _described(name.lower(), name, where)
        for name, where in names.items()
        if name != "LORA"
    }


def require_groupable(layers_name: str, layers: Sequence[nn.Module]) -> None:
    """Raise ``PolicyError`` unless all adapters in these layers are LoRA, whose A are grouped."""
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=f"{layers_name}.{index}"):
            for kind, text in _of_module(module):
                if kind != "lora":
                    raise PolicyError(
                        f'{name}: expected LoRA with adapter_kernels="grouped", found {text}; set '
                        'adapter_kernels="fused"'
                    )


def _described(kind: str, peft_type: str, where: str) -> str:
    return f"{kind} (PEFT's {peft_type}, {where})"


def _of_module(module: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(module, BaseTunerLayer):
        return
    where = type(module).__qualname__
    # A class that is derived from another kind's (AdaLoRA's from LoRA's) comes before it.
    packages = [base.__module__.split(".") for base in type(module).__mro__]
    known = [
        package[2] for package in packages if package[:2] == ["peft", "tuners"] and len(package) > 3
    ]
    kind = known[0] if known else where
    if kind != "lora":
        yield kind, _described(kind, kind.upper(), where)
        return
    variants = {
        type(variant).__qualname__ for variant in getattr(module, "lora_variant", {}).values()
    }
    if len(variants) < len(getattr(module, "lora_A", ())) or not variants:
        yield "lora", _described("lora", "LORA", where)
    for name in sorted(variants):
        match = _VARIANT.fullmatch(name)
        kind = match[1].lower() if match else name
        yield kind, _described(kind, "LORA", name)
