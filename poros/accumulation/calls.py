"""What a layer is called with, as far as two runs of the same code can be compared by it."""

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
        """Whether both are given equal plain values, and the same objects otherwise."""
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
