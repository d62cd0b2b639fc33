"""The modules of a model and its trained parameters, and what code leaves in those of its top."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import starmap
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.stream.layer_index import values_of
from poros.stream.namespaces import CONTAINERS, content_of, is_like, refill


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

    def are_trained(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are what ``trained`` gives now."""
        return list(map(id, self.trained())) == list(map(id, parameters))

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

    def mark(self, parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[int]]:
        """Equal ones mean: the same modules, and none of the parameters was edited."""
        return self._children_now(), _versions(parameters)

    def are_unedited(
        self, mark: tuple[list[int], list[int]], parameters: Sequence[nn.Parameter]
    ) -> bool:
        """Whether parameters are as at ``mark``, and trained; at a small part of its cost."""
        return mark[1] == _versions(parameters) and all(map(_REQUIRES, parameters))

    def _children_now(self) -> list[int]:
        return list(map(id, values_of(self._child_tables)))


def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    return [each._version for each in parameters]


_REQUIRES = attrgetter("requires_grad")


class Marks(NamedTuple):
    """What is in the ``__dict__`` of some modules at one time."""

    tables: list[dict[str, Any]]
    """Copies of them."""
    contents: list[tuple[Any, Any]]
    """The containers in them that are not empty, among which are hooks and buffers, and copies."""
    empty: list[Any]
    """Other containers."""
    buffers: list[tuple[torch.Tensor, torch.Tensor | None]]
    """And copies of those that are small."""
    versions: list[int]
    """Of buffers."""


class Outside:
    """The modules of a model that are not in its layers, as code that runs may change them.

    Training flags are not looked at, nor which parameters and children there are.

    Args:
        modules: Of the model.
        inside: Those of its layers.
    """

    def __init__(self, modules: Iterable[nn.Module], inside: Iterable[nn.Module]) -> None:
        left_out = set(map(id, inside))
        self._owners = [vars(module) for module in modules if id(module) not in left_out]

    def marks(self) -> Marks:
        """Those of now."""
        containers = [
            value
            for own in self._owners
            for name, value in own.items()
            if type(value) in CONTAINERS and name not in _LEFT_OUT
        ]
        buffers = [each for own in self._owners for each in own["_buffers"].values()]
        buffers = [each for each in buffers if each is not None]
        copies = [each.clone() if each.nbytes <= _SMALL_NUM_BYTES else None for each in buffers]
        return Marks(
            [own.copy() for own in self._owners],
            [(each, content_of(each)) for each in containers if each],
            [each for each in containers if not each],
            list(zip(buffers, copies, strict=True)),
            [each._version for each in buffers],
        )

    def is_at(self, marks: Marks) -> bool:
        """Whether nothing was bound since."""
        return (
            not any(marks.empty)
            and self._are_buffers_at(marks)
            and all(starmap(is_like, marks.contents))
            and all(map(_is_same_table, self._owners, marks.tables))
        )

    def put(self, marks: Marks) -> bool:
        """Have what there was at that time; False if a buffer was edited in place since."""
        for own, table in zip(self._owners, marks.tables, strict=True):
            for name in (own.keys() | table.keys()) - _LEFT_OUT:
                if name in table:
                    own[name] = table[name]
                else:
                    del own[name]
        for container in marks.empty:
            container.clear()
        for container, content in marks.contents:
            refill(container, content)
        return self._are_buffers_at(marks)

    def _are_buffers_at(self, marks: Marks) -> bool:
        """Whether they hold what they held; DDP writes to them before a forward, mostly the same.

        Streams:
            The host waits for the device if somebody has written.
        """
        versions = [each._version for each, _ in marks.buffers]
        if versions != marks.versions:
            written = [
                pair
                for pair, now, then in zip(marks.buffers, versions, marks.versions, strict=True)
                if now != then
            ]
            if not all(copy is not None and is_same_bits(own, copy) for own, copy in written):
                return False
            marks.versions[:] = versions
        return True


def is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same bytes: a NaN equals itself in them."""
    left, right = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


def _is_same_table(own: dict[str, Any], table: dict[str, Any]) -> bool:
    if len(own) == len(table) and all(map(is_, own.values(), table.values())):
        return True
    return all(
        name in own and name in table and is_like(own[name], table[name])
        for name in (own.keys() | table.keys()) - _LEFT_OUT
    )


_SMALL_NUM_BYTES = 2**20
_LEFT_OUT = frozenset({"_parameters", "_modules", "training"})
