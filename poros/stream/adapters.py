"""Which modules and tensors of a layer PEFT has put there, and which belong to the base."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


class User(NamedTuple):
    """One of PEFT's modules, which uses a tensor of an adapter."""

    module: Any
    adapter: str
    """Whose it is; another word if the module uses it whichever adapter is active."""
    table: Any
    """One of PEFT's in which that adapter was found by its name; empty if there is none."""

    def acts(self) -> bool:
        """Whether a call of the layer reads the tensor now."""
        if self.module.disable_adapters:
            return False
        return self.adapter in self.module.active_adapters or self.adapter not in self.table


class Place(NamedTuple):
    """Where a layer holds one tensor that does not stream."""

    name: str
    """Below the layer."""
    owner: dict[str, Any]
    key: str
    users: list[User]
    """None if it is of the base."""


class Adapter(NamedTuple):
    """One place of a trainable parameter in a layer."""

    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter


class ProxyLeaf(NamedTuple):
    """A leaf that takes the place of a trained parameter while its layer runs once more."""

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


def places(layer: nn.Module, streamed: Collection[int]) -> list[Place]:
    """Where ``layer`` holds parameters and buffers that do not stream.

    Args:
        layer: A decoder layer.
        streamed: Ids of the tensors that stream.
    """
    users: dict[tuple[int, str], list[User]] = {}
    for module in layer.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            tables = _tables_of(module)
            for part in (*module.adapter_layer_names, *getattr(module, "other_param_names", ())):
                held = getattr(module, part, None)
                for inner, owner, key in _entries(held) if isinstance(held, nn.Module) else ():
                    adapter = inner.partition(".")[0] or key
                    user = User(module, adapter, tables.get(adapter, ()))
                    users.setdefault((id(owner), key), []).append(user)
    return [
        Place(f"{name}.{key}" if name else key, owner, key, users.get((id(owner), key), []))
        for name, owner, key in _entries(layer)
        if id(owner[key]) not in streamed
    ]


def _entries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name below ``module``, owner dictionary and key of each parameter and buffer."""
    for name, inner in module.named_modules():
        for owner in (inner._parameters, inner._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    yield name, owner, key


def _tables_of(module: Any) -> dict[str, Any]:
    """A table of one of PEFT's modules for each adapter that is in one."""
    tables: list[Any] = [getattr(module, part, None) for part in module.adapter_layer_names]
    return {name: table for table in tables if hasattr(table, "keys") for name in table.keys()}  # noqa: SIM118


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()
