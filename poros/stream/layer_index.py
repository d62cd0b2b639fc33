"""A layer's modules and tensors, taken stock of once and checked at each call.

PEFT adds and removes modules between steps, so what was found at ``prepare`` cannot be relied upon;
walking them at each call would cost more than the layer's own dispatch. Comparing the flat list
of children is exact and cheap: two equal lists of modules hold the same objects. Adapters of some
kinds come as parameters or buffers of modules that are there already, so tensors are compared too,
in any order: PEFT takes fused experts out and puts them back as it runs. Most of the dictionaries
looked at are empty, so they are passed over without a step of Python for each.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import nn

from poros.errors import PreparedModelError
from poros.kernels.forwards import PatchedForward, foreign_code, is_forward_of_liger
from poros.stream.adapters import Adapter, is_adapter_module, places
from poros.stream.attributes import Attributes
from poros.stream.marks import Identities, Marks

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

_TRAIN, _FORWARD = attrgetter("train"), attrgetter("forward")


class Adapters(NamedTuple):
    """The trainable parameters of one layer."""

    places: list[Adapter]
    parameters: list[nn.Parameter]
    """Each once."""
    ids: list[int]
    """Of these."""


class Code(NamedTuple):
    """The code of a layer's modules at one time."""

    found: tuple[Any, ...]
    kinds: list[Any]
    """The classes that have a forward, each once."""
    is_known: bool
    """Whether all of it is ours, or a known library's."""


class LayerIndex:
    """The modules of one layer at one time, and what is looked up in them at every call.

    Holds the layer itself weakly: the layer holds this.

    Args:
        layers: The layer, or several that are called one behind the other; by the beginning of the
            names of what is in them.
        frozen: Ids of the tensors that rest in the host store.

    Attributes:
        adapter_modules: Those of PEFT.
        attributes: The plain ones of its modules.
        places: Those of tensors that do not stream.
        of_adapters, of_base: The numbers of those that are an adapter's, and of the others.
    """

    def __init__(self, layers: Mapping[str, nn.Module], frozen: Collection[int]) -> None:
        modules = [module for layer in layers.values() for module in layer.modules()]
        self._layers = list(map(weakref.ref, layers.values()))
        self._inner = [each for each in modules if all(each is not one for one in layers.values())]
        self._child_tables = [module._modules for module in modules]
        self._children = values_of(self._child_tables)
        self._tensor_tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._parameters, module._buffers)
        ]
        self.note_tensors()
        # Those without a forward hold others, and are not called.
        called = [each for each in self._inner if type(each).forward is not nn.Module.forward]
        self._hook_tables = [getattr(each, f"_{kind}") for each in called for kind in _HOOKS]
        # Those that run at every module: PyTorch counts them with those of modules.
        self._hook_tables += [getattr(nn.modules.module, f"_global_{kind}") for kind in _HOOKS]
        self._dicts = [module.__dict__ for module in self._inner]
        configs = {id(each): each for each in (vars(module).get("config") for module in modules)}
        self._configs = [vars(each) for each in configs.values() if hasattr(each, "__dict__")]
        self.adapter_modules = [module for module in self._inner if is_adapter_module(module)]
        self.attributes = Attributes(layers)
        self.places = [
            each._replace(name=f"{name}.{each.name}".lstrip("."))
            for name, layer in layers.items()
            for each in places(layer, frozen)
        ]
        self._owners = [each.owner for each in self.places]
        self._keys = [each.key for each in self.places]
        self.of_adapters = [number for number, each in enumerate(self.places) if each.users]
        self.of_base = [number for number, each in enumerate(self.places) if not each.users]
        self._adapters: Adapters | None = None
        self._looked_up: tuple[Any, ...] = ()
        self._code = Code((), [], True)

    def is_current(self) -> bool:
        """Whether the layer still consists of exactly these modules."""
        return self._children == values_of(self._child_tables)

    def has_same_tensors(self) -> bool:
        """Whether it holds the tensors that were noted, and no others."""
        now = values_of(self._tensor_tables)
        if Identities(now) == self._tensors:
            return True
        is_in_place = all(each.key in each.owner for each in self.places)
        return is_in_place and set(map(id, now)) == set(map(id, self._tensors.objects))

    def note_tensors(self) -> None:
        """Note which tensors there are now: the layer itself may make some as it runs.

        They are kept alive, so that ids stay theirs.
        """
        self._tensors = Identities(values_of(self._tensor_tables))

    def modules(self) -> list[nn.Module]:
        """The layer and all modules in it."""
        layers = [layer for each in self._layers if (layer := each()) is not None]
        if len(layers) < len(self._layers):
            raise PreparedModelError("expected a living layer, found one whose model was deleted")
        return [*layers, *self._inner]

    def hooks(self) -> list[int]:
        """Keys of the hooks inside the layer, which PyTorch gives out once each."""
        return list(chain.from_iterable(filter(None, self._hook_tables)))

    def code(self) -> Code:
        """The code that runs in the layer now; equal as long as it is the same.

        Code that is neither ours nor a known library's may read and change anything: global
        variables, random states of its own.
        """
        forwards = list(map(dict.get, self._dicts, repeat("forward")))
        attention = list(map(dict.get, self._configs, repeat("_attn_implementation_internal")))
        functions = list(map(_FORWARD, self._code.kinds))
        now = forwards, list(map(type, self._inner)), attention, functions
        if now != self._code.found:
            modules = self.modules()
            held = dict.fromkeys(kind for each in modules for kind in type(each).__mro__)
            kinds = [kind for kind in held if "forward" in vars(kind)]
            is_known = foreign_code(modules) is None and all(
                each is None or isinstance(each, PatchedForward) or is_forward_of_liger(each)
                for each in forwards
            )
            self._code = Code((*now[:3], list(map(_FORWARD, kinds))), kinds, is_known)
        return self._code

    def is_in_mode(self, mode: bool) -> bool:
        """Whether the layer and all in it have this mode, and no module sets it in its own way."""
        return (
            self.modules()[0].training is mode
            and self.is_current()
            and all(map(is_, map(_TRAIN, set(map(type, self._inner))), repeat(nn.Module.train)))
            and all(map(is_, map(dict.get, self._dicts, repeat("training")), repeat(mode)))
            and not any(map(dict.__contains__, self._dicts, repeat("train")))
        )

    def marks(self, numbers: Sequence[int] | None = None) -> Marks:
        """What lies in ``places`` now: in those of these ``numbers``, or in all."""
        if numbers is None:
            return Marks(list(map(dict.get, self._owners, self._keys)))
        return Marks([self._owners[each].get(self._keys[each]) for each in numbers])

    def adapters(self, marks: Marks | None = None) -> Adapters:
        """The trainable parameters now, as ``marks`` of all places have them.

        The same object as before as long as they are the same.
        """
        marks = marks or self.marks()
        now = marks.where[0], marks.are_trained
        if self._adapters is None or now != self._looked_up:
            # Whether a tensor that streams is still frozen is looked at by poros.stream.visit.
            held = zip(self.places, marks.tensors, marks.are_trained, strict=True)
            found = [
                Adapter(place.owner, place.key, tensor)
                for place, tensor, is_trained in held
                if is_trained and isinstance(tensor, nn.Parameter)
            ]
            distinct = {id(each.parameter): each.parameter for each in found}
            self._adapters = Adapters(found, list(distinct.values()), list(distinct))
            self._looked_up = now
        return self._adapters


def values_of(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """What these dictionaries hold, one after the other."""
    return list(chain.from_iterable(map(dict.values, filter(None, tables))))
