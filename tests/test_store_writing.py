"""Writers of stores: killed, out of room, or one of several; nothing half-written opens."""

import errno
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_store import (
    ABOUT,
    FILES,
    assert_same_store,
    fill,
    filled,
    open_files,
    read,
    some_layouts,
    some_rest,
)

from poros.errors import CheckpointFormatError, StoreWriteError
from poros.loaders import partial as partial_module
from poros.loaders.partial import _TEXT, MARK, remove_stale
from poros.loaders.store import open_store
from poros.loaders.store_writer import StoreWriter, write_store


def test_nothing_is_left_of_a_writer_that_fails(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "store", some_layouts()) as writer:
        fill(writer.host)
        raise RuntimeError("no more")
    del writer
    assert list(tmp_path.iterdir()) == [] and open_files() == before
    with pytest.raises(ValueError, match="JSON"):
        write_store(tmp_path / "store", filled(), {}, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("x")
    with pytest.raises(StoreWriteError, match="not empty"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["thesis.tex"]
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    with pytest.raises(StoreWriteError, match="No such file"):
        StoreWriter(tmp_path / "missing" / "store", some_layouts())


def test_a_full_disk_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreWriteError, match=r"No space left on device.*make room"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_files_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """It is no full disk, and room would not help."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreWriteError, match=r"File too large.*ulimit -f"):
            StoreWriter(tmp_path / "store", some_layouts())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_later_leaves_nothing(tmp_path: Path) -> None:
    """The slabs have their room; the rest finds none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with StoreWriter(tmp_path / "store", some_layouts()) as writer:
        fill(writer.host)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
        try:
            with pytest.raises(StoreWriteError, match="File too large"):
                writer.commit({"head": torch.zeros(200_000)}, ABOUT)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same", [True, False])
def test_of_two_writers_the_first_wins(same: bool, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    first, second = (StoreWriter(directory, some_layouts()) for _ in range(2))
    fill(first.host, seed=1)
    fill(second.host, seed=1 if same else 2)
    first.commit(some_rest(), ABOUT, FILES)
    if same:
        # Whoever made them, the bytes are the same.
        assert second.commit(some_rest(), {**ABOUT, "num_threads": 2}, FILES) == directory
    else:
        with pytest.raises(StoreWriteError, match="not empty"):
            second.commit(some_rest(), ABOUT, FILES)
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    with open_store(directory, verify=True) as opened:
        assert_same_store(filled(seed=1), read(opened))


def test_many_writers_at_once(tmp_path: Path) -> None:
    results: list[Path | BaseException] = []

    def write() -> None:
        try:
            results.append(write_store(tmp_path / "store", filled(), some_rest(), ABOUT, FILES))
        except StoreWriteError as error:
            results.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    # A writer that starts when the store is there is told so; the others all end up with it.
    assert len(results) == 8 and any(isinstance(each, Path) for each in results)
    assert all("not empty" in str(each) for each in results if isinstance(each, StoreWriteError))
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    open_store(tmp_path / "store", verify=True).close()


def write_without_end(folder: Path) -> int:
    """A process that writes one store after the other until it is killed; its id."""
    child = os.fork()
    if not child:
        try:
            for number in range(10_000):
                write_store(folder / str(number), filled(40), some_rest(), ABOUT, FILES)
        finally:
            os._exit(1)
    return child


def test_a_killed_writer_leaves_a_good_store_or_none(tmp_path: Path) -> None:
    generator = random.Random(0)
    num_stores = num_partial = 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        child = write_without_end(folder)
        time.sleep(generator.uniform(0.05, 0.4))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        stores = [each for each in folder.iterdir() if not each.name.startswith(".")]
        for each in stores:
            open_store(each, verify=True).close()
        partial = [each for each in folder.iterdir() if each.name.startswith(".")]
        assert len(partial) <= 1
        num_stores += len(stores)
        num_partial += len(partial)
        for each in partial:
            with pytest.raises(CheckpointFormatError):
                open_store(each)
            # The next writer of that store is not disturbed, and cleans up.
            name = each.name.split(".")[1]
            write_store(folder / name, filled(), some_rest(), ABOUT, FILES)
            open_store(folder / name, verify=True).close()
        assert not [each for each in folder.iterdir() if each.name.startswith(".")]
    # Control: most writers were killed in the middle, and stores were written at all.
    assert num_partial >= 10 and num_stores >= 10, (num_partial, num_stores)


def test_a_living_writer_is_not_cleaned_up(tmp_path: Path) -> None:
    """However old its folder is, or young that of a dead one."""
    first = StoreWriter(tmp_path / "store", some_layouts())
    (partial,) = tmp_path.iterdir()
    os.utime(partial, (0, 0))
    second = StoreWriter(tmp_path / "store", some_layouts())
    assert partial.exists() and len(list(tmp_path.iterdir())) == 2
    second.close()
    fill(first.host)
    first.commit(some_rest(), ABOUT, FILES)
    open_store(tmp_path / "store", verify=True).close()
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    assert not (tmp_path / "store" / MARK).exists()


def marked(folder: Path) -> None:
    (folder / MARK).write_bytes(_TEXT)
    (folder / "slabs.safetensors").write_bytes(b"half")


def just_made(folder: Path) -> None:
    """Killed before it had written anything."""


def just_locked(folder: Path) -> None:
    (folder / MARK).touch()


def foreign(folder: Path) -> None:
    (folder / "thesis.tex").write_text("x")


def foreign_lock(folder: Path) -> None:
    foreign(folder)
    (folder / MARK).write_text("a lock of another program")


def with_a_folder(folder: Path) -> None:
    marked(folder)
    (folder / "chapters").mkdir()
    foreign(folder / "chapters")


NAME = ".store.poros-abcdefgh.partial"


@pytest.mark.parametrize(
    ("name", "make", "is_left"),
    [
        (NAME, marked, False),
        (NAME, just_made, False),
        (NAME, just_locked, False),
        (NAME, foreign, True),
        (NAME, foreign_lock, True),
        (NAME, with_a_folder, True),
        (".store.mine.partial", foreign, True),
        (".store.mine.partial", marked, True),
        (".other.poros-abcdefgh.partial", marked, True),
    ],
)
def test_what_is_cleaned_up_is_ours(
    tmp_path: Path, name: str, make: Callable[[Path], None], is_left: bool
) -> None:
    (tmp_path / name).mkdir()
    make(tmp_path / name)
    before = sorted(tmp_path.rglob("*.tex"))
    write_store(tmp_path / "store", filled(), some_rest(), ABOUT, FILES)
    assert {each.name for each in tmp_path.iterdir()} == {"store", *([name] if is_left else [])}
    assert sorted(tmp_path.rglob("*.tex")) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    marked(tmp_path / "elsewhere")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    write_store(tmp_path / "store", filled(), some_rest(), ABOUT, FILES)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_a_folder_that_another_writer_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moments: before there is a file in it, and before that is locked."""
    made: list[Path] = []
    mkdtemp, take = tempfile.mkdtemp, partial_module._take

    def make(**options: Any) -> str:
        made.append(Path(mkdtemp(**options)))
        if len(made) == 1:
            remove_stale(tmp_path / "store")
        return str(made[-1])

    def take_late(lock: int) -> bool | None:
        if len(made) == 2:
            monkeypatch.setattr(partial_module, "_take", take)
            remove_stale(tmp_path / "store")
        return take(lock)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(partial_module, "_take", take_late)
    write_store(tmp_path / "store", filled(), some_rest(), ABOUT, FILES)
    assert len(made) == 3 and len(set(made)) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    open_store(tmp_path / "store", verify=True).close()
