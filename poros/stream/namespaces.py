"""What is bound in the namespaces of modules, containers included: copied, compared, put back."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from operator import is_
from typing import Any

import torch
from torch import nn

from poros.stream.args import PLAIN
from poros.stream.marks import version_of

_MISSING = object()
OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""What is looked at elsewhere."""
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def contents_of(table: Mapping[str, Any], without: Collection[str] = frozenset()) -> dict[str, Any]:
    """A copy of a namespace: containers are copies as well, tensors come with their versions."""
    return {name: _held(each) for name, each in table.items() if name not in without}


def _held(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value, version_of(value)
    return content_of(value) if type(value) in CONTAINERS else value


_EMPTY: dict[type, Any] = {kind: kind() for kind in CONTAINERS}


class InOrder(tuple[Any, ...]):
    """The elements of a set, in its order, which a copy of it may not have."""


def content_of(container: Any) -> Any:
    """A copy of a container."""
    if type(container) in CONTAINERS and not container:
        return _EMPTY[type(container)]  # each module has a dozen of them
    return InOrder(container) if isinstance(container, set) else copy(container)


@contextmanager
def put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What the body binds in the namespaces of ``modules``, or puts into containers, is undone."""
    tables = [vars(module) for module in modules]
    before = [table.copy() for table in tables]
    held = [
        (each, content_of(each))
        for table in tables
        for name, each in table.items()
        if type(each) in CONTAINERS and name not in OF_MODULES
    ]
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            for name in (table.keys() | old.keys()) - OF_MODULES:
                if name not in old:
                    del table[name]
                elif table.get(name, _MISSING) is not old[name]:
                    table[name] = old[name]
        for container, content in held:
            refill(container, content)


def refill(container: Any, content: Any) -> None:
    """Have ``container`` hold what ``content`` holds, unless it does."""
    if not is_like(container, content):
        container.clear()
        fill = container.update if hasattr(container, "update") else container.extend
        fill(content)


def bound(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Which names, in which places, are bound anew, or are containers or tensors that were edited.

    Both are the ``contents_of`` the same namespaces.
    """
    for place, (old, new) in enumerate(zip(before, now, strict=True)):
        for name in old.keys() | new.keys():
            if not is_like(old.get(name), new.get(name)):
                yield place, name


def is_like(one: Any, other: Any) -> bool:
    """Whether both are the same object, equal plain values, or containers of such."""
    if one is other:
        return True
    if isinstance(one, set) and isinstance(other, InOrder):
        one = InOrder(one)
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, *CONTAINERS)):
        mine, others = _elements(one), _elements(other)
        return len(mine) == len(others) and (
            all(map(is_, mine, others)) or all(map(is_like, mine, others))
        )
    return isinstance(one, PLAIN) and bool(one == other)


def _elements(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]
