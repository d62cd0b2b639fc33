"""One open safetensors file: tensors over its bytes, and reads that report errors.

A file is mapped, too, so that a tensor can be looked at without reading all of it. What is loaded
does not come through the mapping: where a page cannot be read, because the disk fails or the file
was cut off meanwhile, touching it ends the process with SIGBUS. ``Shard.read`` brings a tensor into
memory of its own and reports the error instead.
"""

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import HostMemoryError
from poros.host.layout import align
from poros.io.digests import PIECE_NUM_BYTES, Identity, as_bytes, hash_piece, identity_of, join
from poros.io.reading import mapping_flags, read_into
from poros.loaders.checked_reader import new_bytes
from poros.loaders.header import (
    Header,
    TensorEntry,
    defect,
    open_regular,
    read_buffer,
    read_header,
    shown,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """An open file: its header, its bytes, and its identity when it was opened."""

    header: Header
    mapping: mmap.mmap
    identity: Identity

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
            return cls(header, _map(descriptor, header), identity_of(status))
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
        """The address of the mapping."""
        return torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return a tensor over the mapped bytes; a copy if the file does not align its dtype."""
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        flat = torch.frombuffer(
            self.mapping, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset
        )
        if entry.offset % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def read(self, name: str, entry: TensorEntry) -> torch.Tensor:
        """Read a tensor into new memory; call ``check_unchanged`` after the last read.

        Raises:
            CheckpointFormatError: If it cannot be read.
            HostMemoryError: If there is no memory for it.
        """
        flat = new_bytes(entry.num_bytes)
        descriptor, _ = open_regular(self.file)
        try:
            is_whole = read_into(descriptor, as_bytes(flat), entry.offset) == entry.num_bytes
            reason = None if is_whole else "the end of the file"
        except OSError as error:
            reason = str(error.strerror)
        finally:
            os.close(descriptor)
        if reason is not None:
            raise defect(
                self.file,
                f"expected to read {entry.num_bytes} bytes at {entry.offset}, found "
                f"{reason}: the disk fails, or the file was cut off meanwhile",
                tensor=name,
                remedy="check the disk and fetch the file again",
            )
        return flat.view(entry.dtype).view(entry.shape)

    def drop_pages(self, entry: TensorEntry) -> None:
        """Release the pages that a tensor fills in this process."""
        begin = align(entry.offset, mmap.PAGESIZE)
        end = (entry.offset + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def check_unchanged(self) -> None:
        """Compare the file with what it was when it was opened.

        Raises:
            CheckpointFormatError: If its name leads to another file, or size or times differ.
        """
        try:
            current = identity_of(os.stat(self.file))
        except OSError as error:
            raise defect(
                self.file, f"expected the file that was opened, found: {error.strerror}"
            ) from error
        if current != self.identity:
            raise defect(
                self.file,
                "expected device, inode, size and times of modification and change "
                f"{self.identity} as when it was opened, found {current}: it changed while it was "
                "read",
                remedy="let nothing write to the checkpoint and load it again",
            )

    def digest(self, pool: ThreadPoolExecutor, is_over: threading.Event) -> str:
        """Hash the whole file in ``pool`` (``poros.io.digests``), unless ``is_over`` is set.

        Raises:
            CheckpointFormatError: If the file changed since it was opened, or a read fails.
            ValueError: If it was over before.
        """

        def hash_at(offset: int) -> bytes:
            if is_over.is_set():
                raise ValueError(f"expected an open checkpoint, found {self.file} closed")
            num_bytes = min(PIECE_NUM_BYTES, self.num_bytes - offset)
            return hash_piece([read_buffer(descriptor, num_bytes, offset, self.file)])

        descriptor, _ = open_regular(self.file)
        try:
            self.check_unchanged()
            places = range(0, self.num_bytes, PIECE_NUM_BYTES)
            hashes = [pool.submit(hash_at, offset) for offset in places]
            digest = join([piece_hash.result() for piece_hash in hashes])
            self.check_unchanged()
            return digest
        finally:
            os.close(descriptor)


def _map(descriptor: int, header: Header) -> mmap.mmap:
    """Map a file privately: what is written to a page stays in this process.

    Writable all the same, because torch code may write to what it loaded, and a read-only page
    would end the process.
    """
    try:
        return mmap.mmap(descriptor, header.num_bytes, **mapping_flags(private=True))
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
