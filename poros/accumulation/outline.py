"""What all layers of a model are called with, told by what the first of them is called with.

Most models call each layer with the same objects: mask, positions, tables of rotations. Where that
was seen, the code of a micro-batch is stopped at its first layer already, and what the others would
have been called with is taken for known. Whether it is so shows when the code runs again, before
its loss: if not, that micro-batch runs by itself, and its kind is looked at in full from then on.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

INPUT = object()
"""Stands for the layer's input among its arguments."""
_PLAIN = (type(None), bool, int, float, str)


class Call(NamedTuple):
    """What a layer is called with, its input left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], given: object) -> "Call":
        """Of a call with the input ``given``."""
        return cls(
            tuple(INPUT if value is given else value for value in args),
            {key: INPUT if value is given else value for key, value in kwargs.items()},
        )

    def is_like(self, other: "Call") -> bool:
        """Whether both are given the same objects, or equal plain values."""
        return (
            len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and all(map(_same, self.args, other.args))
            and all(_same(value, other.kwargs[key]) for key, value in self.kwargs.items())
        )


def _same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and type(left) in _PLAIN and left == right)


class Outlines:
    """Of which kinds of micro-batches the layers are all called alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}

    def are_alike(self, kind: Hashable) -> bool:
        """Whether all layers are called as the first one is, as far as is known."""
        return self._known.get(kind, False)

    def note(self, kind: Hashable, are_alike: bool) -> None:
        """What was seen. Once they were not, they are looked at each time."""
        self._known[kind] = self._known.get(kind, True) and are_alike
