"""Files that change after they were opened, reads that fail, and what a fingerprint tells.

The tests that end a process, or limit it, run one.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest

from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from tests.checkpoints import (
    FIRST,
    MIB,
    SECOND,
    big_checkpoint,
    entry,
    file_bytes,
    run_python,
    write_sharded,
    write_single,
)

# Files that change, and reads that fail.


def touch(file: Path) -> None:
    os.utime(file, ns=(0, 0))


def rewrite(file: Path) -> None:
    """The same bytes, size and time, in another file."""
    status = file.stat()
    shutil.copy(file, file.with_suffix(".new"))
    os.utime(file.with_suffix(".new"), ns=(status.st_atime_ns, status.st_mtime_ns))
    file.with_suffix(".new").replace(file)


def grow(file: Path) -> None:
    status = file.stat()
    os.truncate(file, status.st_size + 1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\0")


@pytest.mark.parametrize("change", [touch, rewrite, grow, overwrite, Path.unlink])
def test_a_file_that_changes_after_open_is_an_error(tmp_path: Path, change: object) -> None:
    with Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        checkpoint.check_unchanged()
        change(tmp_path / SECOND)
        with pytest.raises(CheckpointFormatError, match=f"{SECOND}: expected"):
            checkpoint.check_unchanged()
        with pytest.raises(CheckpointFormatError, match=f"{SECOND}: expected"):
            checkpoint.fetch("layers.3.weight")
        with pytest.raises(CheckpointFormatError, match=f"{SECOND}: expected"):
            checkpoint.fingerprint()
        assert checkpoint.fetch("layers.0.weight").shape == (3, 2)  # of the other shard


CUT = """
import os, sys
from pathlib import Path
from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.shard import Shard
with Checkpoint.open(sys.argv[1]) as checkpoint:
    Shard.check_unchanged = lambda shard: None  # the cut comes just after the check
    file, how = Path(sys.argv[1]) / "model.safetensors", sys.argv[2]
    if how != "kept":
        os.truncate(file, 2**20)
    try:
        tensor = checkpoint.tensor("layers.0") if how == "mapped" else checkpoint.fetch("layers.0")
        if how == "kept":
            os.truncate(file, 2**20)
        print(int(tensor.sum()))
    except CheckpointFormatError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("read", "tensor 'layers.0': expected to read 8388608 bytes"), ("kept", f"{MIB}")],
)
def test_a_file_that_is_cut_off_is_an_error_of_fetch(tmp_path: Path, how: str, said: str) -> None:
    """And what was fetched before has nothing to do with the file."""
    ran = run_python(CUT, str(big_checkpoint(tmp_path)), how)
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout


def test_through_a_mapping_it_would_end_the_process(tmp_path: Path) -> None:
    """Control: the cut is one that matters."""
    assert run_python(CUT, str(big_checkpoint(tmp_path)), "mapped").returncode == -signal.SIGBUS


@pytest.mark.parametrize("at", [1, 2])
def test_a_read_that_fails_in_the_middle(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.reads._AT_ONCE_NUM_BYTES", MIB)
    calls, original = 0, os.preadv

    def preadv(descriptor: int, buffers: object, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(5, "Input/output error")
        return original(descriptor, buffers, offset)

    with Checkpoint.open(big_checkpoint(tmp_path)) as checkpoint:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(CheckpointFormatError, match=r"'layers\.0'.*Input/output error"):
            checkpoint.fetch("layers.0")
        assert int(checkpoint.fetch("layers.0").sum()) == MIB  # the disk is back


def test_a_limit_on_address_space_is_an_error_of_memory(tmp_path: Path) -> None:
    code = """
import resource, sys
import torch
from poros.errors import HostMemoryError
from poros.loaders.checkpoint import Checkpoint
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)
try:
    Checkpoint.open(sys.argv[1])
except HostMemoryError as error:
    print(error)
"""
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_bytes({"a": entry("U8", [2**30], [0, 2**30])}, b""))
    os.truncate(file, file.stat().st_size + 2**30)
    ran = run_python(code, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "model.safetensors: expected to map" in ran.stdout and "ulimit -v" in ran.stdout


# Fingerprints.


def test_a_fingerprint_is_of_the_content_only(tmp_path: Path) -> None:
    write_sharded(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    touch(tmp_path / "b" / FIRST)
    found = []
    for folder in ("a", "b"):
        with Checkpoint.open(tmp_path / folder) as checkpoint:
            found.append((checkpoint.fingerprint(), checkpoint.seen()))
    assert found[0][0] == found[1][0] and found[0][0].startswith("xxh3:")
    assert found[0][1] != found[1][1]  # other files


def change_value(folder: Path) -> None:
    overwrite(folder / SECOND)


def change_name(folder: Path) -> None:
    for name in ("model.safetensors.index.json", SECOND):
        file = folder / name
        file.write_bytes(file.read_bytes().replace(b"layers.3", b"layers.4"))


def change_configuration(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "toy" }')


@pytest.mark.parametrize("change", [change_value, change_name, change_configuration])
def test_another_content_has_another_fingerprint(tmp_path: Path, change: object) -> None:
    found = []
    for folder in ("a", "b"):
        write_sharded(tmp_path / folder)
        if folder == "b":
            change(tmp_path / folder)
        with Checkpoint.open(tmp_path / folder) as checkpoint:
            found.append(checkpoint.fingerprint())
    assert found[0] != found[1]


@pytest.mark.parametrize("place", [4096, MIB // 2, 5 * MIB, 8 * MIB])
def test_every_byte_counts_and_every_write_is_seen(tmp_path: Path, place: int) -> None:
    """Also if the time of modification is set back."""
    file = big_checkpoint(tmp_path) / "model.safetensors"
    before = file.stat()
    found = []
    for byte in (None, b"\7"):
        if byte is not None:
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(byte)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        with Checkpoint.open(tmp_path) as checkpoint:
            found.append((checkpoint.fingerprint(), checkpoint.seen()))
            assert checkpoint.seen() == found[-1][1]
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]
