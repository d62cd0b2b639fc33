"""Maps slabs that stay on a disk privately, and reads them with checks.

The tensors of these slabs are views of the mapping, so that they can be named, counted and handed
around like any others, and take no memory. Bytes that are wanted in bulk do not come through it:
behind a file that was cut off, touching a page ends the process, and what was written to
the file since would pass for the weights. So they are read, hashed, and the file is compared with
what it was.

Note: What may change
    Device, inode, size and time of modification must be as they were. The time of change alone also
    moves when somebody links, renames or unlinks the file, and it moves if somebody writes and sets
    the time of modification back: then every byte that is used is hashed again.
"""

import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from poros.errors import CheckpointFormatError
from poros.host.layout import PAGE_NUM_BYTES, BlockLayout, TensorSpec, align, slab_offsets
from poros.host.slab import Arena, HostSlab
from poros.io.digests import Identity, digest_of, identity_of, num_threads
from poros.io.reading import read_exactly

_REMEDY = (
    "Adapters are not affected and can be saved; check the disk, or write the store again, and go "
    "on from them"
)


class Stretch(NamedTuple):
    """A run of bytes with a known digest."""

    start: int
    num_bytes: int
    digest: str


class SlabFile:
    """The last slabs of a file, mapped; it stays open.

    Args:
        path: Holds all slabs, each on a page, one after the other.
        data_offset: Where in it the first slab starts, in bytes; a multiple of a page.
        layouts: One per slab.
        first: The first slab to map.
        digests: Of each slab, padded with zeros to a page.
        identity: What the file was when it was opened; None if it is not known.

    Raises:
        HostMemoryError: If the file cannot be mapped, which takes no memory.
        CheckpointFormatError: If it is shorter than the slabs, or not the file that was opened.
    """

    def __init__(
        self,
        path: Path,
        data_offset: int,
        layouts: Sequence[BlockLayout],
        first: int,
        digests: Sequence[str],
        identity: Identity | None,
    ) -> None:
        self.path = path
        starts = slab_offsets(layouts)
        sizes = [layout.padded_num_bytes for layout in layouts]
        self.offset = data_offset + starts[first]
        """Where in the file the mapping starts."""
        self._stretches = [
            Stretch(start - starts[first], size, digest)
            for start, size, digest in zip(starts, sizes, digests, strict=True)
        ][first:]
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        size, end = sum(sizes[first:]), self.offset + sum(sizes[first:])
        if status.st_size < end:
            raise CheckpointFormatError(
                f"{path}: expected {end} bytes, found {status.st_size}; write the store again"
            )
        self.identity = identity_of(status)
        if identity is not None:
            current, self.identity = self.identity, identity
            self._require(current)
        self.arena = Arena(size, file=self._descriptor, offset=self.offset, private=True)
        self._address = torch.frombuffer(self.arena.memory, dtype=torch.uint8).data_ptr()

    def within(self, start: int, num_bytes: int) -> list[Stretch]:
        """Return the slabs that begin in a part of the mapping, with starts in that part."""
        return [
            stretch._replace(start=stretch.start - start)
            for stretch in self._stretches
            if stretch.num_bytes and start <= stretch.start < start + num_bytes
        ]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the mapping."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        return 0 <= tensor.data_ptr() - self._address < len(self.arena.memory)

    def read(self, start: int, num_bytes: int) -> HostSlab:
        """Read a part of the mapping, which begins and ends with a slab, into new memory.

        Raises:
            CheckpointFormatError: If it cannot be read, or is not what was written.
        """
        size = align(num_bytes, PAGE_NUM_BYTES)
        slab = HostSlab(BlockLayout((), size))
        target = memoryview(slab.arena.memory)
        self._read_into(target, start)
        self._require(identity_of(os.fstat(self._descriptor)))
        with ThreadPoolExecutor(num_threads()) as pool:
            require_digests(self.path, target, self.within(start, num_bytes), pool)
        return slab

    def at_rest(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors, those over the mapping in new memory; reads one slab at a time.

        A tensor that this process has written to is returned as it is: the file does not have it.

        Raises:
            CheckpointFormatError: As ``read``.
        """
        last: tuple[Stretch, HostSlab] | None = None
        for tensor in tensors:
            if not self.holds(tensor) or not tensor.is_contiguous():
                yield tensor
                continue
            place = tensor.data_ptr() - self._address
            flat = torch.frombuffer(
                self.arena.memory,
                dtype=torch.uint8,
                count=tensor.numel() * tensor.element_size(),
                offset=place,
            )
            if num_written_pages(flat):
                yield tensor
                continue
            if last is None or not 0 <= place - last[0].start < last[0].num_bytes:
                stretch = next(
                    candidate
                    for candidate in self._stretches
                    if candidate.start + candidate.num_bytes > place
                )
                last = (stretch, self.read(stretch.start, stretch.num_bytes))
            stretch, slab = last
            spec = TensorSpec("", tuple(tensor.shape), tensor.dtype, offset=place - stretch.start)
            yield slab.tensor(spec)

    def require_intact(self) -> None:
        """Check that the file is unchanged; if in doubt, by reading all of it.

        Raises:
            CheckpointFormatError: If it is not.
        """
        current = identity_of(os.fstat(self._descriptor))
        self._require(current)
        if current != self.identity:
            for stretch in self._stretches:
                self.read(stretch.start, stretch.num_bytes)
            self.identity = current

    def _require(self, found: Identity) -> None:
        if not is_same_file(found, self.identity):
            raise CheckpointFormatError(
                f"{self.path}: expected device, inode, size and time of modification "
                f"{self.identity[:-1]} as when it was opened, found {found[:-1]}: another file, or "
                f"one that was written to since. {_REMEDY}"
            )

    def _read_into(self, target: memoryview, start: int) -> None:
        try:
            read_exactly(self._descriptor, target, self.offset + start)
        except (OSError, EOFError) as error:
            raise CheckpointFormatError(
                f"{self.path}: expected to read a layer of the frozen base, found: {error}. "
                f"{_REMEDY}"
            ) from error


def is_same_file(found: Identity, expected: Identity) -> bool:
    """Whether all but the time of change is the same; see "What may change"."""
    return found[:-1] == expected[:-1]


def require_digests(
    path: Path, memory: memoryview, stretches: Sequence[Stretch], pool: ThreadPoolExecutor
) -> None:
    """Hash the read slabs and compare their digests.

    Raises:
        CheckpointFormatError: If it is not what was written.
    """
    for start, num_bytes, expected in stretches:
        found = digest_of([memory[start : start + num_bytes]], pool)
        if found != expected:
            raise CheckpointFormatError(
                f"{path}: expected digest {expected} of a layer of the frozen base, found "
                f"{found}: bytes changed since it was written. {_REMEDY}"
            )


def num_written_pages(flat: torch.Tensor) -> int:
    """Count the pages of a private mapping that this process has written; 0 if that is unknown.

    Source:
        Documentation/admin-guide/mm/pagemap.rst of Linux: bit 61 is set for a page of a file, bits
        62 and 63 for one that is swapped or present.
    """
    if sys.platform != "linux" or not flat.numel():
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    first = flat.data_ptr() // page
    last = (flat.data_ptr() + flat.numel() - 1) // page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as stream:
            stream.seek(8 * first)
            text = stream.read(8 * (last + 1 - first))
    except OSError:
        return 0
    if not text:
        return 0
    entries = torch.frombuffer(bytearray(text), dtype=torch.int64)
    # Bit 63 is the sign.
    is_there = (entries < 0) | (entries & (1 << 62) != 0)
    return int((is_there & (entries & (1 << 61) == 0)).sum())
