"""Checkpoints whose files change or cannot be read, and what a fingerprint tells.

The tests that end a process, or limit it, run one.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from tests.children import run_forked
from tests.loading.checkpoints import (
    CONFIG,
    FIRST,
    INDEX,
    MIB,
    SECOND,
    SINGLE,
    big_checkpoint,
    entry,
    file_bytes,
    write_sharded,
    write_single,
)

LAST = "layers.3.weight"


# Files that change, and reads that fail.


def touch(file: Path) -> None:
    os.utime(file, ns=(0, 0))


def keep_time(file: Path, change: Callable[[], Any]) -> None:
    status = file.stat()
    change()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def rewrite(file: Path) -> None:
    """The same bytes, size and time, in another file."""
    new = file.with_suffix(".new")
    keep_time(file, lambda: (shutil.copy(file, new), new.replace(file)))


def grow(file: Path) -> None:
    keep_time(file, lambda: os.truncate(file, file.stat().st_size + 1))


def overwrite(file: Path, place: int = -1, byte: bytes = b"\0") -> None:
    with file.open("r+b") as opened:
        opened.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        opened.write(byte)


@pytest.mark.parametrize("change", [touch, rewrite, grow, overwrite, Path.unlink])
def test_a_file_that_changes_after_open_is_an_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        checkpoint.check_unchanged()
        change(tmp_path / SECOND)
        uses: list[Callable[[], object]] = [checkpoint.check_unchanged, checkpoint.fingerprint]
        for use in (*uses, lambda: checkpoint.fetch(LAST)):
            with pytest.raises(CheckpointFormatError, match=f"{SECOND}: expected"):
                use()
        assert checkpoint.fetch("layers.0.weight").shape == (3, 2)  # of the other shard


CUT = """
import mmap, os, sys
import torch
from pathlib import Path
from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.shard import Shard
with Checkpoint.open(sys.argv[1]) as checkpoint:
    Shard.check_unchanged = lambda shard: None  # the cut comes just after the check
    file, how = Path(sys.argv[1]) / "model.safetensors", sys.argv[2]
    mapped = torch.frombuffer(
        mmap.mmap(os.open(file, os.O_RDONLY), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
    )
    if how != "kept":
        os.truncate(file, 2**20)
    try:
        tensor = mapped if how == "mapped" else checkpoint.fetch("layers.0")
        if how == "kept":
            os.truncate(file, 2**20)
        print(int(tensor.sum()))
    except CheckpointFormatError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("read", 0, "tensor 'layers.0': expected to read 8388608 bytes"),
        ("kept", 0, f"{MIB}"),  # what was fetched before has nothing to do with the file
        ("mapped", -signal.SIGBUS, ""),  # the control: the cut is one that matters
    ],
)
def test_a_file_that_is_cut_off_is_an_error_of_fetch(
    tmp_path: Path, how: str, code: int, said: str
) -> None:
    ran = run_forked(CUT, str(big_checkpoint(tmp_path)), how)
    assert ran.returncode == code and said in ran.stdout, ran.stderr


@pytest.mark.parametrize("at", [1, 2])
def test_a_read_that_fails_in_the_middle(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.io.reading._AT_ONCE_NUM_BYTES", MIB)
    calls, original = list[int](), os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == at:
            raise OSError(5, "Input/output error")
        return original(descriptor, buffers, offset)

    with Checkpoint.open(big_checkpoint(tmp_path)) as checkpoint:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(CheckpointFormatError, match=r"'layers\.0'.*Input/output error"):
            checkpoint.fetch("layers.0")
        assert int(checkpoint.fetch("layers.0").sum()) == MIB  # the disk is back


LIMITED = """
import resource, sys
import torch
from poros.errors import HostMemoryError
from poros.loaders.checkpoint import Checkpoint
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)
try:
    with Checkpoint.open(sys.argv[1]) as checkpoint:
        checkpoint.fetch("a")
except HostMemoryError as error:
    print(error)
"""


def test_a_limit_on_address_space_is_an_error_of_memory(tmp_path: Path) -> None:
    file = write_single(tmp_path) / SINGLE
    file.write_bytes(file_bytes({"a": entry("U8", [2**30], [0, 2**30])}, b""))
    os.truncate(file, file.stat().st_size + 2**30)
    ran = run_forked(LIMITED, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert f"expected {2**30} bytes of host memory" in ran.stdout and "ulimit -v" in ran.stdout


# Fingerprints.


def fingerprint(folder: Path) -> tuple[str, object]:
    """And what was seen of the files; twice the same."""
    with Checkpoint.open(folder) as checkpoint:
        found = checkpoint.fingerprint(), checkpoint.seen()
        assert checkpoint.seen() == found[1] and found[0].startswith("xxh3:")
        return found


def rename(folder: Path) -> None:
    for name in (INDEX, SECOND):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"layers.3", b"layers.4"))


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda folder: touch(folder / FIRST), False),
        (lambda folder: overwrite(folder / SECOND), True),
        (rename, True),
        (lambda folder: (folder / CONFIG).write_text('{"model_type": "toy" }'), True),
    ],
    ids=["time", "value", "name", "configuration"],
)
def test_a_fingerprint_is_of_the_content_only(
    tmp_path: Path, change: Callable[[Path], object], is_other: bool
) -> None:
    write_sharded(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    change(tmp_path / "b")
    one, other = fingerprint(tmp_path / "a"), fingerprint(tmp_path / "b")
    assert (one[0] != other[0]) == is_other and one[1] != other[1]  # other files


@pytest.mark.parametrize("place", [4096, MIB // 2, 5 * MIB, 8 * MIB])
def test_every_byte_counts_and_every_write_is_seen(tmp_path: Path, place: int) -> None:
    """Also if the time of modification is set back."""
    file = big_checkpoint(tmp_path) / SINGLE
    before = fingerprint(tmp_path)
    keep_time(file, lambda: overwrite(file, place, b"\7"))
    assert all(one != other for one, other in zip(before, fingerprint(tmp_path), strict=True))
