"""The modules of a model and its trained parameters, and what code leaves in those of its top."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import starmap
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.stream.layer_index import values_of
from poros.stream.marks import Identities, version_of
from poros.stream.namespaces import CONTAINERS, content_of, is_like, refill


class Trained(NamedTuple):
    """What is trained of a model at one time."""

    parameters: list[nn.Parameter]
    """Each in each of its places."""
    versions: list[int]
    places: tuple[Identities, Identities]
    """Equal ones mean: the same parameters and modules."""


class Modules:
    """All modules of a model, held weakly, and its trained parameters, looked up at little cost."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._all: list[nn.Module] = []
        self._children = Identities([])
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

    def trained(self) -> Trained:
        """What is trained, in the modules that ``now`` has found."""
        # Of bitsandbytes' weights each look at an attribute would be a call of Python.
        with torch._C.DisableTorchFunctionSubclass():
            found = [
                each for each in values_of(self._tables) if each is not None and each.requires_grad
            ]
            versions = [each._version for each in found]
        return Trained(found, versions, (Identities(found), self._children_now()))

    def have_shared(self, found: Trained) -> bool:
        """Whether a ``found`` parameter is in several places, or in a module that is."""
        trained = set(map(id, found.parameters))
        if len(trained) < len(found.parameters):
            return True
        children = map(id, self._children.objects)
        shared = {child for child, number in Counter(children).items() if number > 1}
        return any(
            id(parameter) in trained
            for module in self._all
            if id(module) in shared
            for parameter in module.parameters()
        )

    def _children_now(self) -> Identities:
        return Identities(values_of(self._child_tables))


class Outside:
    """What is in the ``__dict__`` of modules of a model that are not in its layers, at one time.

    Training flags are not looked at, nor which parameters and children there are.
    """

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        self._tables = tables
        self._copies = [table.copy() for table in tables]
        containers = [
            value
            for table in tables
            for name, value in table.items()
            if type(value) in CONTAINERS and name not in _LEFT_OUT
        ]
        # Among them hooks and buffers.
        self._containers = [(each, content_of(each)) for each in containers if each]
        self._empty = [each for each in containers if not each]
        buffers = [each for own in tables for each in own["_buffers"].values() if each is not None]
        self._buffers = [
            (each, each.clone() if each.nbytes <= _SMALL_NUM_BYTES else None) for each in buffers
        ]
        self._versions = [each._version for each in buffers]
        held = [each for own in tables for each in own["_parameters"].values()]
        self._frozen = [each for each in held if each is not None and not each.requires_grad]
        self._frozen_versions = versions_of(self._frozen)

    @classmethod
    def of(cls, modules: Iterable[nn.Module], inside: Iterable[nn.Module]) -> "Outside":
        """Of all ``modules`` of a model but those ``inside`` its layers, now."""
        left_out = set(map(id, inside))
        return cls([vars(module) for module in modules if id(module) not in left_out])

    def now(self) -> "Outside":
        """Of the same modules, now."""
        return Outside(self._tables)

    def still_holds(self) -> bool:
        """Whether nothing was bound since."""
        return (
            not any(self._empty)
            and versions_of(self._frozen) == self._frozen_versions
            and self._do_buffers_hold()
            and all(starmap(is_like, self._containers))
            and all(map(_is_same_table, self._tables, self._copies))
        )

    def put_back(self) -> bool:
        """Have what there was; False if a buffer, or what is frozen, was edited in place since."""
        for own, copied in zip(self._tables, self._copies, strict=True):
            for name in (own.keys() | copied.keys()) - _LEFT_OUT:
                if name in copied:
                    own[name] = copied[name]
                else:
                    del own[name]
        for container in self._empty:
            container.clear()
        for container, content in self._containers:
            refill(container, content)
        is_unedited = versions_of(self._frozen) == self._frozen_versions
        return is_unedited and self._do_buffers_hold()

    def _do_buffers_hold(self) -> bool:
        """Whether they hold what they held; DDP writes to them before a forward, mostly the same.

        Streams:
            The host waits for the device if somebody has written.
        """
        versions = [each._version for each, _ in self._buffers]
        if versions != self._versions:
            for (own, copied), now, then in zip(
                self._buffers, versions, self._versions, strict=True
            ):
                if now != then and (copied is None or not _is_same_bits(own, copied)):
                    return False
            self._versions = versions
        return True


def _is_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same bytes: a NaN equals itself in them."""
    left, right = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


def _is_same_table(own: dict[str, Any], copied: dict[str, Any]) -> bool:
    if len(own) == len(copied) and all(map(is_, own.values(), copied.values())):
        return True
    return all(
        name in own and name in copied and is_like(own[name], copied[name])
        for name in (own.keys() | copied.keys()) - _LEFT_OUT
    )


_SMALL_NUM_BYTES = 2**20
_LEFT_OUT = frozenset({"_parameters", "_modules", "training"})


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """``version_of`` each, without a subclass that sees it."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(version_of, tensors))
