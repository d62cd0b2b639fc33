"""Casts of adapters that come before those that a layer's graph shows.

DoRA first uses an adapter for a norm that takes no gradient: that part of the graph is dropped
before the layer returns. Within an autocast region a resident run makes its one cast there. So its
place among the nodes of the graph is seen by watching what is called with an adapter.

Note: When it is watched
    The first forward with these adapters in this state shows whether the layer casts any of them
    early. If so, all forwards are watched: that costs some microseconds for each use of an adapter,
    and no other call is touched. Otherwise the graph shows it all.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from poros.replay.order import CAST
from poros.stream.within import on_plain_tensors

_MAX_STATES = 32
"""States that a layer is remembered in; more come only from a loop that changes it at each step."""
_NUMBERS = "_poros_first_casts"


@contextmanager
def first_casts(tensors: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Watch what is called with ``tensors`` by Python code in the body.

    Yields:
        By id of the tensor, the number of the node in which it is first cast. A cast that makes no
        node, since no gradient is taken there, has the number of the next one.
    """
    numbers: dict[int, int] = {}
    own: list[tuple[Any, type]] = [(tensor, type(tensor)) for tensor in tensors]
    try:
        for tensor, kind in own:
            tensor.__dict__[_NUMBERS] = numbers
            tensor.__class__ = _WatchedParameter if kind is nn.Parameter else _WatchedTensor
        yield numbers
    finally:
        for tensor, kind in own:
            tensor.__class__ = kind
            tensor.__dict__.pop(_NUMBERS, None)


def _call(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    before = torch._C._autograd._get_sequence_nr()
    return on_plain_tensors(_watched_call, func, args, kwargs or {}, before)


def _watched_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: int) -> Any:
    result = func(*args, **kwargs)
    # Most calls ask for a shape or a type.
    if isinstance(result, torch.Tensor | tuple):
        for argument in (*args, *kwargs.values()):
            if type(argument) in _WATCHED:
                numbers = argument.__dict__[_NUMBERS]
                if id(argument) not in numbers:
                    number = _number_of_cast(argument, result, before)
                    if number is not None:
                        numbers[id(argument)] = number
    return result


class _WatchedTensor(torch.Tensor):
    is_watched = True  # for ``poros.kernels.adapters``
    __torch_function__ = staticmethod(_call)


class _WatchedParameter(nn.Parameter):
    is_watched = True
    __torch_function__ = staticmethod(_call)


_WATCHED = (_WatchedParameter, _WatchedTensor)


def _number_of_cast(tensor: torch.Tensor, result: Any, before: int) -> int | None:
    """The number of the cast of ``tensor`` that was made for ``result``; None if there is none."""
    results = result if isinstance(result, tuple) else (result,)
    tensors = [item for item in results if isinstance(item, torch.Tensor)]
    if not torch.is_grad_enabled():
        # No graph tells. Autocast alone gives a low precision for what is in full.
        is_low = any(item.is_floating_point() and item.itemsize < 4 for item in tensors)
        return before if is_low and tensor.dtype == torch.float32 else None
    nodes: list[Any] = [item.grad_fn for item in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node._sequence_nr() < before:
            continue
        following = [follower for follower, _ in node.next_functions]
        if node.name() == CAST and following[0] is not None:
            leaf = getattr(following[0], "variable", None)
            if leaf is tensor or following[0] is tensor.grad_fn is not None:
                return int(node._sequence_nr())
        nodes += following
    return None


class EarlyCasts:
    """What is known of them for one layer."""

    def __init__(self) -> None:
        self._unseen: dict[Hashable, set[int]] = {}
        self._early: set[Hashable] = set()

    def are_possible(self, state: Hashable) -> bool:
        """Whether a forward in ``state`` has to be watched."""
        return self._unseen.get(state) != set() or state in self._early

    def learn(
        self, state: Hashable, num_adapters: int, used: Collection[int], *, are_early: bool
    ) -> None:
        """Remember a watched forward.

        Args:
            state: The state it was in.
            num_adapters: How many adapter parameters there are.
            used: The numbers of those that took part.
            are_early: Whether one was cast before the cast that the graph shows.
        """
        if state not in self._unseen:
            if len(self._unseen) >= _MAX_STATES:
                oldest = next(iter(self._unseen))
                del self._unseen[oldest]
                self._early.discard(oldest)
            self._unseen[state] = set(range(num_adapters))
        self._unseen[state].difference_update(used)
        if are_early:
            self._early.add(state)
