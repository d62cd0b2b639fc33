"""Files of a run's folder that are damaged: its continuation and its report.

Every cell of {file} x {damage} x {command} ends in an error of Poros or in the result of a run that
nothing has happened to, and within a time in which nothing waits for a pipe.
"""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from poros.errors import PolicyError, PorosError, RunFolderError, StoreWriteError
from poros.finetune.checkpoints import damage_of
from poros.finetune.resuming import lock_run_dir
from poros.io.writing import require_file
from tests.command import poros_command
from tests.covers import with_slow
from tests.damage import ANY, NO_JSON, Damage, field
from tests.finetune.subjects import at_step, break_at, in_four_steps, recipe_of, run, write_model

MOST_SECONDS = 20


class Interrupted(NamedTuple):
    """A run of four steps that ended at the third, with checkpoints of the first two."""

    folder: Path
    options: dict[str, Any]
    adapter: bytes
    """That of a run that was not interrupted."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Interrupted]:
    folder = tmp_path_factory.mktemp("interrupted")
    model = write_model(folder / "model", layers=2)
    options = in_four_steps(model, data / "completions.jsonl")
    adapter = run(recipe_of(**options, output__folder=folder / "whole")).adapter
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, recipe_of(**options, output__folder=folder / "run"), 3)
    yield Interrupted(folder / "run", options, adapter)


@pytest.fixture
def copy(interrupted: Interrupted, tmp_path: Path) -> Path:
    return shutil.copytree(interrupted.folder, tmp_path / "run")


class Waiting(BaseException):
    """No error that a command could catch."""


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """What waits for a pipe takes no time of the processor, and is woken."""

    def wake(number: int, frame: object) -> None:
        raise Waiting("expected an end within the time, found it waiting")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(6 * MOST_SECONDS)  # of a machine with others on it
    begin = time.process_time()
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begin < MOST_SECONDS


JSON = {**ANY, **NO_JSON}
RUN = {
    **JSON,
    "a recipe of text": field("recipe", to="text"),
    "a section of text": field("recipe", "model", to="text"),
    "digests of numbers": field("digests", to=[1]),
    "versions of numbers": field("versions", to=5),
    "a version that is none": field("versions", "torch", to={"a": 1}),
    "no base": field("digests", "weights and configuration of model.source", to=None),
    "no number of steps": field("recipe", "training", "max_steps", to=None),
    "a text for steps": field("recipe", "training", "max_steps", to="three"),
    "another format": field("format", to="2"),
}
LISTED = {
    **JSON,
    "a path for a size": field("optimizer.pt", to="x"),
    "an endless file": field("/dev/zero", to=[0, "0"]),
    "a name that is none": field("\0", to=[0, "0"]),
    "a name that is too long": field("a" * 5000, to=[0, "0"]),
}
"""Of whole.json."""


def event(**values: object) -> Damage:
    line = json.dumps({"event": "log", "step": 9, "loss": 1.0, "time": 1.0, **values})
    return lambda file: file.write_text(f"{file.read_text()}{line}\n")


FIELDS = (
    *("event", "step", "loss", "plan", "budget", "time"),
    *("check", "versions", "fallbacks", "num_tokens", "device"),
)
NO_LINE = {
    "a list": [1],
    "text": "text",
    "a number that is huge": 10**400,
    "no number": float("nan"),
    "an object": {"a": {"b": 1}},
}
EVENTS = {
    **JSON,
    "a line of garbage": lambda file: file.write_text("{\n" + file.read_text()),
    **{f"{key}: {name}": event(**{key: NO_LINE[name]}) for key in FIELDS for name in NO_LINE},
    "an end of text": event(event="end", check="text", h2d_num_bytes="many"),
    "an end of no time": event(event="end", time=1e300, fallbacks="text"),
    "terms of text": event(plan={"terms": {"slots": "many"}, "vram_budget": "all"}),
    "terms without end": event(plan={"terms": {"slots": float("inf")}}, budget=float("inf")),
    "a budget of almost nothing": event(budget=5e-324, plan={"terms": {"slots": 5e-324}}),
    "a start of text": event(event="start", versions={"torch": [1]}, time="now"),
    "half a character in it": event(event="start", versions={"torch": "\ud800"}),
}
REPORTED = {
    (file, name): damage
    for file, damages in {"events.jsonl": EVENTS, "recipe.yaml": ANY, "run.json": ANY}.items()
    for name, damage in damages.items()
}
STATE = ("optimizer.pt", "adapter_model.safetensors", "trainer_state.json")
GOING_ON = {
    (file, name): damage
    for file, damages in {
        "run.json": RUN,
        "checkpoint-2/whole.json": LISTED,
        **{f"checkpoint-2/{file}": ANY for file in STATE},
        "recipe.yaml": ANY,
        ".lock": ANY,
    }.items()
    for name, damage in damages.items()
}


def ids(cells: dict[tuple[str, str], Damage]) -> list[str]:
    return [": ".join(cell) for cell in cells]


def damaged(folder: Path, cell: tuple[str, str], cells: dict[tuple[str, str], Damage]) -> None:
    file = folder / cell[0]
    file.touch()
    cells[cell](file)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if stat.S_ISREG(file.lstat().st_mode)
    }


@pytest.mark.parametrize("cell", REPORTED, ids=ids(REPORTED))
def test_report(cell: tuple[str, str], copy: Path) -> None:
    damaged(copy, cell, REPORTED)
    found = poros_command("report", str(copy))
    assert found.exit_code in (0, 2), found.output
    assert (copy / "report.html").exists() == (found.exit_code == 0)
    if cell[0] != "events.jsonl":
        assert found.exit_code == 0


@pytest.mark.parametrize("cell", GOING_ON, ids=ids(GOING_ON))
def test_going_on(cell: tuple[str, str], copy: Path, interrupted: Interrupted) -> None:
    """Up to the first step: a checkpoint as it was written, or an error, and nothing changed."""
    damaged(copy, cell, GOING_ON)
    before = files(copy)
    recipe = recipe_of(**interrupted.options, output__folder=copy)
    digests = json.loads((interrupted.folder / "run.json").read_text())["digests"]
    digests = {name: each for name, each in digests.items() if not name.startswith("weights")}
    try:
        with lock_run_dir(recipe, digests, {}) as found:
            assert found.checkpoint is not None
            assert found.step == 2 and damage_of(copy / "checkpoint-2") is None
            assert files(found.checkpoint) == files(interrupted.folder / found.checkpoint.name)
    except PorosError:
        assert files(copy) == before


def test_a_resumed_run_removes_what_it_has_left_alone(copy: Path, interrupted: Interrupted) -> None:
    left = (".checkpoint-3.poros.partial", ".adapter.poros.partial", "run.jsonabcd1234.part")
    others = (".merged.poros.partial", "download.part", "rows.jsonl.part", "folder.part")
    for name in (*left, *others):
        is_file = name.endswith(".part") and name != "folder.part"
        (copy / name).touch() if is_file else (copy / name).mkdir()
    digests = json.loads((copy / "run.json").read_text())["digests"]
    digests = {name: each for name, each in digests.items() if not name.startswith("weights")}
    with lock_run_dir(recipe_of(**interrupted.options, output__folder=copy), digests, {}):
        there = {each.name for each in copy.iterdir()}
    assert there & {*left, *others} == {*others}


def test_without_a_damaged_checkpoint_it_goes_on_from_the_one_before(
    copy: Path, interrupted: Interrupted
) -> None:
    (copy / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    recipe = recipe_of(**interrupted.options, output__folder=copy)
    with pytest.raises(RunFolderError, match=r"optimizer\.pt is not .*remove this folder"):
        run(recipe)
    shutil.rmtree(copy / "checkpoint-2")
    found = run(recipe)
    assert "going on after step 1 of 4" in found.said and found.adapter == interrupted.adapter
    assert poros_command("report", str(copy)).exit_code == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_checkpoint_that_cannot_be_read_stays(
    number: int, copy: Path, interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "checkpoint-2" / "notes.txt").write_text("a user's own")
    before = files(copy)
    genuine = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("checkpoint-2/optimizer.pt"):
            raise OSError(number, os.strerror(number), str(path))
        return genuine(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(RunFolderError, match=r"optimizer\.pt: expected to read it") as caught:
            run(recipe_of(**interrupted.options, output__folder=copy))
    assert os.strerror(number) in str(caught.value)
    assert files(copy) == before


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "poros-test", str(folder)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(filler: Path, free: int) -> None:
    """Write a file until the disk is full, then make it shorter by so many bytes."""
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - free))


@pytest.mark.parametrize("free", with_slow((0, 40_000, 90_000, 110_000), (0, 40_000, 110_000)))
def test_a_disk_that_is_full_when_a_checkpoint_is_written(
    free: int, disk: Path, interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = disk / "run"
    recipe = recipe_of(**interrupted.options, output__folder=out)
    with monkeypatch.context() as patch:
        # The first checkpoint is written behind this step, and the second behind the next.
        at_step(patch, 2, lambda: fill(disk / "filler", free))
        with pytest.raises(StoreWriteError, match="expected to write it") as caught:
            run(recipe)
    assert str(disk / "run") in str(caught.value) and isinstance(caught.value, OSError)
    left = list(out.glob("checkpoint-*"))
    assert out / "checkpoint-1" in left and not any(map(damage_of, left))
    assert not list(out.glob("*.part*"))
    (disk / "filler").unlink()
    assert run(recipe).adapter == interrupted.adapter


def test_a_report_on_a_full_disk(disk: Path, copy: Path) -> None:
    target = disk / "page.html"
    target.write_text("the old page")
    fill(disk / "filler", 4096)
    found = poros_command("report", str(copy), "--out", str(target))
    assert found.exit_code == 2 and "page.html" in found.output and "No space" in found.output
    assert target.read_text() == "the old page"
    assert {each.name for each in disk.iterdir()} == {"filler", "page.html"}


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_report_replaces_no_pipe_and_no_device(kind: str, copy: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.symlink_to("/dev/full") if kind == "a device" else os.mkfifo(target)
    before = target.stat()
    found = poros_command("report", str(copy), "--out", str(target))
    assert found.exit_code == 2 and "a device or a pipe" in found.output
    assert target.stat().st_mode == before.st_mode


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"--out: expected a file to write, found .*null byte"):
        require_file(Path("a\0b"), "--out")


def test_a_report_through_a_link_replaces_what_it_leads_to(copy: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    assert poros_command("report", str(copy), "--out", str(link)).exit_code == 0
    assert link.is_symlink() and "<html" in target.read_text()
