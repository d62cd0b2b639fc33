"""The modules of a model and its trained parameters, and what code leaves in those of its top."""

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.stream.args import PLAIN
from poros.stream.layer_index import values_of


class Modules:
    """All modules of a model, and its trained parameters, looked up at little cost each time.

    Args:
        model: Held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._all: list[nn.Module] = []
        self._children: list[int] = []
        self._tables: list[dict[str, Any]] = []
        self._child_tables: list[dict[str, Any]] = []

    def are_of(self, model: nn.Module) -> bool:
        """Whether they are those of ``model``."""
        return self._model() is model

    def now(self) -> list[nn.Module]:
        """Each of them once."""
        model = self._model()
        if model is not None and (not self._all or self._children != self._children_now()):
            self._all = list(model.modules())
            self._child_tables = [module._modules for module in self._all]
            self._tables = [module._parameters for module in self._all]
            self._children = self._children_now()
        return self._all

    def trained(self) -> list[nn.Parameter]:
        """Each place of each, as of the modules that ``now`` has found."""
        # Of bitsandbytes' weights each look at an attribute would be a call of Python.
        with torch._C.DisableTorchFunctionSubclass():
            return [
                each for each in values_of(self._tables) if each is not None and each.requires_grad
            ]

    def have_shared(self) -> bool:
        """Whether a trained parameter is in several places, or in a module that is."""
        trained = list(map(id, self.trained()))
        if len(set(trained)) < len(trained):
            return True
        shared = {child for child, number in Counter(self._children).items() if number > 1}
        return any(
            id(parameter) in trained
            for module in self._all
            if id(module) in shared
            for parameter in module.parameters()
        )

    def mark(self, parameters: Sequence[nn.Parameter]) -> object:
        """Equal ones mean: the same modules, and none of the parameters was edited."""
        return self._children_now(), [each._version for each in parameters]

    def _children_now(self) -> list[int]:
        return list(map(id, values_of(self._child_tables)))


class Marks(NamedTuple):
    """What is in the ``__dict__`` of some modules at one time."""

    tables: list[dict[str, Any]]
    """Copies of them; training flags, parameters and children are left out."""
    contents: list[dict[str, Any]]
    """Copies of the containers in them, among which are hooks and buffers."""
    versions: list[int]
    """Of their buffers."""

    def equals(self, other: "Marks") -> bool:
        """Whether nothing was bound in between."""
        return self.versions == other.versions and all(
            mine.keys() == others.keys()
            and all(is_like(value, others[name]) for name, value in mine.items())
            for mine, others in zip(
                (*self.tables, *self.contents), (*other.tables, *other.contents), strict=True
            )
        )


class Outside:
    """The modules of a model that are not in its layers, as code that runs may change them.

    Args:
        modules: Of the model.
        inside: Those of its layers.
    """

    def __init__(self, modules: Iterable[nn.Module], inside: Iterable[nn.Module]) -> None:
        left_out = set(map(id, inside))
        self._owners = [vars(module) for module in modules if id(module) not in left_out]

    def marks(self) -> Marks:
        """Those of now."""
        tables = [
            {name: value for name, value in own.items() if name not in _LOOKED_AT_OTHERWISE}
            for own in self._owners
        ]
        contents = [
            {name: value.copy() for name, value in own.items() if type(value) in CONTAINERS}
            for own in tables
        ]
        buffers = (each for own in tables for each in own.get("_buffers", {}).values())
        return Marks(tables, contents, [each._version for each in buffers if each is not None])

    def put(self, marks: Marks) -> bool:
        """Have what there was at that time; False if a buffer was edited in place since."""
        for own, table, contents in zip(self._owners, marks.tables, marks.contents, strict=True):
            for name in [name for name in own if name not in _LOOKED_AT_OTHERWISE]:
                if name not in table:
                    del own[name]
            own.update(table)
            for name, content in contents.items():
                container = own[name]
                if not is_like(container, content):
                    container.clear()
                    fill = container.update if hasattr(container, "update") else container.extend
                    fill(content)
        return self.marks().versions == marks.versions


CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_LOOKED_AT_OTHERWISE = frozenset({"_parameters", "_modules", "training"})


def is_like(one: Any, other: Any) -> bool:
    """Whether both are the same object, equal plain values, or containers of such."""
    if one is other and type(one) not in CONTAINERS:
        return True
    if type(one) is not type(other) and not {type(one), type(other)} <= {*CONTAINERS}:
        return False
    if isinstance(one, (tuple, *CONTAINERS)):
        mine, others = _elements(one), _elements(other)
        return len(mine) == len(others) and all(map(is_like, mine, others))
    return isinstance(one, PLAIN) and bool(one == other)


def _elements(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]
