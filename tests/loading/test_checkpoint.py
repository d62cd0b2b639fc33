"""Tensors come out of a checkpoint as the library gives them; nothing is left open.

And what becomes of files that change or cannot be read. What is refused as it is opened, defect by
defect, stands in test_damage.py; random headers, of all dtypes and shapes, in test_fuzz.py.
"""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from poros.errors import CheckpointFormatError
from poros.loaders import checkpoint as checkpoint_module
from poros.loaders.checkpoint import Checkpoint, Shard
from poros.loaders.header import TensorEntry
from tests.children import run_forked
from tests.loading.checkpoints import (
    CONFIG,
    FIRST,
    INDEX,
    MIB,
    SECOND,
    SINGLE,
    as_hub_cache,
    big_checkpoint,
    entry,
    file_bytes,
    good_tensors,
    mappings,
    open_files,
    write_sharded,
    write_single,
)

Patch = pytest.MonkeyPatch
LAST = "layers.3.weight"
TOY = {"model_type": "toy"}


def assert_good(checkpoint: Checkpoint, folder: Path) -> None:
    """Every tensor, by every way of getting it, is the one that was written."""
    good = good_tensors()
    assert checkpoint.entries.keys() == good.keys() and checkpoint.path == folder
    slices = checkpoint.slices()
    for name, expected in good.items():
        for found in (checkpoint.fetch(name), slices[name][...]):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


# Where a checkpoint may lie.


def beside(folder: Path) -> Path:
    """Named outright, another name than transformers' will do."""
    return (write_single(folder) / SINGLE).replace(folder / "mine.safetensors")


def with_an_index(folder: Path) -> Path:
    """Of another checkpoint: a single file wins, as in transformers."""
    return write_single(write_sharded(folder))


def named_by_the_configuration(folder: Path) -> Path:
    write_single(folder, {"other": torch.ones(2)})
    save_file(good_tensors(), folder / "mine.safetensors")
    (folder / CONFIG).write_text(json.dumps({**TOY, "transformers_weights": "mine.safetensors"}))
    return folder


def with_files_that_the_index_does_not_name(folder: Path) -> Path:
    write_sharded(folder)
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"not looked at")
    return folder


PLACES = [write_sharded, write_single, beside, with_an_index, named_by_the_configuration]
PLACES += [with_files_that_the_index_does_not_name]


@pytest.mark.cover("values")
@pytest.mark.parametrize("write", PLACES)
@pytest.mark.parametrize("kind", [Path, str])
def test_where_it_may_lie(tmp_path: Path, write: Callable[[Path], Path], kind: Any) -> None:
    with Checkpoint.open(kind(write(tmp_path))) as checkpoint:
        assert_good(checkpoint, tmp_path)
        assert json.loads(checkpoint.texts["config.json"]).items() >= TOY.items()


def test_a_hub_cache_by_its_folder_and_by_the_name_of_the_repository(tmp_path: Path) -> None:
    snapshot = as_hub_cache(write_sharded(tmp_path / "source"), tmp_path / "cache")
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    for found in (Checkpoint.open(snapshot), Checkpoint.open("org/name", hub)):
        with found as checkpoint:
            assert_good(checkpoint, snapshot)
    with pytest.raises(CheckpointFormatError, match=r"'org/other': .*LocalEntryNotFoundError"):
        Checkpoint.open("org/other", hub)


# Reading ahead.


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_while_one_tensor_is_used_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """In natural order, each once, as far as asked, by threads of their own."""
    noted: list[tuple[str, bool]] = []
    read = Shard.read

    def note(shard: Shard, name: str, entry: TensorEntry) -> torch.Tensor:
        noted.append((name, is_main()))
        return read(shard, name, entry)

    monkeypatch.setattr(checkpoint_module, "NUM_READERS", 1)
    monkeypatch.setattr(checkpoint_module, "AHEAD_NUM_BYTES", 2 * MIB)
    monkeypatch.setattr(Shard, "read", note)
    with Checkpoint.open(big_checkpoint(tmp_path, num_mib=1, num_tensors=12)) as checkpoint:
        slices = checkpoint.slices()
        for index in range(12):
            assert int(slices[f"layers.{index}"][...][0]) == index + 1
        assert slices["layers.2"][1:3].tolist() == [3, 3]
    assert [name for name, main in noted if not main] == [f"layers.{i}" for i in range(1, 12)]
    # Whoever takes them waits; layer 2, taken twice, is read again.
    assert [name for name, main in noted if main] == ["layers.0", "layers.2"]


def test_a_failed_read_ahead_is_reported_where_the_tensor_is_used(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    read = Shard.read

    def fail(shard: Shard, name: str, entry: TensorEntry) -> torch.Tensor:
        if name == "layers.1" and not is_main():
            raise CheckpointFormatError("the disk fails")
        return read(shard, name, entry)

    monkeypatch.setattr(Shard, "read", fail)
    with Checkpoint.open(big_checkpoint(tmp_path, num_tensors=3)) as checkpoint:
        slices = checkpoint.slices()
        assert int(slices["layers.0"][0]) == 1
        with pytest.raises(CheckpointFormatError, match="the disk fails"):
            slices["layers.1"][...]


# Closing.


def test_nothing_is_open_and_a_tensor_outlives_the_checkpoint(tmp_path: Path) -> None:
    before = open_files()
    checkpoint = Checkpoint.open(write_sharded(tmp_path))
    kept = checkpoint.fetch(LAST)
    assert mappings(tmp_path) == [] and open_files() == before
    checkpoint.close()
    assert torch.equal(kept, good_tensors()[LAST])
    assert checkpoint.entries[LAST].num_bytes == 60
    with pytest.raises(ValueError, match=r"open checkpoint, found .* closed"):
        checkpoint.fingerprint()


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


def overwrite(file: Path, place: int = -1, byte: bytes = b"\0") -> None:
    with file.open("r+b") as opened:
        opened.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        opened.write(byte)


@pytest.mark.parametrize(
    "change",
    [
        *(touch, rewrite, overwrite, Path.unlink),
        lambda file: keep_time(file, lambda: os.truncate(file, file.stat().st_size + 1)),
    ],
)
def test_a_file_that_changes_after_open_is_an_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        change(tmp_path / SECOND)
        for use in (checkpoint.fingerprint, lambda: checkpoint.fetch(LAST)):
            with pytest.raises(CheckpointFormatError, match=f"{SECOND}: expected"):
                use()
        assert checkpoint.fetch("layers.0.weight").shape == (3, 2)  # of the other shard


CUT = """
import mmap, os, sys
import torch
from pathlib import Path
from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint, Shard
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
        ("read", 0, "tensor 'layers.0': expected"),
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
def test_a_read_that_fails_in_the_middle(tmp_path: Path, at: int, monkeypatch: Patch) -> None:
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
    assert f"{file.stat().st_size} bytes of address space" in ran.stdout
    assert "ulimit -v" in ran.stdout


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


def at(place: int) -> Callable[[Path], None]:
    """A byte there, and the time of modification is set back."""

    def change(folder: Path) -> None:
        keep_time(folder / SINGLE, lambda: overwrite(folder / SINGLE, place, b"\7"))

    return change


@pytest.mark.parametrize(
    ("write", "change", "is_other"),
    [
        (write_sharded, lambda folder: touch(folder / FIRST), False),
        (write_sharded, lambda folder: overwrite(folder / SECOND), True),
        (write_sharded, rename, True),
        (write_sharded, lambda folder: (folder / CONFIG).write_text('{"model_type":"toy"}'), True),
        *((big_checkpoint, at(place), True) for place in (4096, MIB // 2, 5 * MIB, 8 * MIB)),
    ],
)
def test_a_fingerprint_is_of_every_byte_and_every_write_is_seen(
    tmp_path: Path, write: Callable[[Path], Path], change: Callable[[Path], Any], is_other: bool
) -> None:
    folder = write(tmp_path)
    before = fingerprint(folder)
    change(folder)
    after = fingerprint(folder)
    assert (before[0] != after[0]) == is_other and before[1] != after[1]
