"""Functions of the code that a test replaces, by others that are given the genuine one."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
"""Makes a change of the code, until the patch is undone."""


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make of ``instead(genuine, *given)`` a change of ``owner``: it is called for ``name``."""

    def decorate(instead: Callable[..., Any]) -> Plant:
        @wraps(instead)
        def plant(patch: Patch) -> None:
            genuine = getattr(owner, name)

            def called(*args: Any, **kwargs: Any) -> Any:
                return instead(genuine, *args, **kwargs)

            # What is called through the class is given no instance, and a class knows itself.
            is_bound = isinstance(vars(owner).get(name), classmethod | staticmethod)
            patch.setattr(owner, name, staticmethod(called) if is_bound else called)

        return plant

    return decorate


def raising(error: type[BaseException], *said: str) -> Callable[..., Any]:
    """A function, or a hook, that raises such an error whatever it is given."""

    def instead(*_: Any, **__: Any) -> Any:
        raise error(*said)

    return instead


def noted(patch: Patch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """What a function is given from now on, and a method behind its object; it does what it did."""
    calls: list[tuple[Any, ...]] = []

    def note(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return genuine(*args, **kwargs)

    in_place_of(owner, name)(note)(patch)
    return calls
