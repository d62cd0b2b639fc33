"""A layer's modules, taken stock of once and checked at each call.

PEFT adds and removes modules between steps, so what was found at ``prepare`` cannot be relied upon;
walking them at each call would cost more than the layer's own dispatch. Comparing the flat list
of children is exact and cheap: two equal lists of modules hold the same objects. Adapters of some
kinds come as parameters or buffers of modules that are there already, so tensors are compared too,
in any order: PEFT takes fused experts out and puts them back as it runs. Most of the dictionaries
looked at are empty, so they are passed over without a step of Python for each.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from types import MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import PreparedModelError
from poros.kernels.forwards import PatchedForward, is_forward_of_liger
from poros.stream.adapters import AdapterPlace, adapter_places, is_adapter_module
from poros.stream.attributes import Attributes

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

_POINTER: Callable[[Any], int] = torch.Tensor.data_ptr
_FORM = attrgetter("dtype", "shape")
_REQUIRES = attrgetter("requires_grad")
_TRAIN = attrgetter("train")


class Adapter(NamedTuple):
    """One place of a trainable parameter in a layer."""

    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter


class Adapters:
    """The trainable parameters of one layer, and what is derived from them once.

    Args:
        places: Each place of each of them.
        frozen: Places of tensors of adapters that are not trained, active or not.

    Attributes:
        places, frozen: Likewise.
        parameters: Each once.
        ids: Of these.
        where: Where these lie, and in which form.
    """

    def __init__(self, places: list[Adapter], frozen: list[AdapterPlace]) -> None:
        self.places = places
        self.frozen = frozen
        distinct = {id(adapter.parameter): adapter.parameter for adapter in places}
        self.parameters = list(distinct.values())
        self.ids = list(distinct)
        self.where = places_of(self.parameters)

    def are_as_they_were(self) -> bool:
        """Whether all still require gradients, at the same addresses and in the same form."""
        return all(map(_REQUIRES, self.parameters)) and places_of(self.parameters) == self.where

    def moved(self) -> Adapter | None:
        """A place where the parameter of then is no longer, or not as it was."""
        known = dict(zip(self.ids, zip(*self.where, strict=True), strict=True))
        for place in self.places:
            held = place.owner.get(place.key)
            where = _POINTER(place.parameter), _FORM(place.parameter)
            if held is not place.parameter or where != known[id(held)]:
                return place
        return None


class LayerIndex:
    """The modules of one layer at one time, and what is looked up in them at every call.

    Holds the layer itself weakly: the layer holds this.

    Args:
        layer: The layer.
        frozen: Ids of the tensors that rest in the host store.

    Attributes:
        child_tables, tensor_tables, hook_tables: Dictionaries that hold what they are named for.
        adapter_modules: Those of PEFT.
        attributes: The plain ones of its modules.
    """

    def __init__(self, layer: nn.Module, frozen: Collection[int]) -> None:
        modules = list(layer.modules())
        self._layer = weakref.ref(layer)
        self._inner = modules[1:]
        self.child_tables = [module._modules for module in modules]
        self._children = values_of(self.child_tables)
        self.tensor_tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._parameters, module._buffers)
        ]
        self.note_tensors()
        # Those without a forward hold others, and are not called.
        called = [each for each in self._inner if type(each).forward is not nn.Module.forward]
        self.hook_tables = [getattr(each, f"_{kind}") for each in called for kind in _HOOKS]
        # Those that run at every module: PyTorch counts them with those of modules.
        self.hook_tables += [getattr(nn.modules.module, f"_global_{kind}") for kind in _HOOKS]
        self._dicts = [module.__dict__ for module in self._inner]
        self.adapter_modules = [module for module in self._inner if is_adapter_module(module)]
        self._adapter_places: list[AdapterPlace] = []
        self.attributes = Attributes(layer)
        self._frozen = frozen
        self._adapters: Adapters | None = None
        # What was where when those were looked up, and what of it was not trainable.
        self._places: list[int] = []
        self._idle: list[torch.Tensor] = []

    def is_current(self) -> bool:
        """Whether the layer still consists of exactly these modules."""
        return self._children == values_of(self.child_tables)

    def has_same_tensors(self) -> bool:
        """Whether it holds the tensors that were noted, and no others."""
        now = self._ids_now()
        return now == self._ids or set(now) == set(self._ids)

    def note_tensors(self) -> None:
        """Note which tensors there are now: the layer itself may make some as it runs.

        They are kept alive, so that ids stay theirs.
        """
        self._tensors = values_of(self.tensor_tables)
        self._ids = list(map(id, self._tensors))

    def _ids_now(self) -> list[int]:
        return list(map(id, values_of(self.tensor_tables)))

    def modules(self) -> list[nn.Module]:
        """The layer and all modules in it."""
        layer = self._layer()
        if layer is None:
            raise PreparedModelError("expected a living layer, found one whose model was deleted")
        return [layer, *self._inner]

    def hooks(self) -> list[int]:
        """Keys of the hooks that run inside the layer; equal lists mean the same hooks."""
        return keys_of(self.hook_tables)

    def has_fixed_graph(self) -> bool:
        """Whether the layer's own code alone decides what graph a call of it makes."""
        if any(self.hook_tables):
            return False
        forwards = list(map(dict.get, self._dicts, repeat("forward")))
        kinds = set(map(type, forwards))
        known = (NoneType, PatchedForward, MethodType)
        return all(map(issubclass, kinds, repeat(known))) and (
            MethodType not in kinds or all(map(_is_of_kernels, forwards))
        )

    def is_in_mode(self, mode: bool) -> bool:
        """Whether the layer and all in it have this mode, and no module sets it in its own way."""
        return (
            self.modules()[0].training is mode
            and self.is_current()
            and all(map(is_, map(_TRAIN, set(map(type, self._inner))), repeat(nn.Module.train)))
            and all(map(is_, map(dict.get, self._dicts, repeat("training")), repeat(mode)))
            and not any(map(dict.__contains__, self._dicts, repeat("train")))
        )

    def adapters(self) -> Adapters:
        """The trainable parameters now. PEFT changes them without changing modules.

        The same object as before as long as they are the same.
        """
        if self._adapters is None or not self._are_current(self._adapters):
            now = self._ids_now()
            if self._adapters is None or self._places != now:
                # Kinds that hold tensors in a ParameterDict come and go by its keys alone.
                self._adapter_places = adapter_places(self.modules()[0], self._frozen)
                self._places = now
            # Whether a frozen tensor is still frozen is looked at by poros.stream.visit.
            parameters: list[tuple[dict[str, Any], str, nn.Parameter]] = [
                (owner, key, value)
                for owner in self.tensor_tables[::2]
                for key, value in owner.items()
                if value is not None and id(value) not in self._frozen
            ]
            self._idle = [value for *_, value in parameters if not value.requires_grad]
            self._adapters = Adapters(
                [
                    Adapter(owner, key, parameter)
                    for owner, key, parameter in parameters
                    if parameter.requires_grad
                ],
                [
                    place
                    for place in self._adapter_places
                    if (held := place.owner.get(place.key)) is not None and not held.requires_grad
                ],
            )
        return self._adapters

    def _are_current(self, adapters: Adapters) -> bool:
        return (
            self._ids_now() == self._places
            and adapters.are_as_they_were()
            and not any(map(_REQUIRES, self._idle))
        )


def places_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Where they lie, and in which form. Looked up in C: this runs at every visit."""
    return list(map(_POINTER, tensors)), list(map(_FORM, tensors))


def keys_of(tables: Iterable[dict[int, Any]]) -> list[int]:
    """Keys of the hooks in these dictionaries, which PyTorch gives out once each."""
    return list(chain.from_iterable(filter(None, tables)))


def values_of(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """What these dictionaries hold, one after the other."""
    return list(chain.from_iterable(map(dict.values, filter(None, tables))))


def _is_of_kernels(forward: Any) -> bool:
    """Whether a forward set on a module is a known library's, or none is set; or ours."""
    return type(forward) is not MethodType or is_forward_of_liger(forward)
