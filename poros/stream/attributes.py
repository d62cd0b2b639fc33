"""Plain attributes of a layer's modules and of their configurations, compared between two times.

A rate of dropout, the kind of attention, a flag of somebody's own module: what a forward reads
besides tensors. The recomputation has to find the values that the forward has found. What the layer
changes by itself as it runs (a counter, a note that a hook takes) says nothing about it and is left
out, and so are training flags, which are replayed.

Compared are values that nobody can edit in place, functions, and what is in lists, dictionaries,
sets and tuples of modules but PEFT's. Objects of other kinds are not looked into, and of
configurations no containers.
"""

import types
import weakref
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from poros.kernels.forwards import PatchedForward
from poros.stream.adapters import is_adapter_module
from poros.stream.args import PLAIN
from poros.stream.namespaces import CONTAINERS, content_of, is_like

_SEEN = (
    *PLAIN,
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, PatchedForward),
)
_LEFT_OUT = frozenset(
    {
        "training",
        # Written by hooks, trainers and loops; no layer computes with them.
        "_is_full_backward_hook",
        "_is_hf_initialized",
        "gradient_checkpointing",
        "in_features",
        "out_features",
        "use_cache",
        # Written to a classifier's configuration by its own loss, in the first forward.
        "problem_type",
        # The guards of ``poros.model.guards``.
        "merge",
        "unmerge",
    }
)
_HELD = (*CONTAINERS, tuple, frozenset)
_OF_MODULE = frozenset({*vars(nn.Module()), *vars(nn.ParameterDict())})
_MISSING = object()
_ROOT = 0
"""Stands for the id of the layer's own ``__dict__``."""


_Place = tuple[int, str]
"""The id of a module's or a configuration's ``__dict__``, and a key of it."""


class Reading(NamedTuple):
    """The attributes at one time. Equal identity of ``places`` means the same attributes."""

    places: list[_Place]
    values: tuple[Any, ...]
    contents: dict[_Place, Any]
    """Copies of containers."""


class Attributes:
    """The plain attributes of one layer.

    Holds the layer itself weakly: the layer holds this.

    Args:
        layer: It must be composed of the same modules for as long as this is used.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self._tables: dict[int, tuple[str, dict[str, Any]]] = {}
        self._of_modules: list[tuple[int, dict[str, Any]]] = []
        for name, module in layer.named_modules():
            if module is not layer:
                self._tables[id(module.__dict__)] = (name, module.__dict__)
                if not is_adapter_module(module):
                    self._of_modules.append((id(module.__dict__), module.__dict__))
            for key, value in module.__dict__.items():
                if isinstance(value, PretrainedConfig):
                    where = f"{name}.{key}".lstrip(".")
                    self._tables.setdefault(id(value.__dict__), (where, value.__dict__))
        self._dicts = [table for _, table in self._tables.values()]
        self._own: set[_Place] = set()
        """What the layer has changed by itself."""
        self._look()

    def read(self) -> Reading:
        """All of them now."""
        root = self._root()
        if sum(map(len, self._dicts)) + len(root) != self._size:
            self._look()
        return Reading(
            self._places,
            (
                *map(root.get, self._root_keys, repeat(_MISSING)),
                *map(dict.get, self._owners, self._keys, repeat(_MISSING)),
            ),
            {place: content_of(table.get(place[1])) for place, table in self._containers},
        )

    def changes(self, before: Reading) -> list[str]:
        """Names of those that are not as in ``before``, with both values."""
        return [
            f"{self._name(place)} ({_brief(old)} then, {_brief(new)} now)"
            for place, old, new in self._differing(before, self.read())
        ]

    def differ(self, before: Reading, now: Reading) -> bool:
        """Whether any is not the same in both."""
        return bool(self._differing(before, now))

    def disregard(self, before: Reading) -> None:
        """Leave out from now on what has changed since ``before``: the layer did it by itself."""
        differing = self._differing(before, self.read())
        if differing:
            self._own.update(place for place, *_ in differing)
            self._look()

    def _look(self) -> None:
        """Find them, after one has come or gone."""
        root = self._root()
        self._size = sum(map(len, self._dicts)) + len(root)
        self._root_keys = self._plain_keys(_ROOT, root)
        places = [
            (number, key)
            for number, (_, table) in self._tables.items()
            for key in self._plain_keys(number, table)
        ]
        self._places = [*((_ROOT, key) for key in self._root_keys), *places]
        self._owners = [self._tables[number][1] for number, _ in places]
        self._keys = [key for _, key in places]
        self._containers = [
            ((number, key), table)
            for number, table in [(_ROOT, root), *self._of_modules]
            for key, value in table.items()
            if type(value) in _HELD and key not in _OF_MODULE and (number, key) not in self._own
        ]

    def _plain_keys(self, number: int, table: dict[str, Any]) -> list[str]:
        return [
            key
            for key, value in table.items()
            if isinstance(value, _SEEN) and key not in _LEFT_OUT and (number, key) not in self._own
        ]

    def _root(self) -> dict[str, Any]:
        layer = self._layer()
        return layer.__dict__ if layer is not None else {}

    def _differing(self, before: Reading, now: Reading) -> list[tuple[_Place, Any, Any]]:
        if (
            now.places is before.places
            and not any(map(is_not, now.values, before.values))
            and all(map(is_like, now.contents.values(), before.contents.values()))
        ):
            return []
        old = {**dict(zip(before.places, before.values, strict=True)), **before.contents}
        new = {**dict(zip(now.places, now.values, strict=True)), **now.contents}
        return [
            (place, old.get(place, _MISSING), new.get(place, _MISSING))
            for place in old | new
            if place not in self._own
            and not _same(old.get(place, _MISSING), new.get(place, _MISSING))
        ]

    def _name(self, place: _Place) -> str:
        number, key = place
        return key if number == _ROOT else f"{self._tables[number][0]}.{key}".lstrip(".")


def _same(left: Any, right: Any) -> bool:
    if is_like(left, right):
        return True
    is_plain = type(left) is type(right) and not isinstance(left, (torch.Tensor, *_HELD))
    return is_plain and bool(left == right)


def _brief(value: Any) -> str:
    return "nothing" if value is _MISSING else getattr(value, "__qualname__", repr(value))[:60]
