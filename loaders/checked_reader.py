"""Reads large runs of a file into memory and checks them: hashed while the rest is read.

Nobody waits for a hash before all has been read; ``CheckedReader.check`` does. So the hashes are
computed beside the reading and beside whatever is done until then.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.digests import cut, hash_piece, join, num_threads
from poros.errors import HostMemoryError, quoted
from poros.loaders.header import defect
from poros.loaders.manifest import REMEDY
from poros.reads import read_into

_LARGE_NUM_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Run:
    """Bytes that lie in one piece in a file, and where they belong."""

    offset: int
    """In the file."""
    parts: Sequence[memoryview]
    """Memory for them, one part after the other."""
    digest: str
    """What they have to be (``poros.digests``)."""
    name: str | None = None
    """What they are, for messages."""


class CheckedReader:
    """Reads with several threads. A context manager; leaving it ends the threads."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(num_threads(), "poros-reading")
        self._hashers = ThreadPoolExecutor(2 * num_threads(), "poros-hashing")
        self._pending: list[tuple[Path, Run, list[Future[bytes]]]] = []

    def read(self, descriptor: int, file: Path, runs: Sequence[Run]) -> None:
        """Fill the parts of all runs. Their bytes are not checked yet, and must not be changed.

        Raises:
            CheckpointFormatError: If a read fails.
        """

        def fill(piece: list[memoryview], offset: int) -> Future[bytes]:
            for view in piece:
                _fill(descriptor, view, offset, file)
                offset += len(view)
            return self._hashers.submit(hash_piece, piece)

        submitted: list[tuple[Run, list[Future[Future[bytes]]]]] = []
        for run in runs:
            offset = run.offset
            pieces = []
            for piece in cut(run.parts):
                pieces.append(self._readers.submit(fill, piece, offset))
                offset += sum(map(len, piece))
            submitted.append((run, pieces))
        for run, pieces in submitted:
            self._pending.append((file, run, [future.result() for future in pieces]))

    def check(self) -> None:
        """Wait for the hashes of all that was read.

        Raises:
            CheckpointFormatError: If a run is not what it has to be, by its name.
        """
        while self._pending:
            file, run, hashes = self._pending.pop(0)
            require_digest(file, run.digest, join(future.result() for future in hashes), run.name)

    def close(self) -> None:
        """End the threads. Idempotent."""
        for pool in (self._readers, self._hashers):
            pool.shutdown(cancel_futures=True)
        self._pending.clear()


def new_bytes(num_bytes: int) -> torch.Tensor:
    """New bytes; many of them in large pages, which are there four times as fast."""
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


def _fill(descriptor: int, target: memoryview, offset: int, file: Path) -> None:
    """Fill ``target`` from ``offset`` of an open file.

    Raises:
        CheckpointFormatError: If the system reports an error or the file ends too early.
    """
    try:
        done = read_into(descriptor, target, offset)
    except OSError as error:
        raise defect(
            file,
            f"expected to read {len(target)} bytes at {offset}, found: {error.strerror}",
            remedy="check the disk, or write the store again",
        ) from error
    if done < len(target):
        raise defect(
            file,
            f"expected {len(target) - done} more bytes at {offset + done}, found the end",
            remedy=REMEDY,
        )


def require_digest(file: Path, expected: str, found: str, name: str | None = None) -> None:
    """Refuse bytes whose digest is another than when they were written.

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
