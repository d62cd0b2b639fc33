"""What all layers of a model are called with, told by what the first of them is called with.

Most models call each layer with the same objects: mask, positions, tables of rotations. Where that
was seen, the code of a micro-batch is stopped at its first layer already, and what the others would
have been called with is taken for known. Whether it is so shows when the code runs again, before
its loss: if not, that micro-batch runs by itself, and its kind is looked at in full from then on.
"""

from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

INPUT = object()
"""Stands for the layer's input among its arguments."""
_TENSOR = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FIXED = (torch.dtype, torch.device, Enum)


class Call(NamedTuple):
    """What a layer is called with, its input left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], given: object) -> "Call":
        """Of a call with the input ``given``."""
        return cls(
            tuple(INPUT if value is given else value for value in args),
            {key: INPUT if value is given else value for key, value in kwargs.items()},
        )

    def is_like(self, other: "Call") -> bool:
        """Whether both are given the same objects, or equal plain values."""
        return (
            len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and all(map(_same, self.args, other.args))
            and all(_same(value, other.kwargs[key]) for key, value in self.kwargs.items())
        )

    def without_tensors(self) -> "Call":
        """The same, with a mark in the place of each tensor and of each empty KV cache."""
        return Call(
            tuple(map(_marked, self.args)),
            {key: _marked(value) for key, value in self.kwargs.items()},
        )


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    # 0.0 equals -0.0, and a NaN not itself.
    return type(left) in _PLAIN and repr(left) == repr(right)


def _marked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, Cache):  # a new one in each run, which stays empty
        return type(value)
    return tuple(map(_marked, value)) if isinstance(value, tuple) else value


def is_fixed(value: Any) -> bool:
    """Whether nobody can change ``value``, but for what tensors in it hold, or it is not read."""
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    return value is INPUT or isinstance(value, (torch.Tensor, Cache, *_PLAIN, *_FIXED))


class Outlines:
    """Of which kinds of micro-batches the layers are all called alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}

    def are_alike(self, kind: Hashable) -> bool:
        """Whether all layers are called as the first one is, as far as is known."""
        return self._known.get(kind, False)

    def note(self, kind: Hashable, are_alike: bool) -> None:
        """What was seen. Once they were not, they are looked at each time."""
        self._known[kind] = self._known.get(kind, True) and are_alike
