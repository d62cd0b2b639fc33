"""The gradients of parameters while micro-batches are on their way: who asks, and who takes."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from poros.kernels.nodes import nodes_from, weakly

_GRAD: Any = torch._C.TensorBase.grad
_WATCH = "_poros_watch"


def has_hooks(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether somebody sees gradients of parameters as they arrive."""
    return any(map(any, map(_HOOKS, parameters)))


_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def leaves_of(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    """The leaves that a tensor's gradient goes to: what is behind it, or itself."""
    if tensor is None:
        return []
    nodes = nodes_from([get_gradient_edge(tensor).node])
    return [node.variable for node in nodes if hasattr(node, "variable")]


def add_by_hand(
    edge: Any, gradient: torch.Tensor, anchor: torch.Tensor | None, below: Iterable[torch.Tensor]
) -> None:
    """Add gradients as ``torch.autograd.backward`` would, but that no node accumulates them.

    Args:
        edge: Behind the part of a graph whose gradients are taken.
        gradient: There.
        anchor: A leaf before that part, if any.
        below: The parameters in it.
    """
    parameters = [each for each in below if each.requires_grad]
    wanted = [*parameters, *([] if anchor is None else [anchor])]
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        [edge], wanted, [gradient], allow_unused=True
    )
    seen: set[int] = set()
    with torch.no_grad():
        for parameter, term in zip(parameters, found, strict=False):
            if term is None:
                continue
            if parameter.grad is None:
                # One tensor may be the gradient of several.
                parameter.grad = term.clone() if id(term) in seen else term
                seen.add(id(term))
            else:
                parameter.grad.add_(term)


def are_watchable(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether all are of the class that ``Watch`` can exchange."""
    return set(map(type, parameters)) <= {nn.Parameter, _Watched}


class Watch:
    """Has somebody called before anybody reads or writes the gradient of a parameter, or takes it.

    A parameter that is watched is of a class that differs from ``nn.Parameter`` in this alone.

    Args:
        parameters: Those of other classes are left as they are.
        asked: A method, called before a gradient is read or written; its object is held weakly.
        goes_back: Likewise, called before a backward with the nodes that it begins at, and the
            leaves or nodes whose gradients it is to give, if these are not all.
        used: Likewise, called with a parameter as a graph begins there, if given. Each operator on
            one passes through Python then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        asked: Callable[[], None],
        goes_back: Callable[[list[Any], list[Any]], None],
        used: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self.asked = weakly(asked)
        self._goes_back = weakly(goes_back)
        self._kind: Any = _Watched if used is None else _Seeing
        self.used = None if used is None else weakly(used)
        self._engine: Any = None
        """What runs backwards, while something else is called in its place."""

    def begin(self) -> None:
        """From now on."""
        for each in self._parameters:
            if type(each) is nn.Parameter:
                each.__dict__[_WATCH] = weakref.ref(self)
                each.__class__ = self._kind
        engine: Any = torch.autograd
        if self._engine is None:
            genuine, goes_back = engine._engine_run_backward, self._goes_back

            def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
                goes_back(list(map(_node_of, roots)), list(map(_leaf_of, args[3])))
                return genuine(roots, *args, **kwargs)

            self._engine, engine._engine_run_backward = genuine, run_backward

    def end(self) -> None:
        """No more."""
        _leave(self._parameters)
        engine: Any = torch.autograd
        if self._engine is not None:
            engine._engine_run_backward, self._engine = self._engine, None


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node


def _leaf_of(wanted: Any) -> Any:
    is_tensor = isinstance(wanted, torch.Tensor)
    return wanted if is_tensor else getattr(wanted.node, "variable", wanted.node)


def _leave(parameters: Sequence[Any]) -> None:
    for each in parameters:
        if issubclass(type(each), _Watched):
            each.__class__ = nn.Parameter
            each.__dict__.pop(_WATCH, None)


class _Watched(nn.Parameter):
    is_plain = True  # for ``poros.kernels.adapters``: operators take it as they take others

    def _asked(self) -> None:
        watch: Watch | None = self.__dict__.get(_WATCH, lambda: None)()
        if watch is None:  # a copy, or what an interruption has left
            _leave([self])
        else:
            watch.asked()

    def __getstate__(self) -> dict[str, Any]:
        return {key: each for key, each in self.__dict__.items() if key != _WATCH}

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
    is_plain, is_watched = False, True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            has_graph = isinstance(found, torch.Tensor) and found.grad_fn is not None
        for each in tree_leaves(args) if has_graph else ():
            watch = each.__dict__.get(_WATCH, lambda: None)() if isinstance(each, cls) else None
            if watch is not None and watch.used is not None:
                watch.used(each)
        return found
