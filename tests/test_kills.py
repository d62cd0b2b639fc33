"""A process that is killed while it writes or reads, or whose files are cut off: a few rounds.

Many are run by ``python -m tests.kills``; that its counts can be wrong is shown here.
"""

import faulthandler
import fcntl
import mmap
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from poros.loaders.partial import MARK, make_partial
from tests.kills import Bench, Count, cut, kill


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that forks must have no threads
    yield Bench(tmp_path_factory.mktemp("bench"))
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kind", ["write", "read", "save"])
def test_nothing_is_wrong_after_a_kill(bench: Bench, kind: str) -> None:
    count = kill(bench, kind, 3, random.Random(kind))
    assert count.rounds == 3 and count.wrong == []


@pytest.mark.parametrize("kind", ["read_checkpoint", "read", "save"])
def test_a_file_that_is_cut_off_ends_nothing_but_the_load(bench: Bench, kind: str) -> None:
    count = cut(bench, kind, 3, random.Random(kind))
    assert count.rounds == 3 and count.wrong == []


def flipped(place: Path) -> None:
    with (place / "store" / "slabs.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\7")


def added(place: Path) -> None:
    (place / "store" / "core").touch()


def still_locked(place: Path) -> None:
    partial, lock = make_partial(place / "store")
    # The descriptor closes with the process, and a living one keeps it.
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert (partial / MARK).exists()


def sound(place: Path) -> None:
    """The control of the control."""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flipped, "bytes changed"),
        (added, "in the store"),
        (still_locked, "left over"),
        (sound, None),
    ],
)
def test_control_what_is_wrong_is_counted(
    bench: Bench, tmp_path: Path, damage: Callable[[Path], None], said: str | None
) -> None:
    shutil.copytree(bench.sound, tmp_path / "store")
    damage(tmp_path)
    count = Count()
    bench.look(tmp_path, count)
    assert len(count.wrong) == (said is not None)
    assert said is None or said in count.wrong[0]


def test_control_a_signal_is_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library does not do: touch a mapping of a file that has been cut off."""
    calls = bench.folder / "calls"
    calls.touch()

    def read(store: Path) -> None:
        with calls.open("a") as stream:
            stream.write("x")
        if calls.stat().st_size == 1:
            return  # the round in which nobody interferes
        faulthandler.disable()  # whose report would look like a failure
        file = store / "slabs.safetensors"
        with file.open("r+b") as stream:
            memory = mmap.mmap(stream.fileno(), 0)
        os.truncate(file, 1)
        memory[-1]

    monkeypatch.setattr(bench, "read", read)
    count = cut(bench, "read", 1, random.Random(0))
    assert count.wrong == [f"ended with {-signal.SIGBUS}"]
