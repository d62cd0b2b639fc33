"""Reads are whole, however the system cuts them; digests are of the bytes, and of every one."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from poros.io import digests, reading
from poros.io.digests import digest_of
from poros.io.reading import read_into

CONTENT = bytes(range(100))


@pytest.mark.parametrize("at_once", [1, 7, 2**20])
@pytest.mark.parametrize("given", [1, 3, 2**20])
def test_short_reads_are_continued_to_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, given: int
) -> None:
    original = os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        assert sum(map(len, buffers)) <= at_once
        return original(descriptor, [buffers[0][:given]], offset)

    monkeypatch.setattr(reading, "_AT_ONCE_NUM_BYTES", at_once)
    monkeypatch.setattr(os, "preadv", short)
    (tmp_path / "file").write_bytes(CONTENT)
    with (tmp_path / "file").open("rb") as file:
        for offset, found in ((10, 20), (90, 10), (100, 0), (200, 0)):
            target = bytearray(20)
            assert read_into(file.fileno(), memoryview(target), offset) == found
            assert target == CONTENT[offset : offset + 20].ljust(20, b"\0")
            assert read_into(file.fileno(), memoryview(b""), offset) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 9, 10, 11, 20, 47])
def test_a_digest_is_of_pieces(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, however the bytes are spread, with threads and without."""
    monkeypatch.setattr(digests, "PIECE_NUM_BYTES", 10)
    text = os.urandom(num_bytes)
    pieces = [text[at : at + 10] for at in range(0, num_bytes, 10)]
    expected = xxh3_128(b"".join(xxh3_128(piece).digest() for piece in pieces))
    with ThreadPoolExecutor(2) as pool:
        for at in {0, num_bytes // 3, num_bytes // 2, num_bytes}:
            parts = [memoryview(part) for part in (text[:at], b"", text[at:])]
            for threads in (None, pool):
                assert digest_of(parts, threads) == expected.hexdigest()
