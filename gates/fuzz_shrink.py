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
    named = [(each, getattr(node, each.name)) for each in fields(node)]
    others = {
        each.name: each.default
        for each, found in named
        if found != each.default and not isinstance(found, tuple)
    }
    if len(others) > 1:
        yield replace(node, **others)
    for each, found in named:
        if isinstance(found, tuple):
            # A program keeps a step, and a step a forward.
            least = len(each.default) if isinstance(each.default, tuple) else 0
            if len(found) > least + 1 and least == 0:
                yield replace(node, **{each.name: ()})
            for index in reversed(range(len(found))):
                if len(found) > least:
                    yield replace(node, **{each.name: found[:index] + found[index + 1 :]})
    for name, default in others.items():
        yield replace(node, **{name: default})
    for each, found in named:
        if isinstance(found, tuple):
            for index, child in enumerate(found):
                if is_dataclass(child):
                    for smaller in simpler(child):
                        changed = (*found[:index], smaller, *found[index + 1 :])
                        yield replace(node, **{each.name: changed})
        elif is_dataclass(found):
            for smaller in simpler(found):
                yield replace(node, **{each.name: smaller})
