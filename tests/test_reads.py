"""Positioned reads: whole, however the system cuts them, and short only where the file ends."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poros import reads
from poros.reads import read_into

CONTENT = bytes(range(100))


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    opened = os.open(file, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("at_once", [1, 7, 2**20])
@pytest.mark.parametrize("given", [1, 3, 2**20])
def test_short_reads_are_continued(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, at_once: int, given: int
) -> None:
    original = os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        assert sum(map(len, buffers)) <= at_once
        return original(descriptor, [buffers[0][:given]], offset)

    monkeypatch.setattr(reads, "_AT_ONCE_NUM_BYTES", at_once)
    monkeypatch.setattr(os, "preadv", short)
    target = bytearray(20)
    assert read_into(descriptor, memoryview(target), 10) == 20
    assert target == CONTENT[10:30]
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0


@pytest.mark.parametrize(("offset", "found"), [(90, 10), (100, 0), (200, 0)])
def test_the_end_of_the_file_ends_it(descriptor: int, offset: int, found: int) -> None:
    target = bytearray(20)
    assert read_into(descriptor, memoryview(target), offset) == found
    assert target == CONTENT[offset:].ljust(20, b"\0")
    assert read_into(descriptor, memoryview(b""), offset) == 0


def test_an_error_of_the_system_is_not_the_end(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_into(descriptor, memoryview(bytearray(1)), 0)
