"""Contexts that are left now or never."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self


class Within(ExitStack):
    """Enters by calling ``fill`` with itself, and leaves by what was put on it then.

    A generator that is interrupted on its way out is finished when it is collected: at some later
    time, in the middle of something else, it would put an old state back. This would not.
    """

    def __init__(self, fill: Callable[[ExitStack], None]) -> None:
        super().__init__()
        self._fill = fill

    def __enter__(self) -> Self:
        try:
            self._fill(self)
        except BaseException:
            self.close()
            raise
        return self
