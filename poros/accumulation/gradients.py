"""The gradients of parameters while micro-batches are on their way: who asks, and what changed."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_GRAD: Any = torch._C.TensorBase.grad
_WATCH = "_poros_watch"


class Gradients:
    """The gradients of parameters at one time, to see which have changed, and to undo that."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._held = [(each, *_state(each)) for each in parameters]

    def changed(self) -> list[nn.Parameter]:
        """Parameters with other gradients than then."""
        return [
            each
            for each, before, version in self._held
            if (now := _state(each))[0] is not before or now[1] != version
        ]

    def undo(self) -> bool:
        """Have the gradients as they were, if that can be: where there were none."""
        changed = {id(each) for each in self.changed()}
        if any(before is not None for each, before, _ in self._held if id(each) in changed):
            return False
        for each, _, _ in self._held:
            if id(each) in changed:
                _GRAD.__set__(each, None)
        return True


def _state(parameter: nn.Parameter) -> tuple[torch.Tensor | None, int | None]:
    gradient = _GRAD.__get__(parameter)
    return gradient, None if gradient is None else gradient._version


class Watch:
    """Has ``asked`` called before anybody reads or writes the gradient of a parameter.

    A parameter that is watched is of a class that differs from ``nn.Parameter`` in this alone.

    Args:
        parameters: Those of other classes are left as they are.
        asked: A method, called before; its object is held weakly.
        sees_grad: Whether ``torch.autograd.grad`` counts as reading. Each operator on a parameter
            passes through Python then, so only where no edge of the graph leads to it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], asked: Callable[[], None], sees_grad: bool
    ) -> None:
        self._parameters = parameters
        self._kind: Any = _Seeing if sees_grad else _Watched
        self.asked = weakref.WeakMethod(asked)

    def begin(self) -> None:
        """From now on."""
        for each in self._parameters:
            if type(each) is nn.Parameter:
                each.__dict__[_WATCH] = weakref.ref(self)
                each.__class__ = self._kind

    def end(self) -> None:
        """No more."""
        for each in self._parameters:
            _leave(each)


def _leave(parameter: Any) -> None:
    kind: Any = type(parameter)
    if issubclass(kind, _Watched):
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop(_WATCH, None)


class _Watched(nn.Parameter):
    is_watched = True  # for ``poros.kernels.adapters``

    def _asked(self) -> None:
        watch = self.__dict__.get(_WATCH, lambda: None)()
        asked = None if watch is None else watch.asked()
        if asked is None:  # a copy, or what an interruption has left
            _leave(self)
        else:
            asked()

    @property
    def grad(self) -> torch.Tensor | None:
        self._asked()
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._asked()
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._asked()
        _GRAD.__delete__(self)


class _Seeing(_Watched):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            for each in args[1]:  # its inputs
                if isinstance(each, cls):
                    each._asked()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
