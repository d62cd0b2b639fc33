"""Inspects and locks the folder of a run, and finds the checkpoint to resume from.

run.json         what the run was started with: recipe, digests, versions
recipe.yaml      the recipe once more, for people and for `poros finetune`
events.jsonl     what was logged
checkpoint-N/    the Trainer's, with whole.json, which lists its files
adapter/         the result; there only once the run is finished
adapter-N/       that of N steps, if the run was trained further
"""

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.errors import PorosError, RunFolderError, quoted, reason_of
from poros.finetune import hub
from poros.finetune.checkpoints import (
    STAGE,
    damage_of,
    is_set_aside,
    numbered,
    set_aside,
    unreadable,
)
from poros.io.reading import open_regular
from poros.io.writing import require_folder, write_json, write_text, writing
from poros.recipes.recipe import Recipe
from poros.utils.versions import library_versions

logger = logging.getLogger(__name__)

_RECIPE, _RUN, _LOCK, _ADAPTER = "recipe.yaml", "run.json", ".lock", "adapter"
_FORMAT = 3
"""Of run.json: in the second training and adapter had names of our own."""
_BASE = "weights of model.source"
_OTHER = "give another folder (--out)"
_ROWS = {"train": "rows of data.source", "validation": "rows of data.validation"}
"""What digests are called that are known before any library is loaded."""
_MAY_CHANGE = (
    "output.folder",
    "output.merged",
    *(f"training.{name}" for name in hub.SETTINGS),
    "training.save_total_limit",
    "training.save_steps",
    "training.save_strategy",
    "training.report_to",
    "training.run_name",
    "training.dataset_num_proc",
    "memory.vram",
    "memory.slots",
    "model.host_budget",
    "model.store",
)
"""Settings that decide no bit of the result: another value goes on with the run."""
_LENGTHS = ("training.num_train_epochs", "training.max_steps")
_ACCUMULATION = "training.gradient_accumulation_steps"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: Of the folder.
        checkpoint: The newest whole one, to resume from; None for a new run.
        step: Of that checkpoint.
        damaged: Newer checkpoints that are damaged, and the damage of each.
        accumulation: Micro-batches of a step that the run was begun with; None for a new run.
        notes: What a user has to know before the run goes on.
    """

    path: Path
    checkpoint: Path | None = None
    step: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()
    accumulation: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def adapter(self) -> Path:
        """The folder of the result."""
        return self.path / _ADAPTER

    @property
    def events(self) -> Path:
        """The file of the event log."""
        return self.path / "events.jsonl"


def inspect_run_dir(
    recipe: Recipe, digests: Mapping[str, str], machine: Mapping[str, str] | None = None
) -> RunFolder:
    """Inspect the output folder of a recipe. Nothing is written.

    Args:
        recipe: With its output folder.
        digests: Of what the run is made of, by name, as far as they are known.
        machine: What it computes on, by name, if that is known.

    Raises:
        RunFolderError: If a finished run lies there, or one of another recipe or made of something
            else, or something that is no run; or if what lies there cannot be read, or no
            checkpoint of it is whole.
    """
    path = Path(recipe.output.folder or "").expanduser()
    names = _names(path)
    if not names:
        return RunFolder(path)
    if _RUN not in names:
        raise RunFolderError(
            f"output.folder: expected a new or empty folder, or one of a run, found "
            f"{quoted(str(path))} with {quoted(min(names), limit=60)} in it; {_OTHER}"
        )
    if not _has_results(names):
        return RunFolder(path, notes=("begun before, without a checkpoint: begins again",))
    began = _flat(_read(path)["recipe"])
    if _ADAPTER in names and not _is_longer(began, _flat(recipe.as_dict())):
        raise RunFolderError(
            f"output.folder: expected a run to begin or to go on with, found a finished one: its "
            f"adapter is {quoted(str(path / _ADAPTER))}; train it further with more --epochs or "
            f"--steps than it had, {_OTHER}, or remove this one"
        )
    notes = require_same(path, recipe, digests, machine or {})
    accumulation = began.get(_ACCUMULATION)
    damaged: list[tuple[Path, str]] = []
    for step, checkpoint in numbered(path, names):
        wrong = damage_of(checkpoint)
        if wrong is None:
            notes += [f"{each.name} is not whole ({why})" for each, why in damaged]
            return RunFolder(path, checkpoint, step, tuple(damaged), accumulation, tuple(notes))
        damaged.append((checkpoint, wrong))
    aside = [f"{name}: set aside before" for name in sorted(names) if is_set_aside(name)]
    if damaged or aside:
        lines = "\n".join([f"{each.name}: {why}" for each, why in damaged] + aside)
        raise RunFolderError(
            f"{quoted(str(path), is_bare=True)}: expected a whole checkpoint to go on from, found "
            f"none:\n{lines}\n{_OTHER}; or bring one back from a copy; or remove them, to begin "
            "again"
        )
    return RunFolder(path, accumulation=accumulation, notes=tuple(notes))


def _has_results(names: Iterable[str]) -> bool:
    """Whether a run has got as far as a checkpoint; before that, it may begin as another one."""
    return any(name.startswith(("checkpoint-", _ADAPTER)) for name in names)


def _is_longer(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a recipe trains for longer than the one that a run was begun with."""
    return any(name in old and name in new and old[name] < new[name] for name in _LENGTHS)


def _names(path: Path) -> set[str]:
    """List a folder, without the files that a process killed at its start leaves."""
    try:
        found = set(os.listdir(path)) - {_LOCK}
    except FileNotFoundError:
        return set()
    except NotADirectoryError as error:
        raise RunFolderError(
            f"output.folder: expected a folder, found the file {quoted(str(path))}; {_OTHER}"
        ) from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"output.folder: expected a folder to read, found {quoted(str(path))}: "
            f"{quoted(reason_of(error), is_bare=True)}; {_OTHER}"
        ) from error
    return {name for name in found if not re.fullmatch(rf"{re.escape(_RUN)}\w+\.part", name)}


def _read(path: Path) -> dict[str, Any]:
    """Read run.json and check its form."""
    shown = quoted(str(path / _RUN), is_bare=True)
    try:
        with open_regular(path / _RUN) as file:
            run: dict[str, Any] = json.loads(file.read())
        form = run.get("format", 1)
        parts = (run["recipe"], *run["recipe"].values(), run["digests"], run["versions"])
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("a section that is none")
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise RunFolderError(
            f"{shown}: expected the recipe of an interrupted run, found one that cannot be read: "
            f"{quoted(reason_of(error), is_bare=True)}; {_OTHER}"
        ) from error
    if form != _FORMAT:
        raise RunFolderError(
            f"{shown}: expected the run of a release that names settings as this one does "
            f"(format {_FORMAT}), found format {quoted(form, limit=40)}; end it with the release "
            f"that began it, or {_OTHER}"
        )
    return run


def require_same(
    path: Path, recipe: Recipe, digests: Mapping[str, str], machine: Mapping[str, str]
) -> list[str]:
    """Compare what a run was begun with, if one was, with what it is to go on with.

    Args:
        path: Of its folder.
        recipe: To go on with.
        digests: Of what it is made of, by name, as far as they are known.
        machine: What it computes on, by name, as far as that is known.

    Returns:
        Lines about versions that differ, and about a schedule that does.

    Raises:
        RunFolderError: If something differs that decides a bit, or run.json is damaged.
    """
    if not os.path.lexists(path / _RUN) or not _has_results(os.listdir(path)):
        return []
    run = _read(path)
    old, new = _flat(run["recipe"]), _flat(recipe.as_dict())
    differing = [
        f"{key}: {quoted(old.get(key), limit=60)} then, {quoted(new.get(key), limit=60)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and key not in _MAY_CHANGE
        and not (key in _LENGTHS and _is_longer(old, new))
        and not (key == _ACCUMULATION and new.get(key) == "auto")
    ]
    # A file of the tokenizer that is gone is missed once the others are known.
    names = digests if digests.keys() <= {*_ROWS} else {*run["digests"], *digests} - {_BASE}
    differing += _changed(run["digests"], digests, names)
    if differing:
        raise _another(path, differing)
    now = {**library_versions(), **machine}
    is_steady = recipe.training.lr_scheduler_type == "constant"
    longer = (
        "the run is longer than it was begun: the learning rate goes on as its schedule has it for "
        "the new length, not as in a run that had it from the start (with --schedule constant both "
        "are the same)"
    )
    notes = [longer] if _is_longer(old, new) and not is_steady else []
    return notes + [
        f"{name} {quoted(then, is_bare=True, limit=60)} began this run, {now[name]} goes on: its "
        "bits may differ from those of a run that was not interrupted"
        for name, then in sorted(run["versions"].items())
        if name in now and then != now[name]
    ]


def _changed(old: Mapping[str, Any], new: Mapping[str, str], names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names):
        if old.get(name) != new.get(name):
            how = "not there" if name not in new else "new" if name not in old else "another"
            yield f"{_ROWS.get(name, name)}: {how} now"


def _another(path: Path, differing: list[str]) -> RunFolderError:
    lines = "\n".join(differing)
    return RunFolderError(
        f"{quoted(str(path / _RUN), is_bare=True)}: expected what the interrupted run was begun "
        f"with, found something else:\n{lines}\ngo on with what it was, or {_OTHER}"
    )


def _flat(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in recipe.items()
        for name, value in values.items()
    }


@contextmanager
def lock_run_dir(
    recipe: Recipe, digests: Mapping[str, str], machine: Mapping[str, str], seen: RunFolder
) -> Iterator[RunFolder]:
    """Lock the folder of a run while it trains, and inspect it again.

    Damaged checkpoints are renamed, and so is the adapter of a run that is trained further; what a
    killed process has left is removed.

    Args:
        recipe: With its output folder.
        digests: Of all that the run is made of but its base.
        machine: What it computes on.
        seen: The folder as it was before: what has changed since is logged.

    Raises:
        PolicyError: If nothing can be written there.
        RunFolderError: If another process holds it; and as ``inspect_run_dir``.
        StoreWriteError: If the disk is full.
    """
    require_folder(seen.path, "output.folder")
    with _locked(seen.path):
        # While rows became tokens, another process may have trained here.
        run = inspect_run_dir(recipe, digests, machine)
        for note in run.notes:
            if note not in seen.notes:
                logger.warning("poros: %s", note)
        if run.step != seen.step:
            logger.warning("poros: another process trained here; going on after step %d", run.step)
        events = _events_before(run)
        if run.adapter.exists():
            with writing(run.adapter):
                run.adapter.rename(run.path / f"{_ADAPTER}-{run.step}")
        asked = recipe.as_dict()
        if not (run.path / _RUN).exists() or not _has_results(os.listdir(run.path)):
            versions = {**library_versions(), **machine}
            began = {"format": _FORMAT, "digests": dict(digests), "versions": versions}
            write_json(run.path / _RUN, began | {"recipe": asked})
        elif _is_longer(_flat(_read(run.path)["recipe"]), _flat(asked)):
            write_json(run.path / _RUN, _read(run.path) | {"recipe": asked})
        write_text(run.path / _RECIPE, recipe.as_yaml())
        for checkpoint, why in run.damaged:
            aside = set_aside(checkpoint).name
            what = "poros: %s is not whole (%s); it is %s now, and the run goes on after step %d"
            logger.warning(what, checkpoint.name, why, aside, run.step)
        with writing(run.path):
            for left in (STAGE, f"{_ADAPTER}.part"):
                if (run.path / left).exists():
                    shutil.rmtree(run.path / left)
            for file in run.path.iterdir():  # what a kill has cut off
                if re.fullmatch(r"(run\.json|recipe\.yaml|events\.jsonl)\w+\.part", file.name):
                    file.unlink()
        write_text(run.events, events)
        yield run


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A pipe would be waited for without the flag.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with writing(path / _LOCK):
        lock = os.open(path / _LOCK, flags, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = "in use by another process"
            if not isinstance(error, BlockingIOError):
                found = f"on a disk without locks ({reason_of(error)})"
            raise RunFolderError(
                f"output.folder: expected a run that nobody else is at, found {quoted(str(path))} "
                f"{found}; wait for it, or {_OTHER}"
            ) from error
        yield
    finally:
        os.close(lock)


def require_base(run: RunFolder, digest: str) -> None:
    """Compare the base with that which the run was begun with, or note it if the run begins.

    Raises:
        RunFolderError: If it is another.
    """
    noted = _read(run.path)
    digests = noted["digests"]
    if run.checkpoint is None:
        digests[_BASE] = digest
        write_json(run.path / _RUN, noted)
    elif digests.get(_BASE) != digest:
        raise _another(run.path, list(_changed(digests, {_BASE: digest}, [_BASE])))


@contextmanager
def reading(checkpoint: Path | None, has_read: Callable[[], bool]) -> Iterator[None]:
    """Turn an error of the disk in the body into one that names the checkpoint.

    Args:
        checkpoint: What the body reads first; None if it reads none.
        has_read: Whether the body is done with it: errors are others' from then on.

    Raises:
        RunFolderError: If one comes.
    """
    try:
        yield
    except Exception as error:
        if checkpoint is None or has_read() or not _is_of_disk(error):
            raise
        raise unreadable(checkpoint, error) from error


def _is_of_disk(error: Exception) -> bool:
    """Whether an error comes from the system, directly or through a library."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return not isinstance(error, PorosError | BrokenPipeError)  # the latter: of the terminal
    of_torch = isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)
    return of_torch or isinstance(error, SafetensorError)


def _events_before(run: RunFolder) -> str:
    """Return the events up to the checkpoint that the run resumes from."""
    kept, num_damaged = [], 0
    try:
        with open_regular(run.events) as file:
            lines = file.read().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise unreadable(run.events, error) from error
    for line in filter(str.strip, lines):
        try:
            event = json.loads(line)
            if run.checkpoint is not None and event.get("step", 0) <= run.step:
                kept.append(line + "\n")
        except (ValueError, AttributeError, TypeError, RecursionError):
            num_damaged += 1
    if num_damaged:
        what = "poros: lines of events.jsonl that are no events, and are left out: %d"
        logger.warning(what, num_damaged)
    return "".join(kept)
