"""One safetensors file, memory-mapped: its bytes as tensors, and reads that fail with an error.

A mapping has one weakness: where a page cannot be read, because the disk fails or the file was cut
off meanwhile, touching it ends the process with SIGBUS. ``Shard.read_pages`` has the system read
the pages of a tensor first, which reports the error instead.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import HostMemoryError
from poros.loaders.header import (
    Header,
    TensorEntry,
    defect,
    open_regular,
    read_at,
    read_header,
    shown,
)

_MAP_NORESERVE = 0x4000  # Linux on its 64-bit machines; mmap names it from Python 3.13 on
_MADV_POPULATE_READ = 22  # Linux 5.14
_READ_AT_ONCE_NUM_BYTES = 4 * 2**20
_SAMPLE_NUM_BYTES = 4096
_NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """An open file: what it says that it holds, its bytes, and what it was when it was opened."""

    header: Header
    mapping: mmap.mmap
    identity: tuple[int, ...]

    @classmethod
    def open(cls, file: Path) -> "Shard":
        """Check the header of ``file`` and map it.

        The mapping keeps the one descriptor that is open afterwards. Both end with the last
        reference to it, a tensor's included.

        Raises:
            CheckpointFormatError: If the file cannot be opened or its header breaks the format.
            HostMemoryError: If the system refuses the mapping.
                Nothing is left open in either case.
        """
        descriptor, status = open_regular(file)
        try:
            header = read_header(descriptor, file)
            return cls(header, _map(descriptor, header), _identity(status))
        finally:
            os.close(descriptor)

    @property
    def file(self) -> Path:
        return self.header.file

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    @property
    def begin(self) -> int:
        """Address of the mapping."""
        return torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A tensor over the mapped bytes; a copy only where the file does not align its dtype."""
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(
            self.mapping, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset
        )
        if entry.offset % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def read_pages(self, name: str, entry: TensorEntry) -> None:
        """Wait until every page of a tensor has been read and is mapped.

        Raises:
            CheckpointFormatError: If a page cannot be read.
        """
        begin, end = _pages(entry, inward=False)
        reason = _populate(self.begin + begin, end - begin)
        if reason in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            self._read_through(entry)  # a system that does not know the request
        elif reason:
            raise defect(
                self.file,
                f"expected to read {entry.num_bytes} bytes at {entry.offset}, found "
                f"{os.strerror(reason)}: the disk fails, or the file was cut off meanwhile",
                tensor=name,
                remedy="check the disk and fetch the file again",
            )

    def drop_pages(self, entry: TensorEntry) -> None:
        """Take the pages that a tensor fills from this process."""
        begin, end = _pages(entry, inward=True)
        if begin < end:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def check_unchanged(self) -> None:
        """Compare the file with what it was when it was opened.

        Raises:
            CheckpointFormatError: If its name leads to another file, or size or time of
                modification differ.
        """
        try:
            found = _identity(os.stat(self.file))
        except OSError as error:
            raise defect(
                self.file, f"expected the file that was opened, found: {error.strerror}"
            ) from error
        if found != self.identity:
            raise defect(
                self.file,
                f"expected device, inode, size and time of modification {self.identity} as when it "
                f"was opened, found {found}: it changed while it was read",
                remedy="let nothing write to the checkpoint and load it again",
            )

    def contents(self, *, full: bool) -> Iterator[bytes]:
        """The file's bytes, or of its data only evenly spread samples, by positioned reads.

        Raises:
            CheckpointFormatError: If the file changed since it was opened, or a read fails.
        """
        descriptor, _ = open_regular(self.file)
        try:
            self.check_unchanged()
            for offset, num_bytes in self._pieces(full):
                yield read_at(descriptor, num_bytes, offset, self.file)
            self.check_unchanged()
        finally:
            os.close(descriptor)

    def _pieces(self, full: bool) -> Iterator[tuple[int, int]]:
        """Offset and length of what ``contents`` reads."""
        end, start = self.header.num_bytes, 0 if full else self.header.data_offset
        if full or end - start <= _NUM_SAMPLES * _SAMPLE_NUM_BYTES:
            step = _READ_AT_ONCE_NUM_BYTES
            return ((at, min(step, end - at)) for at in range(0, end, step))
        # The last sample ends with the file.
        spread = [
            start + index * (end - start - _SAMPLE_NUM_BYTES) // (_NUM_SAMPLES - 1)
            for index in range(_NUM_SAMPLES)
        ]
        return iter([(0, start), *((at, _SAMPLE_NUM_BYTES) for at in spread)])

    def _read_through(self, entry: TensorEntry) -> None:
        """Bring a tensor into the system's cache by reading it and dropping what was read."""
        descriptor, _ = open_regular(self.file)
        try:
            for at in range(entry.offset, entry.offset + entry.num_bytes, _READ_AT_ONCE_NUM_BYTES):
                left = entry.offset + entry.num_bytes - at
                read_at(descriptor, min(_READ_AT_ONCE_NUM_BYTES, left), at, self.file)
        finally:
            os.close(descriptor)


def _map(descriptor: int, header: Header) -> mmap.mmap:
    """Map a file privately: what is written to a page stays in this process.

    Writable all the same, because torch code may write to what it loaded, and a read-only page
    would end the process. Nothing is reserved for that: a checkpoint may be larger than memory.
    """
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            reserve = _MAP_NORESERVE if os.uname().sysname == "Linux" else 0
            return mmap.mmap(descriptor, header.num_bytes, flags=mmap.MAP_PRIVATE | reserve)
        return mmap.mmap(descriptor, header.num_bytes, access=mmap.ACCESS_COPY)
    except ValueError as error:  # mmap compares the length with the file's
        raise defect(
            header.file,
            f"expected {header.num_bytes} bytes, found fewer: it shrank while it was opened",
        ) from error
    except OSError as error:
        raise HostMemoryError(
            f"{shown(header.file)}: expected to map {header.num_bytes} bytes, which takes address "
            f"space but no memory, found: {error.strerror}; raise the limit of the process "
            "(ulimit -v, ulimit -d)"
        ) from error


def _populate(address: int, num_bytes: int) -> int:
    """Have the system read and map pages; 0 or the error's number.

    Not by ``mmap.madvise``, which keeps every other thread of Python waiting for the disk.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ
    return ctypes.get_errno() if libc.madvise(*arguments) else 0


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _pages(entry: TensorEntry, *, inward: bool) -> tuple[int, int]:
    """First byte and end of the pages that a tensor touches, or of those that it fills."""
    size = mmap.PAGESIZE
    begin, end = entry.offset, entry.offset + entry.num_bytes
    if inward:
        return -(-begin // size) * size, end // size * size
    return begin // size * size, end
