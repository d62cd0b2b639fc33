"""Computes digests and sums of large data, and identities of files that change with each write.

The digest of a tensor, a slab or a file is XXH3 (128 bits) of its bytes. Hashing releases the
interpreter lock, so several are hashed at a time.

Note: Accidents, not attacks
    A digest shows whether bytes are those that were written. Anyone who can change a file can
    rewrite its manifest, so a cryptographic hash would protect from nothing more. On one busy core
    SHA-256 reached 1.2 GB/s and XXH3 10.

Note: Sources, not copies
    While a model is prepared, ``SourceDigests`` hashes the tensors at their source and never at
    their new place, so that bytes which the move damages differ from the digest.
"""

import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from xxhash import xxh3_128

from poros.utils.formatting import size
from poros.utils.logging_setup import ProgressLog

logger = logging.getLogger(__name__)

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their bytes, to read the bits of an element."""

Identity = tuple[int, ...]


def identity_of(status: os.stat_result) -> Identity:
    """Device, inode, size, and times of modification and of change of a file.

    A program can set the time of modification back after a write, the time of change it cannot.
    """
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sha256(text: bytes) -> str:
    """The SHA-256 of a small file or of a text, in hexadecimal."""
    return hashlib.sha256(text).hexdigest()


def num_threads() -> int:
    """Return the number of threads to hash with."""
    return min(os.cpu_count() or 1, 8)


def digest(tensor: torch.Tensor) -> bytes:
    """The digest of the bytes of a contiguous host tensor."""
    return xxh3_128(as_bytes(tensor)).digest()


class SourceDigests:
    """Digests of tensors by name. The sources are released as they are done.

    Attributes:
        max_pending: Tensors that wait, and so stay in memory, at most.
    """

    def __init__(self) -> None:
        # Few, because tensors of a file are in memory, with the rest of their layer, until then.
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="poros-digest")
        self._pending: deque[Future[bytes]] = deque()
        self._found: dict[str, Future[bytes]] = {}
        self.max_pending = 2 * self._pool._max_workers
        self._num_bytes = 0
        self._progress = ProgressLog(logger, "poros: taking the base over: %s so far")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash ``tensor`` as it is now; it must not be written until ``results``.

        A tensor on a device is copied to the host for this, apart from the copy that moves it.
        """
        self._num_bytes += tensor.nbytes
        self._progress.step(size(self._num_bytes))
        host = tensor.detach().cpu().contiguous()
        while len(self._pending) >= self.max_pending:
            self._pending.popleft().result()
        self._found[name] = future = self._pool.submit(digest, host)
        self._pending.append(future)

    def results(self) -> dict[str, bytes]:
        """All of them. Ends the threads."""
        try:
            return {name: future.result() for name, future in self._found.items()}
        finally:
            self.close()

    def close(self) -> None:
        """End the threads; what has not begun is not hashed any more."""
        self._pool.shutdown(cancel_futures=True)


def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum all elements of ``tensors``, each mixed with its position, to detect accidental edits.

    The mixing is that of SplitMix (Steele et al. 2014, figure 16). A weighted sum of bits would
    miss edits of the highest bit, such as a change of all signs.

    Args:
        tensors: One or more tensors of any dtypes, all on one device.

    Returns:
        The sum: int64, of no dimension, on that device.

    Streams:
        Queued on the current stream; the host does not wait. Needs three integers of 64 bits for
        each element meanwhile.
    """
    with torch.no_grad():
        flat = [each.detach().reshape(-1) for each in tensors]
        bits = torch.cat([each.view(INTEGERS[each.element_size()]) for each in flat])
        mixed = torch.arange(1, len(bits) + 1, device=bits.device).mul_(-0x61C8864680B583EB)
        mixed += bits
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        return mixed.bitwise_xor_(mixed >> 31).sum()


def sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the bits of a tensor, by row and by column, each weighted by its place.

    Equal for equal bits, wherever they lie and in any order of summation; of values that were
    edited, or have changed places, others.

    Args:
        tensor: Of any shape and dtype.

    Returns:
        Of shape (2,), int64, on the same device; zeros of a tensor that is empty or not strided.

    Streams:
        Queued on the current stream; the host does not wait. Contiguous rows of whole words
        (eight bytes each) are not copied.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    is_whole = rows.shape[1] * rows.element_size() % 8 == 0
    begins_within = is_whole and int(rows.storage_offset()) * rows.element_size() % 8
    # A column is contiguous whatever its stride, which a view as other integers does not take.
    if begins_within or rows.stride(1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    words = rows.view(torch.int64 if is_whole else torch.uint8)
    sums = [_sum_of_rows(words, torch.int64), words.sum(1, dtype=torch.int64)]
    # Odd ones, with which no bit is lost.
    weights = [torch.arange(1, 2 * len(each), 2, device=each.device) for each in sums]
    return torch.stack([(a * b).sum() for a, b in zip(sums, weights, strict=True)])


def _sum_of_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up all rows of a contiguous matrix, in ``dtype``.

    In two rounds of about as many rows each: to add up thousands of rows at once, a GPU takes
    memory for parts of the sums that is up to a quarter of a GB.
    """
    together = max(1, math.isqrt(len(rows)))
    number = len(rows) // together
    whole, rest = rows[: number * together], rows[number * together :]
    parts = whole.view(number, together, rows.shape[1]).sum(1, dtype=dtype)
    return parts.sum(0).add_(rest.sum(0, dtype=dtype))
