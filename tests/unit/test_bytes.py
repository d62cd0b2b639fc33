"""Reads are whole, however the system cuts them."""

import os
from pathlib import Path
from typing import Any

import pytest

from poros.io import reading
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
