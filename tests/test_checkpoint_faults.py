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
from poros.loaders.shard import Shard
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
    os.truncate(Path(sys.argv[1]) / "model.safetensors", 2**20)
    try:
        tensor = getattr(checkpoint, sys.argv[2])("layers.0")
        print(int(tensor.sum()))
    except CheckpointFormatError as error:
        print(error)
"""


def test_a_page_that_cannot_be_read_is_an_error_of_fetch(tmp_path: Path) -> None:
    ran = run_python(CUT, str(big_checkpoint(tmp_path)), "fetch")
    assert ran.returncode == 0, ran.stderr
    assert "tensor 'layers.0': expected to read 8388608 bytes" in ran.stdout


def test_without_fetch_it_would_end_the_process(tmp_path: Path) -> None:
    """Control: the cut is one that matters, and ``tensor`` alone does not notice."""
    assert run_python(CUT, str(big_checkpoint(tmp_path)), "tensor").returncode == -signal.SIGBUS


def test_a_system_without_the_request_reads_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.loaders.shard._MADV_POPULATE_READ", 9999)
    with Checkpoint.open(big_checkpoint(tmp_path)) as checkpoint:
        assert int(checkpoint.fetch("layers.0").sum()) == MIB
        monkeypatch.setattr(Shard, "check_unchanged", lambda shard: None)
        os.truncate(tmp_path / "model.safetensors", MIB)
        with pytest.raises(CheckpointFormatError, match="found the end of the file"):
            checkpoint.fetch("layers.0")


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
            found.append((checkpoint.fingerprint(), checkpoint.fingerprint(full=True)))
    assert found[0] == found[1]
    assert found[0][0].startswith("sampled-sha256:") and found[0][1].startswith("sha256:")


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
            found.append((checkpoint.fingerprint(), checkpoint.fingerprint(full=True)))
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_of_a_large_file_samples_are_read_and_all_of_it_if_asked(tmp_path: Path) -> None:
    """A byte between two samples shows in the full fingerprint only, which is what it is for."""
    file = big_checkpoint(tmp_path) / "model.safetensors"
    found = []
    for byte in (b"\0", b"\1"):
        with file.open("r+b") as opened:
            opened.seek(MIB // 16)
            opened.write(byte)
        with Checkpoint.open(tmp_path) as checkpoint:
            pieces = list(checkpoint._shards[0].contents(full=False))
            assert sum(map(len, pieces)) < MIB // 3 and len(pieces) == 65
            assert len(pieces[0]) == checkpoint._shards[0].header.data_offset
            whole = b"".join(checkpoint._shards[0].contents(full=True))
            assert whole == file.read_bytes()
            assert whole.startswith(pieces[0]) and whole.endswith(pieces[-1])
            found.append((checkpoint.fingerprint(), checkpoint.fingerprint(full=True)))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
