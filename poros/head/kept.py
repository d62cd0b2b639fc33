"""A head in host memory, and the buffers on the device for slices of it."""

from collections.abc import Callable
from typing import Any

import torch

from poros.head.choice import Head
from poros.head.rows import RowReader
from poros.head.slices import SliceReader
from poros.host.layout import BlockLayout
from poros.host.limits import require_host_memory
from poros.host.slab import HostSlab
from poros.streams import StreamContext


class KeptHead:
    """The matrix of a head in host memory; empty before ``keep``.

    Attributes:
        num_bytes: Of the matrix, in host memory.
        slices: Brings slices of it, where the loss is computed in slices.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.slices: SliceReader | None = None
        self._slab: HostSlab | None = None

    def keep(self, head: Head, rows: RowReader, streams: StreamContext) -> torch.Tensor:
        """Copy the matrix to host memory of its own, page-locked for a GPU.

        Args:
            head: Whose matrix it is.
            rows: Says so if the memory cannot be page-locked.
            streams: Of the blocks.

        Returns:
            The matrix there.

        Raises:
            HostMemoryError: If there is no host memory for it.
            torch.OutOfMemoryError: If the buffers for slices do not fit on the device.
        """
        source = head.matrix.detach()
        require_host_memory(source.nbytes, "the head")
        slab = HostSlab(BlockLayout((), source.nbytes))
        matrix = slab.bytes.view(source.dtype).view(source.shape)
        matrix.copy_(source)
        if head.is_sliced:
            self.slices = SliceReader(head.name, matrix, streams)
        if streams.device.type == "cuda" and not slab.pin(streams.device):
            rows.note_pageable("the head")
        self._slab, self.num_bytes = slab, source.nbytes
        return matrix

    @property
    def device_num_bytes(self) -> int:
        """Bytes of the buffers for slices, and of the matrix if it is on the device."""
        return 0 if self.slices is None else self.slices.num_bytes

    @property
    def pinned_num_bytes(self) -> int:
        """Page-locked bytes of the matrix."""
        return self.num_bytes if self._slab is not None and self._slab.is_pinned else 0

    @property
    def h2d_num_bytes(self) -> int:
        """Bytes of the slices copied to the device so far."""
        return 0 if self.slices is None else self.slices.h2d_num_bytes

    def check_with(self, check: Callable[[str, torch.Tensor, Any, torch.Tensor], None]) -> None:
        """Set the check of slices: see ``SliceReader.check``."""
        if self.slices is not None:
            self.slices.check = check

    @property
    def sliced_num_bytes(self) -> int:
        """Bytes of a matrix that is copied in slices."""
        return 0 if self.slices is None else self.slices.matrix_num_bytes

    def set_resident(self, is_wanted: bool) -> None:
        """Load the matrix to the device and keep it there, or evict it.

        Raises:
            torch.OutOfMemoryError: If it does not fit; nothing has changed.
        """
        if self.slices is not None:
            if is_wanted:
                self.slices.load()
            else:
                self.slices.evict()

    def unpin(self) -> None:
        """Undo the page lock; no slices are brought any more."""
        if self._slab is not None:
            self._slab.unpin()
