"""What a layer is called with and in, as far as two runs of the same code can be compared by it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from poros.stream.state import Surroundings
from poros.stream.within import Within

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


class Environment(NamedTuple):
    """What is around a call of code, at one time."""

    surroundings: Surroundings
    has_cache: bool
    """Whether autocast keeps what it has cast."""
    watchers: tuple[int, int, bool]
    """How many modes see operators and functions, and whether somebody packs saved tensors."""

    @classmethod
    def capture(cls, device: torch.device) -> "Environment":
        """That of now, for work on ``device``."""
        watchers = (
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        )
        return cls(Surroundings.capture(device), torch.is_autocast_cache_enabled(), watchers)

    def entering(self, now: "Environment") -> Callable[[], AbstractContextManager[object]]:
        """What has the body in this, where ``now`` is around; watchers left out.

        Each body is an autocast region of its own.
        """
        if self[:2] == now[:2] and not self.surroundings.is_autocast:
            return nullcontext

        def fill(stack: ExitStack) -> None:
            self.surroundings.enter(stack, self.has_cache)

        return lambda: Within(fill)
