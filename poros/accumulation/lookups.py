"""Which rows of an embedding in host memory the code of a loss asks for when it is run again.

The host has to know which rows are meant, and waits for the device to say so. Code that is run
again for a micro-batch asks for the same rows in the same order, so what it was told the first time
is taken, and whether it does ask for the same is found out on the device, beside everything else.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from poros.head.rows import RowReader


class MicroBatchLookups:
    """The lookups of one micro-batch."""

    def __init__(self) -> None:
        self._differs: list[torch.Tensor] = []
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._place: int | None = None
        """Of the next lookup, among those that are noted; None while they are being noted."""

    @contextmanager
    def of(self, reader: RowReader, *, is_again: bool) -> Iterator[None]:
        """Lookups in the body are noted, or, if it runs again, those that were."""
        self._place = 0 if is_again else None
        before, reader.lookups = reader.lookups, weakref.ref(self)
        try:
            yield
        finally:
            reader.lookups = before

    def take_differs(self) -> list[torch.Tensor]:
        """Whether other rows were asked for again: bools, where the indices are. Each once."""
        found, self._differs = self._differs, []
        return found

    def known(self, indices: torch.Tensor) -> torch.Tensor | None:
        """See ``poros.head.rows.Lookups``."""
        if self._place is None or self._place >= len(self._noted):
            return None
        before, wanted = self._noted[self._place]
        if _form(before) != _form(indices):
            return None
        self._place += 1
        self._differs.append((before != indices).any())
        return wanted

    def note(self, indices: torch.Tensor, wanted: torch.Tensor) -> None:
        """See ``poros.head.rows.Lookups``."""
        if self._place is None:
            # Copies: the same tensor may name other rows later.
            self._noted.append((indices.detach().clone(), wanted.clone()))


def _form(indices: torch.Tensor) -> tuple[object, ...]:
    return indices.shape, indices.dtype, indices.device
