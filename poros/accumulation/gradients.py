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
        self._parameters = parameters
        self._held = list(map(_GRAD.__get__, parameters))
        self._versions = [-1 if each is None else each._version for each in self._held]

    def changed(self) -> list[nn.Parameter]:
        """Parameters with other gradients than then."""
        now = map(_GRAD.__get__, self._parameters)
        return [
            parameter
            for parameter, before, version, found in zip(
                self._parameters, self._held, self._versions, now, strict=True
            )
            if found is not before or (found is not None and found._version != version)
        ]

    def undo(self) -> bool:
        """Have the gradients as they were, if that can be: where there were none."""
        changed = {id(each) for each in self.changed()}
        pairs = zip(self._parameters, self._held, strict=True)
        if any(before is not None for each, before in pairs if id(each) in changed):
            return False
        for each in self._parameters:
            if id(each) in changed:
                _GRAD.__set__(each, None)
        return True


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
        _leave(self._parameters)


def _leave(parameters: Sequence[Any]) -> None:
    for each in parameters:
        if issubclass(type(each), _Watched):
            each.__class__ = nn.Parameter
            each.__dict__.pop(_WATCH, None)


class _Watched(nn.Parameter):
    is_watched = True  # for ``poros.kernels.adapters``

    def _asked(self) -> None:
        watch = self.__dict__.get(_WATCH, lambda: None)()
        asked = None if watch is None else watch.asked()
        if asked is None:  # a copy, or what an interruption has left
            _leave([self])
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
