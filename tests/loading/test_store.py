"""Stores on disk: the bytes come back, and what is not as it was written does not open.

Writers that are out of room, or one of several, leave nothing half-written that opens. Those that
are killed stand in test_stores_of_loads.py, whole files that are damaged in test_damage.py,
manifests that are made up in test_fuzz.py.
"""

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from poros.errors import CheckpointFormatError, StoreWriteError
from poros.host.layout import PAGE_NUM_BYTES
from poros.loaders.manifest import REST, SLABS
from poros.loaders.store import is_store, open_store
from poros.loaders.store_writer import StoreWriter
from tests.comparing import compare_mappings
from tests.loading.checkpoints import (
    ABOUT,
    FILES,
    assert_same_store,
    fill,
    filled,
    header_of,
    read,
    some_layouts,
    some_rest,
    write,
)
from tests.support import same_bits

Patch = pytest.MonkeyPatch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store")


def test_everything_comes_back(tmp_path: Path) -> None:
    directory, expected = tmp_path / "store", filled()
    with StoreWriter(directory, some_layouts()) as writer:
        fill(writer.host)
        assert not directory.exists()
        assert writer.commit(some_rest(), ABOUT, FILES) == directory
    assert is_store(directory) and os.listdir(tmp_path) == ["store"]
    with open_store(directory) as opened:
        opened.verify()
        assert_same_store(expected, read(opened))
        found, rest = opened.rest(), some_rest()
        assert compare_mappings(rest, found) == []
        assert dict(opened.manifest.about) == ABOUT
        assert {name: opened.text(name) for name in FILES} == FILES
        # The data are the bytes of the arena: any part of them is mapped or read as it is.
        header = header_of(directory / SLABS)
        assert header.data_offset == opened.data_offset
        starts = [opened.data_offset, *(entry.offset for entry in header.tensors.values())]
        assert all(start % PAGE_NUM_BYTES == 0 for start in starts)
        text = opened.slabs.read_bytes()
        for slab in expected.slabs:
            start = opened.data_offset + slab.offset
            data = text[start : start + slab.layout.num_bytes]
            assert data == slab.bytes.numpy().tobytes()
    assert same_bits(found["norm.weight"], rest["norm.weight"])  # it outlives the store


# Bits that flip.


@pytest.mark.parametrize("name", [SLABS, REST, "config.json"])
def test_one_flipped_bit_is_found(name: str, store: Path) -> None:
    """In every kind of byte: length and header, tensors, padding; at both ends and anywhere.

    Behind the header it is found where it is read, too.
    """
    sound, generator = (store / name).read_bytes(), random.Random(name)
    data_offset = None if name == "config.json" else header_of(store / name).data_offset
    places = [0, 9, len(sound) - 1, *(generator.randrange(len(sound)) for _ in range(19))]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        (store / name).write_bytes(damaged)
        with pytest.raises(CheckpointFormatError, match=name), open_store(store) as opened:
            opened.verify()
        if data_offset is not None and place >= data_offset:
            changed = pytest.raises(CheckpointFormatError, match=rf"{name}.*bytes changed")
            with open_store(store) as opened, changed:
                read(opened) if name == SLABS else opened.rest()
    (store / name).write_bytes(sound)
    with open_store(store) as opened:
        opened.verify()


def assert_one_good_store(folder: Path) -> None:
    assert os.listdir(folder) == ["store"]
    with open_store(folder / "store") as opened:
        opened.verify()


def test_a_full_disk_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreWriteError, match=r"No space left on device.*make room"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path) == []


def test_of_two_writers_the_second_takes_the_place_of_one_that_fails(tmp_path: Path) -> None:
    """And waits until then. Where the first does not fail: tests/merging, of the same folders."""
    first = StoreWriter(tmp_path / "store", some_layouts())
    second = threading.Thread(target=write, args=(tmp_path / "store",), kwargs={"seed": 2})
    second.start()
    second.join(0.5)
    assert second.is_alive()
    first.close()
    second.join()
    assert_one_good_store(tmp_path)
    with open_store(tmp_path / "store") as opened:
        assert_same_store(filled(seed=2), read(opened))


def test_another_writer_removes_its_folder_as_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, removed = os.open, list[Path]()

    def removing(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".partial") and not removed:
            removed.append(path)
            os.rmdir(path)
        return genuine(path, *args, **options)

    monkeypatch.setattr(os, "open", removing)
    write(tmp_path / "store")
    assert removed
    assert_one_good_store(tmp_path)


# What is cleaned up.

NAME = ".store.poros.partial"
OURS = {"slabs.safetensors": b"half"}


def lay(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "files", "is_left"),
    [
        (NAME, OURS, False),
        (NAME, {}, False),  # killed before it had written anything
        (NAME, {**OURS, "additional_chat_templates/a.jinja": b"x"}, False),
        (".store.mine.partial", OURS, True),
        (".other.poros.partial", OURS, True),
    ],
)
def test_what_is_cleaned_up_is_ours(
    tmp_path: Path, name: str, files: dict[str, bytes], is_left: bool
) -> None:
    lay(tmp_path / name, files)
    write(tmp_path / "store")
    assert set(os.listdir(tmp_path)) == {"store", *([name] if is_left else [])}
    with open_store(tmp_path / "store") as opened:
        assert {*os.listdir(tmp_path / "store")} == {REST, SLABS, *opened.manifest.files}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    lay(tmp_path / "elsewhere", OURS)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreWriteError):
        write(tmp_path / "store")
    assert os.listdir(tmp_path / "elsewhere") == [*OURS]


def test_without_locks_the_folder_of_another_is_left(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "store")
    lay(tmp_path / NAME, OURS)
    with pytest.raises(StoreWriteError, match="No locks available"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path / NAME) == [*OURS]
