"""Serves embeddings from host memory: only the rows of a batch are copied.

Note: Rows
    A lookup copies bytes and computes nothing, so the rows that the host gathers are, bit for bit,
    those that the device would have read. What a module does with them (Gemma scales them, a hook
    adds noise) it does on the device, in its own forward: the matrix is taken over below it, as a
    parameter of its own kind (``poros.head.host_matrix``).

    The host has to know which rows are meant, so the indices come to it: one transfer for each
    lookup on a device, for which it waits, and so for all that the device has to do before. Where
    the host has them still (``HostIndices``) it waits for nothing. The rows travel on a copy stream
    of their own, so that they do not queue behind the blocks that are on their way.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from poros.streams import StreamContext

logger = logging.getLogger(__name__)


class HostIndices(torch.Tensor):
    """Indices in host memory, of which copies on a device know where they are from.

    A loader of batches pins it and copies it to the device; both is seen here.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:  # which is not made for classes of somebody's own
            return args[0].as_subclass(torch.Tensor).clone()
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if func is torch.Tensor.pin_memory:
                return found.as_subclass(cls)
            if func is torch.Tensor.to and found.is_cpu:
                return found.as_subclass(torch.Tensor)
            if func is torch.Tensor.to:
                found.__dict__[_SOURCE] = args[0].as_subclass(torch.Tensor), found._version
        return found


_SOURCE = "_poros_source"


def read_indices(indices: torch.Tensor) -> torch.Tensor:
    """Return ``indices`` in host memory.

    Streams:
        The host waits for them if they are on a device, and nobody knows where they are from, or
        they were written to since.
    """
    source, version = indices.__dict__.get(_SOURCE, (None, None))
    return source if source is not None and version == indices._version else indices.cpu()


class RowReader:
    """Copies rows of matrices in host memory to the device.

    Args:
        streams: Of the blocks; rows get a copy stream beside it.

    Attributes:
        h2d_num_bytes: Of rows that went to the device, one by one or all of them.
        check: Called with a matrix's name, the matrix, indices and the rows that came, if set.
        fallbacks: What could not be had, one line each; each was logged once.
    """

    def __init__(self, streams: StreamContext) -> None:
        self.h2d_num_bytes = 0
        self.check: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
        self.fallbacks: list[str] = []
        self._streams = streams.beside()

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._streams.device

    def rows(self, name: str, matrix: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``matrix`` at ``indices``, on the device.

        Args:
            name: Of the matrix.
            matrix: In host memory, of shape (rows, columns).
            indices: Integers of any shape, on the device or the host.

        Returns:
            A new tensor of the shape of ``indices`` and the columns, in the dtype of ``matrix``.

        Streams:
            The host waits for ``indices`` as in ``read_indices``, the compute stream for the copy.

        Raises:
            IndexError: If an index is out of range.
        """
        wanted = read_indices(indices).reshape(-1)
        shape = (*indices.shape, matrix.shape[1])
        target = self._streams.borrow((wanted.numel(), matrix.shape[1]), matrix.dtype)
        if target.numel():
            staged = self._host_memory_like(target)
            torch.index_select(matrix, 0, wanted, out=staged)
            copied = self._streams.copy(target, staged, after=self._streams.record())
            try:
                self._streams.wait(copied)
            except BaseException:
                self._streams.abandon(target, copied)
                raise
            self.h2d_num_bytes += target.nbytes
        if self.check is not None:
            self.check(name, matrix, wanted, target)
        return target.view(shape)

    def whole(self, matrix: torch.Tensor) -> torch.Tensor:
        """Copy ``matrix``, which is in host memory, to the device.

        Streams:
            The compute stream waits for the copy; so does the host if the memory is pageable.
        """
        target = self._streams.borrow(matrix.shape, matrix.dtype)
        self.h2d_num_bytes += matrix.nbytes
        self._streams.wait(self._streams.copy(target, matrix, after=self._streams.record()))
        return target

    def _host_memory_like(self, target: torch.Tensor) -> torch.Tensor:
        """Return memory for rows on their way to ``target``.

        PyTorch keeps page-locked memory, and hands it out again when the copy out of it is over.
        """
        if self.device.type == "cuda":
            try:
                return torch.empty_like(target, device="cpu", pin_memory=True)
            except RuntimeError:  # the driver refuses
                self.note_pageable("rows of the embedding")
        return torch.empty_like(target, device="cpu")

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
