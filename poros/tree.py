"""A layer's modules, taken stock of once and checked at each call.

PEFT adds and removes modules between steps, so what was found at ``prepare`` cannot be relied upon;
walking the tree at each call would cost more than the layer's own dispatch. Comparing the flat list
of children is exact and cheap: two equal lists of modules hold the same objects.
"""

import weakref
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import PreparedModelError


class Adapter(NamedTuple):
    """One place of a trainable parameter in a layer, and the leaf that stands in for it there.

    The stand-in shares storage and version counter with the parameter. Gradients are taken with
    respect to it, so that hooks on the parameter run once, when autograd accumulates the result.
    """

    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter
    stand_in: nn.Parameter


class ModuleTree:
    """The modules of one layer at one time, and what is looked up in them at every call.

    Holds the layer itself weakly: the layer holds the tree.

    Args:
        layer: The layer.
        frozen: Ids of the tensors that rest in the host store.
        is_adapter_module: Whether PEFT put a module there.
    """

    def __init__(
        self,
        layer: nn.Module,
        frozen: Collection[int],
        is_adapter_module: Callable[[nn.Module], bool],
    ) -> None:
        modules = list(layer.modules())
        self._layer = weakref.ref(layer)
        self._inner = modules[1:]
        self._tables = [module._modules for module in modules]
        self._children = [child for table in self._tables for child in table.values()]
        self._hooks = [
            hooks
            for each in self._inner
            for hooks in (each._forward_pre_hooks, each._forward_hooks)
        ]
        # Most owners hold nothing but frozen weights; no adapter ever appears in those.
        self._owners = [
            module._parameters
            for module in modules
            if not module._parameters
            or any(id(each) not in frozen for each in module._parameters.values())
        ]
        self.adapter_modules = [each for each in self._inner if is_adapter_module(each)]
        self._stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def is_current(self) -> bool:
        """Whether the layer still consists of exactly these modules."""
        return self._children == [child for table in self._tables for child in table.values()]

    def modules(self) -> list[nn.Module]:
        """The layer and all modules in it."""
        layer = self._layer()
        if layer is None:
            raise PreparedModelError("expected a living layer, found one whose model was deleted")
        return [layer, *self._inner]

    def hooks(self) -> list[int]:
        """Keys of the hooks inside the layer; equal lists mean the same hooks."""
        return list(chain.from_iterable(self._hooks))

    def adapters(self) -> list[Adapter]:
        """The trainable parameters now. PEFT changes them without changing modules."""
        return [
            Adapter(owner, key, parameter, self._stand_in(parameter))
            for owner in self._owners
            for key, parameter in owner.items()
            if parameter is not None and parameter.requires_grad
        ]

    def put_back(self) -> None:
        """Replace every stand-in by its parameter."""
        originals = {id(stand_in): original for original, stand_in in self._stand_ins.values()}
        for owner in self._owners:
            for key, each in owner.items():
                owner[key] = originals.get(id(each), each)

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._stand_ins.get(id(parameter))
        if known is not None and known[0] is parameter and shares_memory(*known):
            return known[1]
        stand_in = nn.Parameter(parameter.detach())
        stand_in.register_post_accumulate_grad_hook(_refuse_gradient)
        self._stand_ins[id(parameter)] = (parameter, stand_in)
        return stand_in


def shares_memory(parameter: nn.Parameter, stand_in: nn.Parameter) -> bool:
    """Whether ``stand_in`` still is the same bits as ``parameter``, in the same form."""
    return (
        stand_in.data_ptr() == parameter.data_ptr()
        and stand_in.dtype == parameter.dtype
        and stand_in.shape == parameter.shape
    )


def _refuse_gradient(stand_in: torch.Tensor) -> None:
    # Runs when a gradient is accumulated, which recomputation never does.
    stand_in.grad = None
    raise PreparedModelError(
        f"expected gradients of an adapter of shape {tuple(stand_in.shape)} through the outputs of "
        "its layer only, found one through a tensor taken from inside the layer (by a hook?). It "
        "cannot be recomputed; take the tensor from what a layer returns"
    )
