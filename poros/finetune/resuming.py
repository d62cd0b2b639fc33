"""The folder of a run: what it was begun with, its lock, and the checkpoint to resume from.

run.json         what the run was started with: recipe, digests, versions
recipe.yaml      the recipe once more, for people and for `poros finetune`
events.jsonl     what was logged; a resumed run logs steps again, and the later ones count
checkpoint-N/    the Trainer's, with whole.json, which lists its files
adapter/         the result; there only once the run is finished
adapter-N/       that of N steps, if the run was trained further

Note: Digests
    A resumed run has to find its rows and its base unchanged. Rows are compared as tokens and as
    the pixels of images, the base as it lies in memory. So a change in anything that makes them is
    noticed: files, tokenizer, template, processor, releases of libraries, a store made elsewhere.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter
from xxhash import xxh3_128

from poros.errors import RunFolderError, quoted, reason_of
from poros.finetune import hub
from poros.finetune.checkpoints import damage_of, numbered
from poros.io.reading import open_regular
from poros.io.writing import PARTIAL, require_folder, write_json, write_text, writing
from poros.recipes.recipe import Recipe
from poros.utils.versions import library_versions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOKENS, HELD_OUT = "rows of data.source as tokens", "rows of data.validation as tokens"
"""Names of the digests of rows."""
_BASE = "weights and configuration of model.source"
_RECIPE, _RUN, _LOCK, _ADAPTER = "recipe.yaml", "run.json", ".lock", "adapter"
_FORMAT: Literal[4] = 4
"""Version of run.json."""
_OTHER = "give another folder (--out)"
_MAY_CHANGE = (
    *("output.folder", "output.merged", "memory.vram", "memory.slots"),
    *("model.host_budget", "model.store", "training.report_to", "training.run_name"),
    *("training.save_total_limit", "training.save_steps", "training.save_strategy"),
    *("training.dataset_num_proc", *(f"training.{name}" for name in hub.SETTINGS)),
)
"""Settings that change no bit of the result, so a run can be resumed with other values."""
_LENGTHS = ("training.num_train_epochs", "training.max_steps")


@dataclass(frozen=True)
class Begun:
    """What a run was begun with: the contents of run.json."""

    recipe: dict[str, dict[str, Any]]
    digests: dict[str, str]
    versions: dict[str, str]
    format: Literal[4]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        checkpoint: The newest checkpoint, to resume from; None for a new run.
        step: Step of that checkpoint.
        notes: Notes for the user before the run is resumed.
        begun: What it was begun with; None for a new run that is not locked yet.
    """

    path: Path
    checkpoint: Path | None = None
    step: int = 0
    notes: tuple[str, ...] = ()
    begun: Begun | None = None

    @property
    def adapter(self) -> Path:
        return self.path / _ADAPTER

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"


def finished(recipe: Recipe) -> Path | None:
    """Return the adapter of a run that has trained for as long as a recipe asks; else None."""
    path = _path(recipe)
    if _ADAPTER not in _names(path) or _is_longer(_read(path), recipe):
        return None
    return path / _ADAPTER


def inspect_run_dir(
    recipe: Recipe,
    digests: Mapping[str, str] | None = None,
    machine: Mapping[str, str] | None = None,
    *,
    trains: bool = True,
) -> RunFolder:
    """Inspect the output folder of a recipe. Nothing is written.

    Args:
        digests: Digests of the rows of tokens, by name; None looks at the recipe alone, and for no
            checkpoint.
        machine: What the run computes on, by name.
        trains: False if a finished run will do.

    Raises:
        RunFolderError: If a recipe can neither begin nor resume a run there: it holds something
            else, a finished run, one of another recipe or other rows, or what it has written cannot
            be read or is damaged.
    """
    path = _path(recipe)
    names = _names(path)
    if names and not names & {_RUN, _LOCK}:
        raise RunFolderError(
            f"output.folder: expected a new or empty folder, or one of a run, found "
            f"{quoted(str(path))} with {quoted(min(names), limit=60)} in it; {_OTHER}"
        )
    if not any(name.startswith(("checkpoint-", _ADAPTER)) for name in names):
        again = "begun before, without a checkpoint: begins again"
        return RunFolder(path, notes=(again,) if names else ())
    run = _read(path)
    if trains and finished(recipe):
        raise RunFolderError(
            f"output.folder: expected a run to begin or to go on with, found a finished one: its "
            f"adapter is {quoted(str(path / _ADAPTER))}; train it further with more --epochs or "
            f"--steps than it had, merge it by `poros merge`, {_OTHER}, or remove this one"
        )
    _require_same(path, run, recipe, digests)
    found = RunFolder(path, notes=tuple(_notes(run, recipe, machine or {})), begun=run)
    checkpoints = numbered(path)
    if _ADAPTER in names and not checkpoints and _is_longer(run, recipe):
        raise RunFolderError(
            f"output.folder: expected a checkpoint to train further from, found none beside the "
            f"adapter {quoted(str(path / _ADAPTER))}; {_OTHER}"
        )
    if digests is None or not checkpoints:
        return found
    step, checkpoint = checkpoints[0]
    wrong = damage_of(checkpoint)
    if wrong is not None:
        raise RunFolderError(
            f"{quoted(str(checkpoint), is_bare=True)}: expected a whole checkpoint, "
            f"found that {wrong}; bring it back from a copy, or remove this folder, to go on from "
            f"the one before it; or {_OTHER}"
        )
    return replace(found, checkpoint=checkpoint, step=step)


def _path(recipe: Recipe) -> Path:
    return Path(recipe.output.folder or "").expanduser()


def _require_same(
    path: Path, run: Begun, recipe: Recipe, digests: Mapping[str, str] | None
) -> None:
    """Compare settings and digests of rows with those that a run was begun with."""
    old, new = _flat(run.recipe), _flat(recipe.as_dict())
    may_change = {*_MAY_CHANGE, *(_LENGTHS if _is_longer(run, recipe) else ())}
    differing = [
        f"{key}: {quoted(old.get(key), limit=60)} then, {quoted(new.get(key), limit=60)} now"
        for key in sorted((old.keys() | new.keys()) - may_change)
        if old.get(key) != new.get(key)
    ]
    if digests is not None:
        before = {name: each for name, each in run.digests.items() if name != _BASE}
        names = sorted({*before, *digests})
        changed = [name for name in names if before.get(name) != digests.get(name)]
        differing += [f"{name}: another now" for name in changed]
    if differing:
        raise _another(path, differing)


def _notes(run: Begun, recipe: Recipe, machine: Mapping[str, str]) -> Iterator[str]:
    """Yield what differs from the run as it was begun: its schedule, versions, the machine."""
    if _is_longer(run, recipe) and recipe.training.lr_scheduler_type != "constant":
        yield (
            "the run is longer than it was begun: the learning rate goes on as its schedule has it "
            "for the new length, not as in a run that had it from the start (with --schedule "
            "constant both are the same)"
        )
    now = {**library_versions(), **machine}
    for name, then in sorted(run.versions.items()):
        if name in now and then != now[name]:
            yield (
                f"{name} {quoted(then, is_bare=True, limit=60)} began this run, {now[name]} goes "
                "on: its bits may differ from those of a run that was not interrupted"
            )


def _is_longer(run: Begun, recipe: Recipe) -> bool:
    """Whether a recipe trains for longer than the one that a run was begun with."""
    old, new = _flat(run.recipe), _flat(recipe.as_dict())
    both: list[Any] = [(old.get(name), new.get(name)) for name in _LENGTHS]
    # What was read may be anything.
    return any({type(was), type(now)} <= {int, float} and was < now for was, now in both)


def _names(path: Path) -> set[str]:
    return {*os.listdir(path)} if path.exists() else set()


def _read(path: Path) -> Begun:
    try:
        with open_regular(path / _RUN) as file:
            return TypeAdapter(Begun).validate_json(file.read())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{quoted(str(path / _RUN), is_bare=True)}: expected the recipe of an interrupted run, "
            f"in format {_FORMAT}, found one that cannot be read: "
            f"{reason_of(error)}; end it with the release that began it, or "
            f"{_OTHER}"
        ) from error


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
    recipe: Recipe, digests: Mapping[str, str], machine: Mapping[str, str]
) -> Iterator[RunFolder]:
    """Lock the folder of a run while it trains, and inspect it once more.

    The adapter of a run that is trained further is renamed; what a killed process has left is
    removed.

    Raises:
        PolicyError, StoreWriteError: If nothing can be written there.
        RunFolderError: If another process holds it; and as ``inspect_run_dir``.
    """
    path = _path(recipe)
    require_folder(path, "output.folder")
    with _locked(path):
        run = inspect_run_dir(recipe, digests, machine)
        if run.adapter.exists():
            with writing(run.adapter):
                run.adapter.rename(run.path / f"{_ADAPTER}-{run.step}")
        asked, versions = recipe.as_dict(), {**library_versions(), **machine}
        begun = run.begun or Begun(asked, dict(digests), versions, _FORMAT)
        if run.begun is None or _is_longer(begun, recipe):
            begun = replace(begun, recipe=asked)
            write_json(run.path / _RUN, asdict(begun))
        write_text(run.path / _RECIPE, recipe.as_yaml())
        with writing(run.path):
            for name in ("checkpoint-*", _ADAPTER):
                for left in run.path.glob(f".{name}.poros{PARTIAL}"):
                    shutil.rmtree(left)
            for name in (_RUN, _RECIPE):
                for file in run.path.glob(f"{name}?*.part"):
                    file.unlink()
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
            is_held = isinstance(error, BlockingIOError)
            found = "in use by another process" if is_held else reason_of(error)
            raise RunFolderError(
                f"output.folder: expected a run that no other process uses, found "
                f"{quoted(str(path))}: {found}; wait for it, or {_OTHER}"
            ) from error
        yield
    finally:
        os.close(lock)


def machine(device: "torch.device", *, has_liger: bool) -> dict[str, str]:
    """Return what a run computes on: the device, on a CPU the threads, and the release of Liger."""
    import torch

    found = {"liger-kernel": version("liger-kernel") if has_liger else "off"}
    if device.type == "cuda":
        return found | {"device": torch.cuda.get_device_name(device)}
    return found | {"device": device.type, "threads": str(torch.get_num_threads())}


def require_base(run: RunFolder, model: "PreTrainedModel", source: str) -> None:
    """Compare the base with the one in run.json, or note its digest there if the run begins.

    The configuration of ``source``, and every parameter and buffer as packed, count.

    Raises:
        RunFolderError: If they differ.
    """
    from poros.io.digests import digest, num_threads
    from poros.kernels.nf4 import part_tensors
    from poros.loaders.source import CONFIG, find_config

    parts: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts |= part_tensors(name, tensor, with_constants=True)
    found = xxh3_128(find_config(str(Path(source).expanduser()))[1][CONFIG])
    with ThreadPoolExecutor(num_threads()) as pool:
        digests = pool.map(lambda each: digest(each.detach().cpu().contiguous()), parts.values())
        for name, each in zip(parts, digests, strict=True):
            found.update(f"{name}\n".encode() + each)
    begun = _read(run.path)
    if run.checkpoint is None:
        begun.digests[_BASE] = found.hexdigest()
        write_json(run.path / _RUN, asdict(begun))
    elif begun.digests.get(_BASE) != found.hexdigest():
        raise _another(run.path, [f"{_BASE}: another now"])
