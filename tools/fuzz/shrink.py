"""Makes a failing program smaller, as long as it fails in the same way.

Programs are plain data whose defaults are the plainest values, so one rule is enough: leave out an
element of a tuple, or put a default in the place of a value.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def shrink(program: T, fails: Callable[[T], bool], *, num_tries: int = 200) -> T:
    """The smallest program found by greedy steps from ``program`` that still fails.

    Args:
        program: A dataclass that fails.
        fails: Whether a smaller one fails in the same way.
        num_tries: How often ``fails`` is called at most.
    """
    tried: set[T] = set()
    while True:
        for smaller in simpler(program):
            if smaller in tried:
                continue
            if len(tried) == num_tries:
                return program
            tried.add(smaller)
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def simpler(node: Any) -> Iterator[Any]:
    """Programs with one thing less, the largest cuts first."""
    named = [(field, getattr(node, field.name)) for field in fields(node)]
    others = {
        field.name: field.default
        for field, value in named
        if value != field.default and not isinstance(value, tuple)
    }
    if len(others) > 1:
        yield replace(node, **others)
    for field, value in named:
        if isinstance(value, tuple):
            # A program keeps a step, and a step a forward.
            least = len(field.default) if isinstance(field.default, tuple) else 0
            if len(value) > least + 1 and least == 0:
                yield replace(node, **{field.name: ()})
            for index in reversed(range(len(value))):
                if len(value) > least:
                    yield replace(node, **{field.name: value[:index] + value[index + 1 :]})
    for name, default in others.items():
        yield replace(node, **{name: default})
    for field, value in named:
        if isinstance(value, tuple):
            for index, child in enumerate(value):
                if is_dataclass(child):
                    for smaller in simpler(child):
                        changed = (*value[:index], smaller, *value[index + 1 :])
                        yield replace(node, **{field.name: changed})
        elif is_dataclass(value):
            for smaller in simpler(value):
                yield replace(node, **{field.name: smaller})
