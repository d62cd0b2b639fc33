"""Which modules and tensors of a layer PEFT has put there, and which belong to the base."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


class AdapterPlace(NamedTuple):
    """Where a layer holds one tensor of an adapter."""

    name: str
    """Below the layer."""
    owner: dict[str, Any]
    key: str
    module: Any
    """PEFT's, which uses it."""
    adapter: str
    """Whose it is; another word if the module uses it whichever adapter is active."""
    table: Any
    """One of PEFT's in which that adapter was found by its name; empty if there is none."""

    def acts(self) -> bool:
        """Whether a call of the layer reads it now."""
        if self.module.disable_adapters:
            return False
        return self.adapter in self.module.active_adapters or self.adapter not in self.table


def is_adapter_module(module: nn.Module) -> bool:
    """Whether PEFT put ``module`` around a module of the base."""
    return isinstance(module, BaseTunerLayer)


def adapter_tensors(layer: nn.Module) -> set[int]:
    """Ids of the parameters and buffers that PEFT added, active or not."""
    added: set[int] = set()
    for module in layer.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            for name in module.adapter_layer_names:
                part = getattr(module, name, None)
                if isinstance(part, nn.Module):
                    added.update(id(tensor) for _, tensor in named_tensors(part))
                elif isinstance(part, torch.Tensor):
                    added.add(id(part))
            # Constants of an adapter stream; PEFT makes some of them trainable as it casts them.
            for name in getattr(module, "other_param_names", ()):
                part = getattr(module, name, None)
                if isinstance(part, nn.Module):
                    added.update(
                        id(parameter) for parameter in part.parameters() if parameter.requires_grad
                    )
        if isinstance(module, BaseTunerLayer):
            # bias="lora_only" and "all" train the biases of the base where adapters sit.
            bias = getattr(module.get_base_layer(), "bias", None)
            if bias is not None and bias.requires_grad:
                added.add(id(bias))
    return added


def staying_places(
    layer: nn.Module, streamed: Collection[int]
) -> list[tuple[str, dict[str, Any], str]]:
    """Where ``layer`` holds what it reads of the base and what does not stream.

    Args:
        layer: A decoder layer.
        streamed: Ids of the tensors that stream.

    Returns:
        Name below the layer, owner dictionary and key of each parameter and buffer.
    """
    adapters = adapter_tensors(layer)
    return [
        (f"{name}.{key}" if name else key, owner, key)
        for name, module in layer.named_modules()
        for owner in (module._parameters, module._buffers)
        for key, tensor in owner.items()
        if tensor is not None and id(tensor) not in streamed and id(tensor) not in adapters
    ]


def adapter_places(layer: nn.Module, streamed: Collection[int]) -> list[AdapterPlace]:
    """Where ``layer`` holds parameters and buffers of adapters that do not stream.

    Args:
        layer: A decoder layer.
        streamed: Ids of the tensors that stream.
    """
    return [
        AdapterPlace(
            f"{name}.{part}.{inner}.{key}".replace("..", "."),
            owner,
            key,
            module,
            adapter := inner.partition(".")[0] or key,
            tables.get(adapter, ()),
        )
        for name, module in layer.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        for tables in (_tables_of(module),)
        for part in (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
        if isinstance(held := getattr(module, part, None), nn.Module)
        for inner, submodule in held.named_modules()
        for owner in (submodule._parameters, submodule._buffers)
        for key, tensor in owner.items()
        if tensor is not None and id(tensor) not in streamed
    ]


def _tables_of(module: Any) -> dict[str, Any]:
    """A table of one of PEFT's modules for each adapter that is in one."""
    tables: list[Any] = [getattr(module, part, None) for part in module.adapter_layer_names]
    return {name: table for table in tables if hasattr(table, "keys") for name in table.keys()}  # noqa: SIM118


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()
