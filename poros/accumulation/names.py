"""Names of the user's code that one part of it binds and another one reads.

Other micro-batches run between the parts of a loss: before the layers, behind them, and behind the
head. So a value that passes from one part to another by such a name would be another micro-batch's.

Looked at are attributes of objects that the code is a method of, of which it is seen in which part
they are read and bound; and of functions and classes, variables around functions, and global
variables that they use, of which it is assumed. So it is for defaults of arguments, for what
``functools.partial`` holds, for buffers of a module, for the elements of containers, and for
functions and objects of the same file that these use, but not for what is in other objects.
"""

import dis
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from poros.stream.namespaces import OF_MODULES, bound, contents_of

_NOTED = ("__getattribute__", "__setattr__")
_STORES = ("STORE_GLOBAL", "STORE_DEREF")

Spaces = list[dict[str, Any]]
"""What the names are bound to, at one time."""


class Names:
    """Those of ``code``; attributes of ``modules``, which are the model's, are looked at elsewhere.

    Attributes:
        read: Attributes of objects that were read, in each part of the code.
    """

    def __init__(
        self,
        code: Iterable[Any],
        modules: Iterable[nn.Module],
        read: Sequence[Collection[str]] = (),
    ) -> None:
        self._owners: list[Any] = []
        self._assumed: list[Any] = []
        """Functions and classes, and those with arguments."""
        self._find(list(code), set(map(id, modules)))
        self.read: list[set[str]] = list(map(set, read))
        self._wanted: set[str] | None = None
        """Attributes of objects that are looked at; all, while it is seen which are read."""
        if read:
            self.look_at_read()
        self._bound: list[set[str]] = []
        self._undo = ExitStack()
        self._seen: list[Spaces] = []
        """Before and behind each part."""

    def _find(self, todo: list[Any], seen: set[int]) -> None:
        while todo:
            each = todo.pop()
            if id(each) in seen or isinstance(each, ModuleType):
                continue
            seen.add(id(each))
            if isinstance(each, type):
                self._assumed.append(each)
                continue
            todo += [getattr(each, k) for k in ("func", "__self__", "__func__") if hasattr(each, k)]
            if isinstance(each, partial):
                self._assumed.append(each)
                todo += _of_file(getattr(each.func, "__module__", ""), _variables(each))
            elif isinstance(each, FunctionType):
                self._assumed.append(each)
                todo += _of_file(each.__module__, _variables(each))
            elif _has_attributes(each) and not isinstance(each, MethodType):
                self._owners.append(each)
                todo += [type(each), type(each).__call__]
                todo += _of_file(type(each).__module__, _attributes(each))

    def begin(self) -> None:
        """A part of the code begins: before the layers, behind them, or behind the head."""
        self.end()
        self.read.append(set())
        self._bound.append(set())
        self._seen.append(self.now())
        self._note(self.read[-1], self._bound[-1])

    def end(self) -> None:
        """The part ends."""
        if len(self._seen) < 2 * len(self._bound):
            self._seen.append(self.now())
        self._undo.close()

    def _note(self, *noted: set[str]) -> None:
        """Attributes that are read from now on, and those that are bound, go into these."""
        for owner in self._owners:
            for name, each in zip(_NOTED, noted, strict=True):
                with suppress(TypeError):  # of a class that nobody can write to: nothing is seen
                    self._undo.callback(_noting(owner, name, each))

    def look_at_read(self) -> None:
        """From now on look at attributes that were read up to now."""
        self._wanted = self._read_beside([])

    @contextmanager
    def again(self, part: int) -> Iterator[None]:
        """The body runs a part of the code, perhaps the first to read some attributes there."""
        for each in (self.read, self._bound):
            each += [set() for _ in range(part + 1 - len(each))]
        with self._undo:
            self._note(self.read[part], self._bound[part])
            yield

    def passed(self, part: int) -> str | None:
        """A name that was bound in another part and is read in this one, or the other way round."""
        others = [each for number, each in enumerate(self._bound) if number != part]
        there = self.read[part] & set[str]().union(*others)
        return min(there | (self._bound[part] & self._read_beside([part])), default=None)

    def torn(self) -> str | None:
        """A name that is bound in one part, be it to what it was, and read in another one."""
        for part, found in enumerate(self._bound):
            others = self._read_beside([part])
            changed = self.changed(self._seen[2 * part], self._seen[2 * part + 1], [part])
            if changed is not None or found & others:
                return changed or min(found & others)
        stored = set[str]().union(*map(_stored, self._assumed)) if self._bound else ()
        return min(stored, default=None)

    def changed(
        self, before: Spaces, now: Spaces, parts: Collection[int] = frozenset()
    ) -> str | None:
        """A name that was bound to something else in these ``parts``, and that others read."""
        others = self._read_beside(parts)
        for place, name in bound(before, now):
            if place >= len(self._owners) or name in others:
                return name
        return None

    def changed_since(self) -> str | None:
        """A name that was bound since the code has ended, and that one of its parts reads."""
        return self.changed(self._seen[-1], self.now()) if self._seen else None

    def now(self) -> Spaces:
        """What they are bound to now."""
        spaces = [_attributes(each, self._wanted) for each in self._owners]
        spaces += map(_variables, self._assumed)
        return [contents_of(each, without=_LEFT_OUT) for each in spaces]

    def _read_beside(self, parts: Collection[int]) -> set[str]:
        return set[str]().union(*(each for n, each in enumerate(self.read) if n not in parts))


_LEFT_OUT = OF_MODULES.union(_NOTED)


def _noting(owner: Any, name: str, noted: set[str]) -> Callable[[], None]:
    """Have attributes noted that a method of ``owner`` is asked for; gives what ends that."""
    kind = type(owner)
    own, genuine = vars(kind).get(name), getattr(kind, name)

    def method(self: Any, key: str, *value: Any) -> Any:
        if self is owner:
            noted.add(key)
        return genuine(self, key, *value)

    setattr(kind, name, method)
    return partial(delattr, kind, name) if own is None else partial(setattr, kind, name, own)


def _of_file(file: str, values: dict[str, Any]) -> list[Any]:
    """Functions of the module of that name, and objects of its classes."""
    return [
        each
        for each in values.values()
        if (each if isinstance(each, FunctionType) else type(each)).__module__ == file
    ]


def _has_attributes(owner: Any) -> bool:
    return hasattr(owner, "__dict__") or bool(_slots(owner))


def _slots(owner: Any) -> list[str]:
    found: list[str] = []
    for each in type(owner).__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return found


def _attributes(owner: Any, wanted: set[str] | None = None) -> dict[str, Any]:
    """Those of these names, or all: a data set of the user's may hold millions of rows."""
    slots = {name: getattr(owner, name) for name in _slots(owner) if hasattr(owner, name)}
    own = getattr(owner, "__dict__", {})
    found = {**own, **slots, **(own["_buffers"] if isinstance(owner, nn.Module) else {})}
    return found if wanted is None else {name: found[name] for name in wanted & found.keys()}


def _stored(function: Any) -> set[str]:
    """Variables around a function that it binds, and global ones."""
    if not isinstance(function, FunctionType):
        return set()
    code = function.__code__
    bound_there = {each.argval for each in dis.get_instructions(code) if each.opname in _STORES}
    return bound_there - set(code.co_cellvars)


def _variables(function: Any) -> dict[str, Any]:
    """Those around a function, globals that it uses, defaults, attributes; or those of a class."""
    if isinstance(function, type):
        return dict(vars(function))
    if isinstance(function, partial):
        return {**{str(n): each for n, each in enumerate(function.args)}, **function.keywords}
    found = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    found |= {f"default {n}": each for n, each in enumerate(function.__defaults__ or ())}
    found |= function.__kwdefaults__ or {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # nothing is bound yet
            found[name] = cell.cell_contents
    return {**found, **vars(function)}
