"""The gradients of parameters while micro-batches are on their way: who asks, and what changed."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_GRAD: Any = torch._C.TensorBase.grad
_WATCH = "_poros_watch"


class Gradients:
    """The gradients of parameters at one time, to see which have changed."""

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


def has_hooks(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether somebody sees gradients of parameters as they arrive."""
    return any(map(any, map(_HOOKS, parameters)))


_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Watch:
    """Has somebody called before anybody reads, writes or takes the gradient of a parameter.

    A parameter that is watched is of a class that differs from ``nn.Parameter`` in this alone.

    Args:
        parameters: Those of other classes are left as they are.
        asked: A method, called before a gradient is read or written; its object is held weakly.
        taken: Likewise, called before a backward that is to give gradients of single tensors, with
            each of the parameters that is among these.
        used: Called with one of them as a graph begins there, if given. Each operator on a
            parameter, and each look at an attribute, passes through Python then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        asked: Callable[[], None],
        taken: Callable[[nn.Parameter], None],
        *,
        used: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._kind: Any = _Watched if used is None else _Seeing
        self.asked = weakref.WeakMethod(asked)
        self._taken = weakref.WeakMethod(taken)
        self._ids = set(map(id, parameters))
        self._engine: Any = None
        """What runs backwards, while something else is called in its place."""
        self.used = None if used is None else weakref.WeakMethod(used)

    def begin(self) -> None:
        """From now on."""
        for each in self._parameters:
            if type(each) is nn.Parameter:
                each.__dict__[_WATCH] = weakref.ref(self)
                each.__class__ = self._kind
        engine: Any = torch.autograd
        if self._engine is None:
            self._engine, held = engine._engine_run_backward, weakref.ref(self)

            def run_backward(*args: Any, genuine: Any = self._engine, **kwargs: Any) -> Any:
                watch = held()
                if watch is not None:
                    watch._look_at(args[4])
                return genuine(*args, **kwargs)

            engine._engine_run_backward = run_backward

    def end(self) -> None:
        """No more."""
        _leave(self._parameters)
        engine: Any = torch.autograd
        if self._engine is not None:
            engine._engine_run_backward, self._engine = self._engine, None

    def _look_at(self, wanted: Iterable[Any]) -> None:
        """A backward begins that is to give the gradients of ``wanted``, if these are any."""
        taken = self._taken()
        for each in wanted:
            leaf: Any = each
            if not isinstance(each, torch.Tensor):
                leaf = getattr(each.node, "variable", None)
            if id(leaf) in self._ids and taken is not None:
                taken(leaf)


def _leave(parameters: Sequence[Any]) -> None:
    for each in parameters:
        if issubclass(type(each), _Watched):
            each.__class__ = nn.Parameter
            each.__dict__.pop(_WATCH, None)


class _Watched(nn.Parameter):
    is_watched = True  # for ``poros.kernels.adapters``

    def _watch(self) -> Watch | None:
        watch: Watch | None = self.__dict__.get(_WATCH, lambda: None)()
        if watch is None:  # a copy, or what an interruption has left
            _leave([self])
        return watch

    def _asked(self) -> None:
        watch = self._watch()
        asked = None if watch is None else watch.asked()
        if asked is not None:
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
            found = func(*args, **(kwargs or {}))
            has_graph = isinstance(found, torch.Tensor) and found.grad_fn is not None
        if has_graph:
            for each in pytree.tree_leaves(args):
                watch = each._watch() if isinstance(each, cls) else None
                used = None if watch is None or watch.used is None else watch.used()
                if used is not None:
                    used(each)
        return found
