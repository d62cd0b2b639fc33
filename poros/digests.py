"""Digests of large bytes, and what tells a file from another or from itself before a write.

A digest is SHA-256 over the SHA-256 of each piece of ``PIECE_NUM_BYTES`` (the last may be shorter),
so that pieces are hashed on several threads, in any order, as they arrive.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

PIECE_NUM_BYTES = 16 * 2**20
"""Part of what a digest is: with other pieces the same bytes have another digest."""

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


def cut(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces of bytes that lie in several places, each piece as a list of views."""
    piece: list[memoryview] = []
    room = PIECE_NUM_BYTES
    for part in parts:
        done = 0
        while done < len(part):
            piece.append(part[done : done + room])
            done += len(piece[-1])
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], PIECE_NUM_BYTES
    if piece:
        yield piece


def hash_piece(piece: Iterable[memoryview]) -> bytes:
    """SHA-256 of one piece. Lets other threads run meanwhile."""
    digest = hashlib.sha256()
    for view in piece:
        digest.update(view)
    return digest.digest()


def join(hashes: Iterable[bytes]) -> str:
    """The digest of bytes whose pieces have these hashes, in hexadecimal."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def digest_of(parts: Sequence[memoryview], pool: ThreadPoolExecutor | None = None) -> str:
    """The digest of bytes that lie in several places, one after the other.

    Args:
        parts: Where they lie.
        pool: Hashes the pieces; None hashes them here.
    """
    return join((pool.map if pool is not None else map)(hash_piece, cut(parts)))


def num_threads() -> int:
    """How many threads are worth hashing with."""
    return min(os.cpu_count() or 1, 8)
