"""Serves embeddings from host memory: only the rows of a batch are copied.

Note: Rows
    A lookup copies bytes and computes nothing, so the rows that come are, bit for bit, those that
    the device would have read. What a module does with them (Gemma scales them, a hook adds noise)
    it does on the device, in its own forward: the matrix is taken over below it, as a parameter of
    its own kind (``poros.head.host_matrix``).

    A GPU reads rows of page-locked memory by a kernel of its own, and the host waits for nothing.
    Where the memory could not be locked, or there is no Triton, the host gathers the rows: it needs
    the indices, and so waits for all that the device has to do before. These rows travel on a copy
    stream of their own, so that they do not queue behind the blocks that are on their way.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from poros.errors import HostMemoryError
from poros.host.limits import require_host_memory
from poros.host.slab import page_lock
from poros.streams import StreamContext
from poros.utils.devices import runs_triton

logger = logging.getLogger(__name__)

Lock = Callable[[], object]
"""Ends a page lock."""
_INDICES = (torch.int64, torch.int32)
"""That ``torch.nn.functional.embedding`` takes."""


class RowReader:
    """Copies rows of matrices in host memory to the device.

    Args:
        streams: Of the blocks; rows get a copy stream beside it.

    Attributes:
        h2d_num_bytes: Of rows that went to the device, one by one or all of them.
        check: Called with a matrix's name, the matrix, indices and the rows that came, if set.
        fallbacks: What could not be had, one line each; each was logged once.
        pinned_num_bytes: Of the matrices that this has page-locked.
    """

    def __init__(self, streams: StreamContext) -> None:
        self.h2d_num_bytes = 0
        self.check: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
        self.fallbacks: list[str] = []
        self._streams = streams.beside()
        self._locks: dict[int, Lock] = {}
        """By the address of a matrix."""
        self.pinned_num_bytes = 0

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._streams.device

    def lock(self, matrix: torch.Tensor, what: str, is_own: bool = False) -> None:
        """Page-lock a contiguous matrix for a GPU, until ``unlock``.

        Args:
            matrix: In host memory.
            what: It is, for messages.
            is_own: Whether its memory is its own. Of a part of a file, a copy is taken; where there
                is no memory for that the host goes on gathering rows.
        """
        if self.device.type != "cuda" or not matrix.is_contiguous():
            return
        lock = None
        with suppress(HostMemoryError):
            if not is_own:
                require_host_memory(matrix.nbytes, what)
            lock = page_lock(self, matrix, matrix.untyped_storage(), self.device)
        if lock is None:
            self.note_pageable(what)
            return
        self.pinned_num_bytes += matrix.nbytes
        self._locks[matrix.data_ptr()] = lock

    def unlock(self) -> None:
        """Undo ``lock`` once the device has read what it was to read. Idempotent."""
        locks, self._locks, self.pinned_num_bytes = self._locks, {}, 0
        for lock in locks.values():
            lock()

    def rows(self, name: str, matrix: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``matrix`` at ``indices``, on the device.

        Args:
            name: Of the matrix.
            matrix: In host memory, of shape (rows, columns).
            indices: Integers of any shape, on the device or the host.

        Returns:
            A new tensor of the shape of ``indices`` and the columns, in the dtype of ``matrix``.

        Streams:
            Queued on the compute stream if the matrix was locked and the indices are on the device.
            Else the host waits for ``indices``, and the compute stream for the copy.

        Raises:
            TypeError: If they are no indices of an embedding.
            IndexError: If an index is out of range and the host gathers. A GPU stops by an
                assertion then, as it does for an embedding of its own.
        """
        if indices.dtype not in _INDICES:
            raise TypeError(
                f"{name}: expected indices in torch.int64 or torch.int32, as an embedding takes "
                f"them, found {indices.dtype}; convert them by .long()"
            )
        flat = indices.reshape(-1)
        target = self._streams.borrow((flat.numel(), matrix.shape[1]), matrix.dtype)
        if target.numel():
            is_locked = matrix.data_ptr() in self._locks and runs_triton(self.device)
            if is_locked and indices.device == target.device:
                from poros.kernels import gather_gpu

                gather_gpu.gather(matrix, flat, target)
            else:
                self._copy(matrix, flat.cpu(), target)
            self.h2d_num_bytes += target.nbytes
        if self.check is not None:
            self.check(name, matrix, flat, target)
        return target.view(*indices.shape, matrix.shape[1])

    def _copy(self, matrix: torch.Tensor, indices: torch.Tensor, target: torch.Tensor) -> None:
        staged = matrix.index_select(0, indices)
        copied = self._streams.copy(target, staged, after=self._streams.record())
        try:
            self._streams.wait(copied)
        except BaseException:
            self._streams.abandon(target, copied)
            raise

    def whole(self, matrix: torch.Tensor) -> torch.Tensor:
        """Copy ``matrix``, which is in host memory, to the device.

        Streams:
            The compute stream waits for the copy; so does the host if the memory is pageable.
        """
        target = self._streams.borrow(matrix.shape, matrix.dtype)
        self.h2d_num_bytes += matrix.nbytes
        self._streams.wait(self._streams.copy(target, matrix, after=self._streams.record()))
        return target

    def note_pageable(self, what: str) -> None:
        """Log once that host memory for ``what`` could not be page-locked."""
        fallback = f"pageable host memory for {what}"
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
            logger.warning(
                "poros: host memory for %s could not be page-locked. Training stays exact, but "
                "copies from there make the host wait",
                what,
            )
