"""What tensors were at one time, to be compared with another."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

_POINTER: Callable[[Any], int] = torch.Tensor.data_ptr
_FORM, _VERSION = attrgetter("dtype", "shape"), attrgetter("_version")
_REQUIRES = attrgetter("requires_grad")


class Identities:
    """Objects; equal to others if they are the very same. Audit hooks hear of each ``id``."""

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        theirs = other.objects if isinstance(other, Identities) else ()
        return len(self.objects) == len(theirs) and all(map(is_, self.objects, theirs))

    __hash__ = None  # type: ignore[assignment]


class Marks:
    """What tensors were at one time. Keeps them alive, so that ids are theirs.

    Attributes:
        tensors: These; None for one that is gone.
        where: Which they are, their addresses, dtypes and shapes.
        versions: What changes with an edit that PyTorch counts.
        are_trained: Whether each requires a gradient.
    """

    __slots__ = ("are_trained", "tensors", "versions", "where")

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors
        # Looked up in C: this runs at every visit.
        try:
            facts = [list(map(get, tensors)) for get in (_POINTER, _FORM, _VERSION, _REQUIRES)]
        except (AttributeError, RuntimeError, TypeError):  # one is gone, or an inference tensor
            facts = list(map(list, zip(*map(_facts, tensors), strict=True)))
        self.where: tuple[Any, ...] = (Identities(tensors), *facts[:2])
        self.versions, self.are_trained = facts[2:]

    def changed(self, before: "Marks") -> int | None:
        """The place of the first that is not as it was ``before``; None if there is none."""
        if self.where == before.where and self.versions == before.versions:
            return None
        pairs = enumerate(zip(self.facts(), before.facts(), strict=True))
        return next((number for number, (now, then) in pairs if now != then), None)

    def facts(self) -> Iterator[tuple[Any, ...]]:
        """Id, address, form and version of each."""
        return zip(map(id, self.tensors), *self.where[1:], self.versions, strict=True)


def _facts(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return None, None, None, False
    return tensor.data_ptr(), _FORM(tensor), version_of(tensor), tensor.requires_grad


def version_of(tensor: torch.Tensor) -> int:
    """How often PyTorch has counted an edit; 0 of a tensor of inference mode, whose are not."""
    return 0 if tensor.is_inference() else tensor._version
