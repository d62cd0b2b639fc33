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
from collections.abc import Mapping
from itertools import repeat
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from poros.kernels.forwards import PatchedForward
from poros.stream.adapters import is_adapter_module
from poros.stream.args import PLAIN
from poros.stream.namespaces import CONTAINERS, content_of, is_like

_SEEN = (
    *PLAIN,
    np.generic,
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

_Place = tuple[int, str]
"""The number of a namespace, those of layers themselves first, and a key of it."""


class Reading(NamedTuple):
    """The attributes at one time. Equal identity of ``places`` means the same attributes."""

    places: list[_Place]
    values: tuple[Any, ...]
    contents: dict[_Place, Any]
    """Copies of containers."""


class Attributes:
    """The plain attributes of layers, as long as they are composed of the same modules.

    Holds the layers themselves weakly: a layer holds this.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = list(map(weakref.ref, layers.values()))
        spaces: dict[int, tuple[str, dict[str, Any], bool]] = {
            id(layer): (name, layer.__dict__, True) for name, layer in layers.items()
        }
        named = ((f"{n}.{i}", each) for n, one in layers.items() for i, each in one.named_modules())
        for inner, module in named:
            name = inner.strip(".")
            spaces[id(module)] = name, module.__dict__, not is_adapter_module(module)
            for key, value in module.__dict__.items():
                if isinstance(value, PretrainedConfig):
                    where = f"{name}.{key}".lstrip(".")
                    spaces.setdefault(id(value), (where, value.__dict__, False))
        self._names, tables, self._are_looked_into = zip(*spaces.values(), strict=True)
        self._inner = tables[len(layers) :]
        self._own: set[_Place] = set()
        """What the layer has changed by itself."""
        self._look()

    def read(self) -> Reading:
        """All of them now."""
        tables = self._tables()
        if sum(map(len, tables)) != self._size:
            self._look()
        owners = map(tables.__getitem__, self._numbers)
        return Reading(
            self._places,
            (*map(dict.get, owners, self._keys, repeat(_MISSING)),),
            {place: content_of(tables[place[0]].get(place[1])) for place in self._containers},
        )

    def changed(self, before: Reading, now: Reading) -> list[_Place]:
        """Those that are not the same in both."""
        if (
            now.places is before.places
            and not any(map(is_not, now.values, before.values))
            and all(map(is_like, now.contents.values(), before.contents.values()))
        ):
            return []
        old = {**dict(zip(before.places, before.values, strict=True)), **before.contents}
        new = {**dict(zip(now.places, now.values, strict=True)), **now.contents}
        return [
            place
            for place in old | new
            if place not in self._own
            and not _same(old.get(place, _MISSING), new.get(place, _MISSING))
        ]

    def name_of(self, place: _Place) -> str:
        """Below the layer."""
        number, key = place
        return f"{self._names[number]}.{key}".lstrip(".")

    def disregard(self, before: Reading) -> None:
        """Leave out from now on what has changed since ``before``: the layer did it by itself."""
        changed = self.changed(before, self.read())
        if changed:
            self._own.update(changed)
            self._look()

    def _look(self) -> None:
        """Find them, after one has come or gone."""
        tables = self._tables()
        self._size = sum(map(len, tables))
        found = {
            (number, key): value
            for number, table in enumerate(tables)
            for key, value in table.items()
            if (number, key) not in self._own
        }
        self._places = [
            (number, key)
            for (number, key), value in found.items()
            if isinstance(value, _SEEN) and key not in _LEFT_OUT
        ]
        self._numbers = [number for number, _ in self._places]
        self._keys = [key for _, key in self._places]
        self._containers = [
            (number, key)
            for (number, key), value in found.items()
            if type(value) in _HELD and key not in _OF_MODULE and self._are_looked_into[number]
        ]

    def _tables(self) -> list[dict[str, Any]]:
        layers = [each() for each in self._layers]
        return [*({} if each is None else each.__dict__ for each in layers), *self._inner]


def _same(left: Any, right: Any) -> bool:
    if is_like(left, right):
        return True
    is_plain = type(left) is type(right) and not isinstance(left, (torch.Tensor, *_HELD))
    return is_plain and bool(left == right)
