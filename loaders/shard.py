"""One safetensors file: reads of its tensors, which fail with an error.

A tensor is read into memory of its own. A mapping of the file would end the process with SIGBUS
where a page cannot be read, because the disk fails or the file was cut off meanwhile.
"""

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import HostMemoryError
from poros.io.digests import PIECE_NUM_BYTES, Identity, as_bytes, hash_piece, identity_of, join
from poros.loaders.header import (
    Header,
    TensorEntry,
    defect,
    fill,
    open_regular,
    read_at,
    read_header,
)

_LARGE_NUM_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Shard:
    """A file: its header, and its identity when the header was read."""

    header: Header
    identity: Identity

    @classmethod
    def open(cls, file: Path) -> "Shard":
        """Read and check the header of ``file``; nothing is left open.

        Raises:
            CheckpointFormatError: If the file cannot be opened or its header breaks the format.
        """
        with open_regular(file) as (descriptor, status):
            return cls(read_header(descriptor, file), identity_of(status))

    @property
    def file(self) -> Path:
        return self.header.file

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    def read(self, name: str, entry: TensorEntry) -> torch.Tensor:
        """Read a tensor into new memory; call ``check_unchanged`` after the last read.

        Raises:
            CheckpointFormatError: If it cannot be read.
            HostMemoryError: If there is no memory for it.
        """
        flat = new_bytes(entry.num_bytes)
        remedy = "check the disk and fetch the file again"
        with open_regular(self.file) as (descriptor, _):
            fill(descriptor, as_bytes(flat), entry.offset, self.file, tensor=name, remedy=remedy)
        return flat.view(entry.dtype).view(entry.shape)

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

        def hash_at(descriptor: int, offset: int) -> bytes:
            if is_over.is_set():
                raise ValueError(f"expected an open checkpoint, found {self.file} closed")
            num_bytes = min(PIECE_NUM_BYTES, self.num_bytes - offset)
            return hash_piece([read_at(descriptor, num_bytes, offset, self.file)])

        with open_regular(self.file) as (descriptor, _):
            self.check_unchanged()
            places = range(0, self.num_bytes, PIECE_NUM_BYTES)
            hashes = [pool.submit(hash_at, descriptor, offset) for offset in places]
            digest = join([piece_hash.result() for piece_hash in hashes])
            self.check_unchanged()
            return digest


def new_bytes(num_bytes: int) -> torch.Tensor:
    """Allocate bytes; many of them in large pages, which are four times as fast."""
    if num_bytes < _LARGE_NUM_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"expected {num_bytes} bytes of host memory for a tensor, found: {error.strerror}; "
            "free memory, or raise the limit of the process (ulimit -v)"
        ) from error
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
