"""The folder of a run: what is in it, whether a run may begin in it, and where it goes on from.

    recipe.yaml      what the run was asked for, with the sums of its data
    checkpoint-N/    the Trainer's: adapter, optimizer, random states, at step N
    events.jsonl     what happened, a line each
    adapter/         the result; it is there when the run has ended

Note: Killed at any moment
    The Trainer writes its state into a checkpoint last, so one without it, or whose files are cut
    short, is not whole; it is removed, and the run goes on from the one before. The result is
    written beside its place and moved there.
"""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from poros.errors import RunFolderError, quoted
from poros.output import require_folder
from poros.recipes.reading import written
from poros.recipes.recipe import Recipe

_FREE = ("out", "training.log_every", "training.save_every", "vram", "host_memory")
"""What may differ when a run goes on: it changes no bit of the result."""
_CHUNK = 2**20


class RunFolder:
    """The folder of one run.

    Args:
        path: The folder.
        recipe: Of the run.
    """

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.adapter = path / "adapter"
        self.events = path / "events.jsonl"
        self._recipe_file = path / "recipe.yaml"
        self._recipe = recipe

    def require_usable(self) -> None:
        """Raise ``RunFolderError`` unless a run may begin here, or go on. Writes nothing."""
        if self.adapter.exists():
            raise RunFolderError(
                f"--out: expected a new folder or one of a run that has not ended, found a result "
                f"in {quoted(str(self.path), is_bare=True)}; choose another folder, or remove it"
            )
        if self._recipe_file.exists():
            self._require_same()
        elif self.path.exists() and any(self.path.iterdir()):
            raise RunFolderError(
                f"--out: expected a new folder or one of a run, found other files in "
                f"{quoted(str(self.path), is_bare=True)}; choose another folder"
            )

    def begin(self) -> Path | None:
        """Note the recipe in a new folder; the checkpoint to go on from, if there is one.

        Raises:
            RunFolderError: As ``require_usable``.
            PolicyError: If nothing can be written here.
        """
        self.require_usable()
        require_folder(self.path, "--out")
        checkpoint = self._newest()
        if not self._recipe_file.exists():
            text = written(self._recipe) + yaml.safe_dump({"data_sums": self._sums()})
            part = self._recipe_file.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._recipe_file)
        return checkpoint

    def finish(self, save: Callable[[Path], None]) -> None:
        """Have the result written; it is there as a whole, or not at all."""
        part = Path(mkdtemp(prefix=".adapter-", dir=self.path))
        try:
            save(part)
            part.chmod(0o755)
            os.replace(part, self.adapter)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _require_same(self) -> None:
        try:
            before = yaml.safe_load(self._recipe_file.read_text(encoding="utf-8"))
            old_sums = before.pop("data_sums")
        except (OSError, ValueError, AttributeError, KeyError, yaml.YAMLError) as error:
            raise RunFolderError(
                f"--out: expected the recipe of a run in {quoted(str(self._recipe_file))}, found "
                f"one that cannot be read; choose another folder"
            ) from error
        old, new = _flat(before), _flat(self._recipe.as_dict())
        names = [name for name in sorted(old.keys() | new.keys()) if name not in _FREE]
        differing = [
            f"{name} ({quoted(old.get(name))} then, {quoted(new.get(name))} now)"
            for name in names
            if old.get(name) != new.get(name)
        ]
        if differing:
            raise RunFolderError(
                f"--out: expected the recipe that the run in "
                f"{quoted(str(self.path), is_bare=True)} began with, found another: "
                f"{', '.join(differing)}; choose another folder, or the old values"
            )
        if old_sums != self._sums():
            raise RunFolderError(
                f"--out: expected the data that the run in {quoted(str(self.path), is_bare=True)} "
                "began with, found files that have changed since; choose another folder"
            )

    def _sums(self) -> dict[str, str]:
        """Of the data files, by path; none of data from a hub."""
        found = {}
        for each in (self._recipe.data, self._recipe.validation):
            if isinstance(each, str) and Path(each).exists():
                path = Path(each)
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                found.update({str(file): _sha256(file) for file in files if file.is_file()})
        return found

    def _newest(self) -> Path | None:
        """The newest checkpoint that is whole; those that are not are removed."""
        numbered = []
        for each in self.path.glob("checkpoint-*"):
            number = each.name.removeprefix("checkpoint-")
            if not number.isdecimal():
                continue
            if is_whole(each):
                numbered.append((int(number), each))
            else:
                shutil.rmtree(each)
        for each in self.path.glob(".adapter-*"):
            shutil.rmtree(each)
        return max(numbered)[1] if numbered else None


def is_whole(checkpoint: Path) -> bool:
    """Whether all that a run needs to go on is there and not cut short."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        packed = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
        return (
            isinstance(state, dict)
            and all(zipfile.is_zipfile(checkpoint / name) for name in packed)
            and _is_whole_safetensors(checkpoint / "adapter_model.safetensors")
            and bool(json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8")))
        )
    except (OSError, ValueError):
        return False


def _is_whole_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    ends = [each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"]
    return path.stat().st_size == 8 + size + max(ends, default=0)


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
