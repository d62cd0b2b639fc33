"""A process that is killed while it writes or reads, or whose files are cut off: a few rounds.

Many are run by ``python -m tests.loading.kills``; that its counts can be wrong is shown here. What
forks runs in a process of its own, since one that forks must have no threads.
"""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from poros.loaders.partial import MARK, partial_folder
from tests.children import run_forked
from tests.loading.kills import Bench, Count
from tests.loading.loaded import Kinds

ROUNDS = """
import sys
from tests.loading.kills import run
for kind, count in run(*map(int, sys.argv[1:]), seed=0).items():
    print(kind, count.rounds, len(count.wrong), *count.wrong, sep=" | ")
    if kind == "killed: write":
        print(count.parts > 0)
"""


@pytest.mark.parametrize("share", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_wrong_after_a_kill_or_a_cut(share: int) -> None:
    """Of writers some are killed in the middle of a store."""
    ran = run_forked(ROUNDS, str(8 * share), str(3 * share))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        f"killed: write | {8 * share} | 0",
        "True",
        *(f"killed: {kind} | {2 * share} | 0" for kind in ("read", "save")),
        *(f"cut off: {kind} | {share} | 0" for kind in ("read_checkpoint", "read", "save")),
    ]


def flipped(place: Path) -> None:
    with (place / "store" / "slabs.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\7")


def added(place: Path) -> None:
    (place / "store" / "core").touch()


LOCKED = list[AbstractContextManager[Path]]()


def still_locked(place: Path) -> None:
    LOCKED.append(partial_folder(place / "store"))  # for as long as the process lives
    assert (LOCKED[-1].__enter__() / MARK).exists()


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
    kinds: Kinds,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    damage: Callable[[Path], None],
    said: str | None,
) -> None:
    bench = kinds.kept("bench", lambda: Bench(tmp_path_factory.mktemp("bench")))
    shutil.copytree(bench.sound, tmp_path / "store")
    damage(tmp_path)
    count = Count()
    bench.look(tmp_path, count)
    assert len(count.wrong) == (said is not None)
    assert said is None or said in count.wrong[0]


SIGNAL = """
import faulthandler, mmap, os, random, sys
from pathlib import Path
import torch
from tests.loading.kills import Bench, rounds_of
torch.set_num_threads(1)
class Touches(Bench):
    def read(self, store):
        with (self.folder / "calls").open("a") as stream:
            stream.write("x")
        if (self.folder / "calls").stat().st_size == 1:
            return  # the round in which nobody interferes
        faulthandler.disable()  # whose report would look like a failure
        file = store / "slabs.safetensors"
        with file.open("r+b") as stream:
            memory = mmap.mmap(stream.fileno(), 0)
        os.truncate(file, 1)
        memory[-1]
print(rounds_of(Touches(Path(sys.argv[1])), "read", 1, random.Random(0), is_cut=True).wrong)
"""


def test_control_a_signal_is_counted(tmp_path: Path) -> None:
    """What the library does not do: touch a mapping of a file that has been cut off."""
    ran = run_forked(SIGNAL, str(tmp_path))
    assert ran.stdout == f"['ended with {-signal.SIGBUS}']\n", ran.stderr
