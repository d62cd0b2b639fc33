"""An embedding whose matrix stays in host memory: only the rows that a batch asks for move.

Note: Rows
    A lookup copies bytes and computes nothing, so the rows that the host gathers are, bit for bit,
    those that the device would have read. What a module does with them (Gemma scales them, a hook
    adds noise) it does on the device, in its own forward: the matrix is taken over below it, as a
    parameter of its own kind (``poros.head.host_matrix``).

    The host has to know which rows are meant, so the indices come to it: one transfer for each
    lookup on a device, for which it waits. The rows travel on a copy stream of their own, so that
    they do not queue behind the blocks that are on their way. They do queue behind the work that
    the device has been given before, since their memory there may be in use until then; so while
    that lasts other lookups have other memory on the host.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from poros.errors import HostMemoryError
from poros.host.limits import require_host_memory
from poros.host.store import Arena, HostSlab
from poros.layout import BlockLayout
from poros.streams import Event, StreamContext

logger = logging.getLogger(__name__)

_MOST_STAGED = 2**26
"""Bytes on the host for rows that are on their way; more only if one lookup needs more."""


class Lookups(Protocol):
    """Knows which rows code means that is run again: see ``poros.accumulation.lookups``."""

    def known(self, indices: torch.Tensor) -> torch.Tensor | None:
        """On the host, flat, the rows that ``indices`` names; None if it has to be looked at."""

    def note(self, indices: torch.Tensor, wanted: torch.Tensor) -> None:
        """It was looked at: it names the rows ``wanted``."""


class _Staging:
    """Host memory for the rows of one lookup, and the copy that reads it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.slab = HostSlab(BlockLayout((), num_bytes), Arena(num_bytes, is_shareable=False))
        self.copied: Event = None
        self.is_read = False
        """Whether ``copied`` may not have passed."""


class RowReader:
    """Brings rows of matrices in host memory to the device.

    Args:
        streams: Of the blocks; rows get a copy stream beside it.

    Attributes:
        num_index_transfers: Tensors of indices that came to the host. Likewise ``h2d_num_bytes`` of
            rows that went to the device, one by one or all of them.
        check: Called with a matrix's name, the matrix, indices and the rows that came, if set.
        lookups: Gives what is asked before indices come to the host, if that is still there.
        fallbacks: What could not be had, one line each; each was logged once.
    """

    def __init__(self, streams: StreamContext) -> None:
        self.num_index_transfers = 0
        self.h2d_num_bytes = 0
        self.check: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
        self.lookups: Callable[[], Lookups | None] | None = None
        self.fallbacks: list[str] = []
        self._streams = streams.beside()
        self._staging: list[_Staging] = []
        """The one that was used longest ago comes first."""

    @property
    def device(self) -> torch.device:
        """Where the rows go."""
        return self._streams.device

    def rows(self, name: str, matrix: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The rows of ``matrix`` that ``indices`` names, on the device.

        Args:
            name: Of the matrix.
            matrix: In host memory, of shape (rows, columns).
            indices: Integers of any shape, on the device or the host.

        Returns:
            A new tensor of the shape of ``indices`` and the columns, in the dtype of ``matrix``.

        Streams:
            The host waits for ``indices``, if they are on the device and not known; and for copies
            of rows before, if 64 MiB are on their way. The compute stream waits for the copy.

        Raises:
            HostMemoryError: If there is no host memory for the rows.
            IndexError: If an index is out of range.
        """
        wanted = self._wanted(indices)
        shape = (*indices.shape, matrix.shape[1])
        num_bytes = wanted.numel() * matrix.shape[1] * matrix.element_size()
        target = self._streams.borrow((wanted.numel(), matrix.shape[1]), matrix.dtype)
        if num_bytes:
            staging = self._room(num_bytes)
            staged = staging.slab.bytes[:num_bytes].view(matrix.dtype).view(target.shape)
            torch.index_select(matrix, 0, wanted, out=staged)
            staging.copied = self._streams.copy(target, staged, after=self._streams.record())
            staging.is_read = True
            try:
                self._streams.wait(staging.copied)
            except BaseException:
                self._streams.abandon(target, staging.copied)
                raise
            self.h2d_num_bytes += num_bytes
        if self.check is not None:
            self.check(name, matrix, wanted, target)
        return target.view(shape)

    def whole(self, matrix: torch.Tensor) -> torch.Tensor:
        """A copy of ``matrix``, which is in host memory, on the device.

        Streams:
            The compute stream waits for the copy; so does the host if the memory is pageable.
        """
        target = self._streams.borrow(matrix.shape, matrix.dtype)
        self.h2d_num_bytes += matrix.nbytes
        self._streams.wait(self._streams.copy(target, matrix, after=self._streams.record()))
        return target

    def unpin(self) -> None:
        """Undo the page locks; no rows are brought any more."""
        while self._staging:
            self._settle(self._staging[0])
            self._staging.pop(0).slab.unpin()

    def _wanted(self, indices: torch.Tensor) -> torch.Tensor:
        lookups = None if self.lookups is None else self.lookups()
        known = None if lookups is None else lookups.known(indices)
        if known is not None:
            return known
        wanted = self._on_host(indices).reshape(-1)
        if lookups is not None:
            lookups.note(indices, wanted)
        return wanted

    def _on_host(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.device.type == "cpu":
            return indices
        self.num_index_transfers += 1
        return indices.cpu()

    def _room(self, num_bytes: int) -> _Staging:
        """Staging memory that no copy reads any more."""
        large = [each for each in self._staging if each.num_bytes >= num_bytes]
        found = next((each for each in large if self._is_free(each)), None)
        num_staged = sum(each.num_bytes for each in self._staging)
        if found is None and large and num_staged + num_bytes <= _MOST_STAGED:
            with suppress(HostMemoryError):
                found = self._more(num_bytes)
        if found is None and large:
            found = large[0]
            self._settle(found)
        if found is None:
            self.unpin()
            found = self._more(num_bytes)
        self._staging = [each for each in self._staging if each is not found] + [found]
        return found

    def _more(self, num_bytes: int) -> _Staging:
        require_host_memory(num_bytes, "rows of the embedding")
        staging = _Staging(num_bytes)
        if self.device.type == "cuda" and not staging.slab.pin(self.device):
            self.note_pageable("rows of the embedding")
        return staging

    def _is_free(self, staging: _Staging) -> bool:
        staging.is_read = staging.is_read and not self._streams.has_passed(staging.copied)
        return not staging.is_read

    def _settle(self, staging: _Staging) -> None:
        if staging.is_read:
            self._streams.synchronize(staging.copied)
            staging.is_read = False

    def note_pageable(self, what: str) -> None:
        """Say, once, that host memory for ``what`` could not be page-locked."""
        fallback = f"pageable host memory for {what}"
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
            logger.warning(
                "poros: host memory for %s could not be page-locked. Training stays exact, but "
                "copies from there make the host wait",
                what,
            )
