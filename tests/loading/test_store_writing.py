"""Writers of stores: killed, out of room, or one of several; nothing half-written opens."""

import errno
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import StoreWriteError
from poros.loaders import partial as partial_module
from poros.loaders.partial import _TEXT, MARK, remove_stale
from poros.loaders.store import open_store
from poros.loaders.store_writer import StoreWriter
from tests.children import run_forked
from tests.loading.checkpoints import open_files
from tests.loading.stores import (
    ABOUT,
    FILES,
    assert_same_store,
    fill,
    filled,
    read,
    some_layouts,
    some_rest,
    write,
    write_store,
)


def assert_one_good_store(folder: Path) -> None:
    assert os.listdir(folder) == ["store"]
    open_store(folder / "store", verify=True).close()


def test_nothing_is_left_of_a_writer_that_fails(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "store", some_layouts()) as writer:
        fill(writer.host)
        raise RuntimeError("no more")
    del writer
    assert os.listdir(tmp_path) == [] and open_files() == before
    with pytest.raises(ValueError, match="JSON"):
        write_store(tmp_path / "store", filled(), {}, {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("x")
    with pytest.raises(StoreWriteError, match="not empty"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path / "store") == ["thesis.tex"] and os.listdir(tmp_path) == ["store"]
    with pytest.raises(StoreWriteError, match="No such file"):
        StoreWriter(tmp_path / "missing" / "store", some_layouts())


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """No file may be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreWriteError, match=r"No space left on device.*make room"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path) == []


def test_a_limit_on_files_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """It is no full disk, and room would not help."""
    with limited(100_000), pytest.raises(StoreWriteError, match=r"File too large.*ulimit -f"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_later_leaves_nothing(tmp_path: Path) -> None:
    """The slabs have their room; the rest finds none."""
    with StoreWriter(tmp_path / "store", some_layouts()) as writer:
        fill(writer.host)
        with limited(500_000), pytest.raises(StoreWriteError, match="File too large"):
            writer.commit({"head": torch.zeros(200_000)}, ABOUT)
    assert os.listdir(tmp_path) == []


def test_of_two_writers_the_first_wins(tmp_path: Path) -> None:
    """The loader opens the first one's then, if it is of the same checkpoint."""
    directory = tmp_path / "store"
    first, second = (StoreWriter(directory, some_layouts()) for _ in range(2))
    fill(first.host, seed=1)
    fill(second.host, seed=2)
    first.commit(some_rest(), ABOUT, FILES)
    with pytest.raises(StoreWriteError, match="not empty"):
        second.commit(some_rest(), ABOUT, FILES)
    assert_one_good_store(tmp_path)
    with open_store(directory) as opened:
        assert_same_store(filled(seed=1), read(opened))


def test_many_writers_at_once(tmp_path: Path) -> None:
    results: list[Path | BaseException] = []

    def run() -> None:
        try:
            results.append(write(tmp_path / "store"))
        except StoreWriteError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first to be done wins, and the others are told so.
    errors = [result for result in results if isinstance(result, StoreWriteError)]
    assert len(results) == 8 > len(errors)
    assert all("not empty" in str(error) for error in errors)
    assert_one_good_store(tmp_path)


KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from poros.errors import CheckpointFormatError
from poros.loaders.store import open_store
from tests.loading.stores import write
import torch
torch.set_num_threads(1)  # a child that forks has none of its parent's threads
generator, num_stores, num_partial = random.Random(0), 0, 0
for number in range(400):
    if number >= 20 and min(num_stores, num_partial) >= 10:
        break
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    child = os.fork()
    if not child:  # writes one store after the other until it is killed
        try:
            for name in range(10_000):
                write(folder / str(name), num_layers=40)
        finally:
            os._exit(1)
    # By what it has done, not by the clock: so many stores, and then the next one has begun.
    begin, wanted = time.monotonic(), generator.randrange(3)
    while time.monotonic() - begin < 5:
        names = os.listdir(folder)
        if len(names) > wanted and any(name.startswith(".") for name in names):
            break
    time.sleep(generator.uniform(0.0, 0.01))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    partial = [name for name in os.listdir(folder) if name.startswith(".")]
    stores = set(os.listdir(folder)) - set(partial)
    for name in stores:
        open_store(folder / name, verify=True).close()
    assert len(partial) <= 1
    num_stores += len(stores)
    num_partial += len(partial)
    for name in partial:
        try:
            open_store(folder / name)
        except CheckpointFormatError:
            # The next writer of that store is not disturbed, and cleans up.
            store = write(folder / name.split(".")[1])
            open_store(store, verify=True).close()
        else:
            raise AssertionError(f"{name} opens")
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
print(num_stores, num_partial)
"""


def test_a_killed_writer_leaves_a_good_store_or_none(tmp_path: Path) -> None:
    """In a process of its own: one that forks must have no threads."""
    ran = run_forked(KILLED_WRITERS, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    # Control: many writers were killed in the middle, and stores were written at all.
    assert all(int(number) >= 10 for number in ran.stdout.split()), ran.stdout


def test_a_living_writer_is_not_cleaned_up(tmp_path: Path) -> None:
    """However old its folder is, or young that of a dead one."""
    first = StoreWriter(tmp_path / "store", some_layouts())
    (partial,) = tmp_path.iterdir()
    os.utime(partial, (0, 0))
    second = StoreWriter(tmp_path / "store", some_layouts())
    assert partial.exists() and len(os.listdir(tmp_path)) == 2
    second.close()
    fill(first.host)
    first.commit(some_rest(), ABOUT, FILES)
    assert_one_good_store(tmp_path)
    assert not (tmp_path / "store" / MARK).exists()


NAME = ".store.poros-abcdefgh.partial"
OURS = {MARK: _TEXT, "slabs.safetensors": b"half"}
FOREIGN = {"thesis.tex": b"x"}


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
        (NAME, {MARK: b""}, False),
        (NAME, FOREIGN, True),
        (NAME, {**FOREIGN, MARK: b"a lock of another program"}, True),
        (NAME, {**OURS, "additional_chat_templates/a.jinja": b"x"}, False),
        (NAME, {**OURS, "chapters/thesis.tex": b"x"}, True),
        (".store.mine.partial", FOREIGN, True),
        (".store.mine.partial", OURS, True),
        (".other.poros-abcdefgh.partial", OURS, True),
    ],
)
def test_what_is_cleaned_up_is_ours(
    tmp_path: Path, name: str, files: dict[str, bytes], is_left: bool
) -> None:
    lay(tmp_path / name, files)
    before = sorted(tmp_path.rglob("*.tex"))
    write(tmp_path / "store")
    assert set(os.listdir(tmp_path)) == {"store", *([name] if is_left else [])}
    assert sorted(tmp_path.rglob("*.tex")) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    lay(tmp_path / "elsewhere", OURS)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "store")
    assert len(os.listdir(tmp_path / "elsewhere")) == 2


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
    write(tmp_path / "store")
    assert len(made) == 3 and len(set(made)) == 3
    assert_one_good_store(tmp_path)
