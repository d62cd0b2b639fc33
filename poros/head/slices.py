"""Copies the rows of a matrix in host memory in order, through two device buffers.

Note: Slices
    The head is used once in a forward, from its first row to its last, a slice at a time. So two
    buffers do: the next slice is copied into the one while the other is computed with. The rules
    are those of slots (see "Slot lifetime" in ``poros.streams``): a copy waits until the device has
    read what was there, and the compute stream waits for the copy. The slices travel on a copy
    stream of their own, beside the blocks. Where the device has room for all of the matrix, it is
    copied once, and slices are views of that: as wide, so that no bit depends on it.
"""

from collections.abc import Callable, Iterator

import torch

from poros.head.choice import Head
from poros.head.loss import LossInputs, SlicedLossState, slice_width
from poros.head.rows import RowReader
from poros.host.layout import BlockLayout
from poros.host.limits import require_host_memory
from poros.host.slab import HostSlab
from poros.streams import Event, StreamContext
from poros.utils.profiling import labelled


def buffer_sizes(matrix: torch.Tensor) -> list[int]:
    """Return the bytes of the buffers for slices of ``matrix``."""
    num_rows, num_columns = matrix.shape
    width = slice_width(1, num_rows, num_columns)
    return [width * num_columns * matrix.element_size()] * min(2, -(-num_rows // width))


class SliceReader:
    """Copies a matrix in host memory to the device, some rows at a time.

    Args:
        name: Of the matrix.
        matrix: In host memory, of shape (rows, columns), contiguous; page-locked, or its copies
            make the host wait.
        streams: Of the blocks; slices get a copy stream beside it.

    Attributes:
        h2d_num_bytes: Of the slices that went there so far.
        in_place: Gives what is asked before slices are read, if that is still there.
        check: Called with the name, the matrix, which rows these are, and the rows that came, if
            set.

    Raises:
        torch.OutOfMemoryError: If the buffers do not fit on the device.
    """

    def __init__(self, name: str, matrix: torch.Tensor, streams: StreamContext) -> None:
        self.h2d_num_bytes = 0
        self.check: Callable[[str, torch.Tensor, slice, torch.Tensor], None] | None = None
        self.in_place: (
            Callable[[], Callable[[LossInputs], SlicedLossState | None] | None] | None
        ) = None
        self._name = name
        self.matrix = matrix
        self._streams = streams.beside()
        self._buffers = [self._streams.allocate(size) for size in buffer_sizes(matrix)]
        self._whole: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the two device buffers, and of the matrix if it is on the device."""
        whole = 0 if self._whole is None else self._whole.nbytes
        return whole + sum(buffer.nbytes for buffer in self._buffers)

    @property
    def holds_all(self) -> bool:
        """Whether all of the matrix is on the device."""
        return self._whole is not None

    def load(self) -> None:
        """Copy all of the matrix to the device, and keep it there.

        Raises:
            torch.OutOfMemoryError: If it does not fit; nothing has changed.

        Streams:
            The compute stream waits for the copy.
        """
        if self._whole is None:
            memory = self._streams.allocate(self.matrix.nbytes)
            whole = memory.view(self.matrix.dtype).view(self.matrix.shape)
            copied = self._streams.copy(whole, self.matrix, after=self._streams.record())
            self.h2d_num_bytes += whole.nbytes
            self._streams.wait(copied)
            self._whole = whole

    def evict(self) -> None:
        """Undo ``load``."""
        self._whole = None

    def known(self, asked: LossInputs) -> SlicedLossState | None:
        """Return the state over all slices, if computed ahead: see ``poros.head.loss.Slices``."""
        ask = None if self.in_place is None else self.in_place()
        return None if ask is None else ask(asked)

    def __call__(self, width: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all rows in order, ``width`` at a time: see ``poros.head.loss.Slices``.

        Args:
            width: At most that of a slice for a single token.

        Streams:
            The compute stream waits for each slice; the host for nothing.
        """
        firsts = range(0, self.matrix.shape[0], width)
        if self._whole is not None:
            for first in firsts:
                yield first, self._checked(first, self._whole[first : first + width])
            return
        # Whatever the last pass has read, or whoever left it half-way.
        released = [self._streams.record()] * len(self._buffers)
        coming = self._bring(0, width, released)
        for first in firsts:
            rows, copied = coming
            if first + width < self.matrix.shape[0]:
                coming = self._bring(first + width, width, released)
            self._streams.wait(copied)
            yield first, self._checked(first, rows)
            released[first // width % len(released)] = self._streams.record()

    def _checked(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        if self.check is not None:
            self.check(self._name, self.matrix, slice(first, first + len(rows)), rows)
        return rows

    def _bring(self, first: int, width: int, released: list[Event]) -> tuple[torch.Tensor, Event]:
        source = self.matrix[first : first + width]
        number = first // width % len(self._buffers)
        # One buffer holds all of a small matrix: each slice has a place of its own in it.
        start = self.matrix[:first].nbytes if len(self._buffers) == 1 else 0
        memory = self._buffers[number][start : start + source.nbytes]
        target = memory.view(source.dtype).view(source.shape)
        self.h2d_num_bytes += source.nbytes
        with labelled("copy head", f"rows {first}"):
            return target, self._streams.copy(target, source, after=released[number])


def keep_head(head: Head, rows: RowReader, streams: StreamContext) -> SliceReader:
    """Copy the matrix of a head to host memory of its own, page-locked for a GPU.

    Args:
        head: Whose matrix it is.
        rows: Page-locks it, and reads rows of it where an embedding is tied to it.
        streams: Of the blocks.

    Returns:
        The reader of slices of the copy.

    Raises:
        HostMemoryError: If there is no host memory for it.
        torch.OutOfMemoryError: If the buffers for slices do not fit on the device.
    """
    source = head.matrix.detach()
    require_host_memory(source.nbytes, "the head")
    memory = HostSlab(BlockLayout((), source.nbytes)).bytes
    matrix = memory.view(source.dtype).view(source.shape)
    matrix.copy_(source)
    reader = SliceReader(head.name, matrix, streams)
    rows.lock(matrix, "the head", is_own=True)
    return reader
