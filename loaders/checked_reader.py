"""Reads large runs of a file into memory, and checks them by their digests."""

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import HostMemoryError, quoted
from poros.io.digests import PIECE_NUM_BYTES, cut, hash_piece, join, num_threads
from poros.loaders.header import defect, fill
from poros.loaders.manifest import REMEDY

_LARGE_NUM_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Run:
    """A contiguous run of bytes in a file, and the memory to read it into."""

    offset: int
    """In the file."""
    parts: Sequence[memoryview]
    """Memory for them, one part after the other."""
    digest: str
    """The expected digest (``poros.io.digests``)."""
    name: str | None = None
    """A name for messages."""


def read_checked(descriptor: int, file: Path, runs: Sequence[Run]) -> None:
    """Fill the parts of all runs with several threads, so that the disk is the limit.

    Raises:
        CheckpointFormatError: If a read fails, or a run is not what it has to be.
    """

    def read_piece(piece: list[memoryview], offset: int) -> bytes:
        for view in piece:
            fill(descriptor, view, offset, file, remedy=REMEDY)
            offset += len(view)
        return hash_piece(piece)

    # While some wait for the disk, the others hash.
    pool = ThreadPoolExecutor(2 * num_threads(), "poros-reading")
    try:
        submitted = [
            [
                pool.submit(read_piece, piece, run.offset + number * PIECE_NUM_BYTES)
                for number, piece in enumerate(cut(run.parts))
            ]
            for run in runs
        ]
        for run, pieces in zip(runs, submitted, strict=True):
            found = join(piece.result() for piece in pieces)
            require_digest(file, run.digest, found, run.name)
    finally:
        pool.shutdown(cancel_futures=True)


def require_digest(file: Path, expected: str, found: str, name: str | None = None) -> None:
    """Refuse bytes whose digest differs from the one they were written with.

    Raises:
        CheckpointFormatError: With file and name.
    """
    if expected != found:
        raise defect(
            file,
            f"expected digest {quoted(expected, is_bare=True)}, found {found}: bytes changed "
            "since it was written",
            tensor=name,
            remedy=REMEDY,
        )


def new_bytes(num_bytes: int) -> torch.Tensor:
    """Allocate bytes; many of them in large pages, which are four times as fast."""
    if num_bytes < _LARGE_NUM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
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
