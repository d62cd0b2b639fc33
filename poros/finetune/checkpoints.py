"""Writes checkpoints of a run, and detects damaged ones.

Note: Parts
    The Trainer writes a checkpoint file by file. It does so in a hidden folder, in which an older
    checkpoint is removed too, and the new one gets its name once ``whole.json``, which has size and
    digest of each file, is beside the others. A process that is killed therefore leaves no part of
    one under the name of a checkpoint: what has the name and is not whole was damaged later.
"""

import json
import os
import re
from hashlib import file_digest
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from poros.errors import RunFolderError, quoted, reason_of
from poros.io.reading import open_regular
from poros.io.writing import partial_folder, put_in_place, write_json, writing

WHOLE = "whole.json"
_NEEDED = {
    *("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth"),
    *("scheduler.pt", "trainer_state.json"),
}
"""Files without which the Trainer resumes with other bits, or fails."""


def numbered(run: Path) -> list[tuple[int, Path]]:
    """List step and path of each checkpoint, whole or not, the newest first."""
    matches = (re.fullmatch(r"checkpoint-(\d+)", name) for name in os.listdir(run))
    return sorted(((int(each[1]), run / each[0]) for each in matches if each), reverse=True)


def damage_of(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is whole.

    Raises:
        RunFolderError: If the system reports an error.
    """
    file = checkpoint / WHOLE
    try:
        with open_regular(file) as stream:
            files = json.loads(stream.read())
        missing = sorted(_NEEDED - files.keys())
        if missing:
            return f"{WHOLE} does not list {', '.join(missing)}"
        for name, noted in files.items():
            file = checkpoint / name
            if _size_and_digest(file) != noted:
                return f"{quoted(name, is_bare=True)} is not as it was written"
    except (FileNotFoundError, NotADirectoryError):
        return f"{quoted(file.name, is_bare=True)} is missing"
    except OSError as error:
        raise RunFolderError(
            f"{quoted(str(file), is_bare=True)}: expected to read it, found: "
            f"{reason_of(error)}; nothing was moved or removed: mend the "
            "disk or the permissions, and start the same command again"
        ) from error
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"{quoted(file.name, is_bare=True)}: {quoted(str(error), is_bare=True, limit=80)}"
    return None


class StagedCheckpoints:
    """Mixin of a Trainer: a checkpoint gets its name once all of it is written.

    It stands before the Trainer among the bases of a class.

    Raises:
        StoreWriteError: When a checkpoint cannot be written. Nothing of it is left; those before it
            are.
    """

    args: Any
    state: Any

    _partial: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self.args.output_dir)
        target = run / f"checkpoint-{self.state.global_step}"
        if (target / WHOLE).exists():  # a signal came in the last step of an epoch
            return
        with writing(target, Exception), partial_folder(target) as partial:
            self._partial = partial
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            _mark_complete(partial / target.name)
            put_in_place(partial / target.name, target)
            best = self.state.best_global_step if self.args.load_best_model_at_end else None
            note_best(self.args, self.state)
            # Only now is an older one not needed any more.
            for step, old in numbered(run)[self.args.save_total_limit :]:
                if step != best:
                    old.rename(partial / old.name)


def note_best(args: Any, state: Any) -> None:
    """Tell a Trainer the place where a run keeps its best checkpoint, not where it was written."""
    best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
    state.best_model_checkpoint = str(best) if best.is_dir() else None


def best_of(args: Any, last: Path) -> Path:
    """The checkpoint whose weights a finished run keeps: the last one, or the best."""
    if not args.load_best_model_at_end:
        return last
    state = json.loads((last / "trainer_state.json").read_bytes())
    best = last.with_name(f"checkpoint-{state['best_global_step']}")
    return best if best.is_dir() else last


def has_stopped_early(checkpoint: Path) -> bool:
    """Whether early stopping ends a run there: as many validations without a better metric."""
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    found = state["stateful_callbacks"].get("EarlyStoppingCallback")
    if found is None:
        return False
    counter: int = found["attributes"]["early_stopping_patience_counter"]
    return counter >= int(found["args"]["early_stopping_patience"])


def _mark_complete(checkpoint: Path) -> None:
    paths = sorted(each for each in checkpoint.rglob("*") if each.is_file())
    files = {str(path.relative_to(checkpoint)): _size_and_digest(path) for path in paths}
    write_json(checkpoint / WHOLE, files)


def _size_and_digest(path: Path) -> list[int | str]:
    stream: Any
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        return [size, file_digest(stream, xxh3_128).hexdigest()]
