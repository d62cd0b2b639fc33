"""What code of the user binds to names while it runs ahead of its turn, to be put back."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from torch.nn import Module

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_MOST_ELEMENTS = 1000
"""Of a container that is looked into."""
_ABSENT = object()
_LOOKED_AT_OTHERWISE = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Entries of a module's ``__dict__``; the last is set by trainers each step."""
_HOOKS = frozenset(
    f"_{kind}_hooks{which}"
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
    for which in ("", "_with_kwargs", "_always_called")
)
"""Tables of a module's hooks."""


class Space(NamedTuple):
    """Names in one place, how one of them is bound, and whose attributes they are, if any's."""

    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]
    owner: Any = None


class _Value(NamedTuple):
    """What is bound to a name, and a copy of it if it is a small container."""

    value: Any
    copy: Any = None

    @property
    def is_seen(self) -> bool:
        return self.copy is not None or self.value is _ABSENT or _is_plain(self.value)

    def is_same(self, other: "_Value") -> bool:
        return _same(self.value, other.value) and _hold_same(self.copy, other.copy)

    def write(self, space: Space, name: str) -> None:
        space.write(name, self.value)
        if self.copy is not None:
            self.value.clear()
            fill = self.value.update if hasattr(self.value, "update") else self.value.extend
            fill(self.copy)


class _Reading(NamedTuple):
    """What is bound to names in one place at one time."""

    values: dict[str, Any]
    copies: dict[str, Any]
    """Of containers that hold anything; None of one that is not looked into."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> "_Reading":
        # Most attributes of modules are empty containers, for hooks.
        copies = {
            name: each.copy() if len(each) <= _MOST_ELEMENTS else None
            for name, each in values.items()
            if type(each) in _CONTAINERS and each
        }
        return cls(values, copies)

    def is_same(self, other: "_Reading") -> bool:
        """Whether nothing was bound in between; False if that is not seen at once."""
        return (
            self.values.keys() == other.values.keys()
            and all(map(is_, self.values.values(), other.values.values()))
            and self.copies.keys() == other.copies.keys()
            and all(map(_hold_same, self.copies.values(), other.copies.values()))
        )

    def value(self, name: str) -> _Value:
        """What was bound to a name."""
        value = self.values.get(name, _ABSENT)
        return _Value(value, self.copies.get(name, () if type(value) in _CONTAINERS else None))


class Names:
    """Names in some places, to be bound again to what they were before code has run.

    Seen are numbers, texts, bools, None, tuples of them, and what is in small containers. Objects
    stay, whatever was there before, and so does a bool that nobody had declared: a note that
    something was registered has to stay with it, and with the note of a module the hooks in it
    (transformers registers some in the first forward that records states of a tower).

    Args:
        spaces: The places; see ``attributes`` and ``of_code``.
    """

    def __init__(self, spaces: Iterable[Space]) -> None:
        self._spaces = list(spaces)
        self._changed: dict[tuple[int, str], tuple[_Value, _Value]] = {}
        """Before, and since."""

    @property
    def are_same(self) -> bool:
        """Whether code has bound nothing since they were put back or kept."""
        return not self._changed

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the body binds."""
        before = self._now()
        try:
            yield
        finally:
            for place, (old, new) in enumerate(zip(before, self._now(), strict=True)):
                if old.is_same(new):
                    continue
                for name in old.values.keys() | new.values.keys():
                    left, right = old.value(name), new.value(name)
                    if not left.is_same(right):
                        first, _ = self._changed.get((place, name), (left, right))
                        self._changed[place, name] = first, right

    def _now(self) -> list[_Reading]:
        return [_Reading.of(space.read()) for space in self._spaces]

    def put_back(self) -> None:
        """Have the values that were there before the code ran."""
        notes = {place for place in self._changed if self._is_note(place)}
        noted = [self._spaces[place].owner for place, _ in notes]
        beneath = {id(m) for each in noted if isinstance(each, Module) for m in each.modules()}
        for (place, name), (old, new) in self._changed.items():
            is_of_note = name in _HOOKS and id(self._spaces[place].owner) in beneath
            if (place, name) not in notes and not is_of_note and old.is_seen and new.is_seen:
                old.write(self._spaces[place], name)
        self.keep()

    def _is_note(self, changed: tuple[int, str]) -> bool:
        """Whether a bool has come that nobody had declared."""
        (old, new), (place, name) = self._changed[changed], changed
        owner = type(self._spaces[place].owner)
        return old.value is _ABSENT and type(new.value) is bool and not hasattr(owner, name)

    def keep(self) -> None:
        """Have what code has bound as that to begin from."""
        self._changed = {}


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    return type(left) is type(right) and _is_plain(left) and bool(left == right)


def _hold_same(left: Any, right: Any) -> bool:
    """Whether two copies of containers have the same elements."""
    mine, others = _elements(left), _elements(right)
    return len(mine) == len(others) and (
        all(map(is_, mine, others)) or all(map(_same, mine, others))
    )


def _elements(container: Any) -> list[Any]:
    return [*(container or ()), *(container.values() if isinstance(container, dict) else ())]


def attributes(owner: Any) -> Space:
    """The attributes of an object."""
    own: dict[str, Any] = vars(owner)

    def read() -> dict[str, Any]:
        found = own.copy()
        for name in _LOOKED_AT_OTHERWISE:
            found.pop(name, None)
        return found

    return Space(read, partial(_bind, own), owner)


def of_code(code: Iterable[Any]) -> Iterator[Space]:
    """What code can bind: attributes of its own and of what it is a method of, variables around it.

    Args:
        code: Functions, methods, or objects that are called. Functions of the same file that they
            use are looked at, too.
    """
    todo, seen = list(code), set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        todo += [getattr(each, k) for k in ("func", "__self__", "__func__") if hasattr(each, k)]
        if hasattr(each, "__dict__"):
            yield attributes(each)
        is_called = callable(each) and not isinstance(each, FunctionType)
        function = type(each).__call__ if is_called else each
        if not isinstance(function, FunctionType):
            continue
        for space in (_cells(function), _globals(function)):
            yield space
            for value in space.read().values():
                if getattr(value, "__globals__", None) is function.__globals__:
                    todo.append(value)


def _bind(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    else:
        names[name] = value


def _globals(function: FunctionType) -> Space:
    names, own = function.__code__.co_names, function.__globals__
    return Space(lambda: {each: own[each] for each in names if each in own}, partial(_bind, own))


def _cells(function: FunctionType) -> Space:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        found = {}
        for name, cell in cells.items():
            with suppress(ValueError):  # nothing is bound yet
                found[name] = cell.cell_contents
        return found

    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = None if value is _ABSENT else value

    return Space(read, write)
