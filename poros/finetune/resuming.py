"""The folder of a run: new, interrupted, or finished; and which of its checkpoints are whole.

    run.json         what the run was started with: recipe, digests of its rows, versions
    recipe.yaml      the recipe once more, for people and for `poros finetune`
    events.jsonl     what was logged
    checkpoint-N/    the Trainer's; whole.json in it lists its files, and is written last
    adapter/         the result; there only once the run is finished

Note: Whole checkpoints
    The Trainer writes a checkpoint file by file, so a process that is killed leaves parts of one.
    Only a checkpoint whose ``whole.json`` is there and names files of these sizes and digests is
    gone on from. Since two are kept at least, one whole checkpoint is there while another is
    written.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from poros.errors import RunFolderError, quoted
from poros.output import require_folder, write_json
from poros.recipes.recipe import Recipe

WHOLE = "whole.json"
_RECIPE, _RUN, _LOCK, _ADAPTER = "recipe.yaml", "run.json", ".lock", "adapter"
_MAY_CHANGE = (
    "output.folder",
    "output.keep",
    "output.save_every",
    "memory.vram",
    "memory.slots",
    "model.host_budget",
    "model.store",
)
"""Settings that decide no bit of the result: another value goes on with the run."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: Of the folder.
        checkpoint: The newest whole one, to go on from; None for a run that begins.
        step: Of that checkpoint.
    """

    path: Path
    checkpoint: Path | None = None
    step: int = 0

    @property
    def adapter(self) -> Path:
        """Where the result is going to be."""
        return self.path / _ADAPTER

    @property
    def events(self) -> Path:
        """What was logged."""
        return self.path / "events.jsonl"


def look_at(recipe: Recipe, digests: dict[str, str]) -> RunFolder:
    """What lies where a recipe wants to write. Nothing is written.

    Args:
        recipe: With its output folder.
        digests: Of the rows, by what they are for.

    Raises:
        RunFolderError: If a finished run lies there, or one of another recipe or other rows, or
            something else.
    """
    path = Path(recipe.output.folder or "").expanduser()
    shown = quoted(str(path))
    other = "give another folder (--out)"
    if path.is_file():
        raise RunFolderError(f"output.folder: expected a folder, found the file {shown}; {other}")
    names = set(os.listdir(path)) - {_LOCK} if path.is_dir() else set()
    names = {each for each in names if not re.fullmatch(rf"{re.escape(_RUN)}\w+\.part", each)}
    if not names:
        return RunFolder(path)
    if _RUN not in names:
        raise RunFolderError(
            f"output.folder: expected a new or empty folder, or one of a run, found {shown} with "
            f"{quoted(min(names), limit=60)} in it; {other}"
        )
    if _ADAPTER in names:
        raise RunFolderError(
            f"output.folder: expected a run to begin or to go on with, found a finished one: its "
            f"adapter is {quoted(str(path / _ADAPTER))}; {other}, or remove this one"
        )
    _require_same(path, recipe, digests, other)
    step, checkpoint = max(_whole_checkpoints(path), default=(0, None))
    return RunFolder(path, checkpoint, step)


def _require_same(path: Path, recipe: Recipe, digests: dict[str, str], other: str) -> None:
    shown = quoted(str(path / _RUN), is_bare=True)
    new = _flat(recipe.as_dict())
    try:
        run = json.loads((path / _RUN).read_text(encoding="utf-8"))
        old, old_digests = _flat(run["recipe"]), run["digests"]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{shown}: expected the recipe of an interrupted run, found one that cannot be read: "
            f"{quoted(str(error), is_bare=True)}; {other}"
        ) from error
    differing = [
        f"{key}: {quoted(old.get(key), limit=60)} then, {quoted(new.get(key), limit=60)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in _MAY_CHANGE
    ]
    if old_digests != digests:
        differing.append("the rows: their files have changed since")
    if differing:
        lines = "\n".join(differing)
        raise RunFolderError(
            f"{shown}: expected the recipe of the interrupted run, found another:\n{lines}\n"
            f"go on with what it was, or {other}"
        )


def _flat(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in recipe.items()
        for name, value in values.items()
    }


@contextmanager
def opened(run: RunFolder, recipe: Recipe, digests: dict[str, str]) -> Iterator[None]:
    """Hold the folder of a run for as long as it trains; parts of checkpoints are removed.

    Raises:
        PolicyError: If nothing can be written there.
        RunFolderError: If another process holds it.
    """
    require_folder(run.path, "output.folder")
    with (run.path / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFolderError(
                f"output.folder: expected a run that nobody else is at, found "
                f"{quoted(str(run.path))} in use by another process; wait for it, or give another "
                "folder (--out)"
            ) from error
        if not (run.path / _RUN).is_file():
            began = {"recipe": recipe.as_dict(), "digests": digests, "versions": _versions()}
            write_json(run.path / _RUN, began)
        _write_text(run.path / _RECIPE, recipe.as_yaml())
        whole = {checkpoint for _, checkpoint in _whole_checkpoints(run.path)}
        for _, checkpoint in _checkpoints(run.path):
            if checkpoint not in whole:
                shutil.rmtree(checkpoint)
        for left in run.path.glob(f"{_ADAPTER}.part*"):
            shutil.rmtree(left)
        yield


def mark_whole(checkpoint: Path) -> None:
    """Note that a checkpoint has been written to its end."""
    files = {
        str(file.relative_to(checkpoint)): [file.stat().st_size, _digest(file)]
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.name != WHOLE
    }
    write_json(checkpoint / WHOLE, files)


def _checkpoints(path: Path) -> Iterator[tuple[int, Path]]:
    for folder in path.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and folder.is_dir():
            yield int(match[1]), folder


def _whole_checkpoints(path: Path) -> Iterator[tuple[int, Path]]:
    for step, folder in _checkpoints(path):
        if _is_whole(folder):
            yield step, folder


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
        return all(
            (folder / name).stat().st_size == size and _digest(folder / name) == digest
            for name, (size, digest) in files.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _digest(file: Path) -> str:
    digest = xxh3_128()
    with file.open("rb") as stream:
        while piece := stream.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    names = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets")
    for name in ("poros-runtime", *names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def forget_after(run: RunFolder) -> None:
    """Take out of the events what came after the checkpoint that a run goes on from."""
    if not run.events.is_file():
        return
    kept = []
    for line in run.events.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the process was killed as it wrote
        if run.checkpoint is not None and event.get("step", 0) <= run.step:
            kept.append(line + "\n")
    _write_text(run.events, "".join(kept))
