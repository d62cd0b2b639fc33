"""Kills runs at random moments and starts them again, until each is finished.

    python -m tests.finetune.kills --rounds 10 --seed 0
    python -m tests.finetune.kills --rounds 20 --hindered

Each round begins a run in a new folder, in a process of its own, and ends that process twice: at a
moment drawn from the time that a whole run takes, most of which is before its first step, and at
one drawn from the time behind its next checkpoint. That is by SIGKILL, or by SIGTERM in every third
round. Then it is left alone. The adapter and the loss of every step must be, bit for bit, those of
a run that nobody interrupted. Prints one line a round, and exits with 1 if a bit differs.

With ``--hindered`` a process is killed once, and the next is started on a disk that is full but for
a number of bytes that is drawn (where a file system may be mounted), with a folder that it may not
write to, or with a file of the newest checkpoint, or run.json, that it may not read. It has to end
with an error of Poros or the same bits; the newest whole checkpoint has to be there after it, and
no part of one; and the run then goes on to the same bits as if nothing had been.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poros.errors import PorosError
from poros.finetune.checkpoints import damage_of
from poros.finetune.run import Interrupted
from tests.finetune.subjects import SHORT, losses, recipe_of, run, write_model, write_rows

_TRAINING = 0.1
"""Of the time of a run, that behind its first checkpoint."""
_BROKEN, _REFUSED = 1, 3
_HINDRANCES = ("read-only", "unreadable", "full")
_NOBODY = 65534


class Round(NamedTuple):
    """What became of one run."""

    at_steps: list[int]
    """The newest whole checkpoint behind each kill, 0 for none."""
    is_equal: bool
    how: str = ""
    """With a hindrance: which, and how the process that met it ended."""


class Whole(NamedTuple):
    """A run that nobody interrupted."""

    seconds: float
    result: tuple[bytes, list[float]]


def start(options: dict[str, Any], out: Path, before: Callable[[], object] = lambda: None) -> int:
    """Train in a process of its own, which calls ``before`` first; its id."""
    child = os.fork()
    if child:
        return child
    code = _BROKEN
    try:
        before()
        run(recipe_of(**options, output__folder=out))
        code = 0
    except Interrupted as stopped:
        code = 128 + stopped.signal
    except PorosError as error:
        print(f"refused: {error}", file=sys.stderr)
        code = _REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_newer(out: Path, step: int, seconds: float) -> None:
    """Until there is a newer whole checkpoint, or several runs would have ended."""
    end = time.monotonic() + 5 * seconds
    while newest(out) <= step and time.monotonic() < end:
        time.sleep(0.005)


def newest(out: Path) -> int:
    return max(checkpoints(out), default=0)


def options_of(folder: Path, kind: str) -> dict[str, Any]:
    """A run of one kind, on files that are made for it."""
    form, more = ("preferences", {"training__method": "dpo"}) if kind == "dpo" else ("messages", {})
    return {
        **SHORT,
        "model__source": write_model(folder / "model"),
        "data__source": write_rows(folder / f"{form}.jsonl", form),
        "data__chat_template": "chatml",
        "training__packing": "false" if kind != "packed" else "true",
        "training__per_device_train_batch_size": 2,
        "training__gradient_accumulation_steps": 1,
        "training__max_steps": 6,
        "training__learning_rate": 1e-3,
        "memory__slots": 2,
        "training__save_steps": 2,
        **more,
    }


def rounds_of(folder: Path, number: int, seed: int, kind: str, hindered: bool) -> list[Round]:
    """Runs of one kind, each killed three times, or once and then hindered."""
    generator = random.Random(seed)
    options = options_of(folder, kind)
    run(recipe_of(**options, output__folder=folder / "first"))  # waits for the disk, and imports
    begin = time.monotonic()
    if end_of(start(options, folder / "whole")) != 0:
        raise RuntimeError("expected a run to end well when nobody interferes")
    whole = Whole(time.monotonic() - begin, result(folder / "whole"))
    disk = folder / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=16m", "poros-kills", str(disk)]
    can_fill = hindered and subprocess.run(mounting, check=False).returncode == 0
    hindrances = _HINDRANCES[: 2 + can_fill] if hindered else ()
    try:
        return [
            one_round(disk / f"run{each}", options, whole, each, generator, hindrances)
            for each in range(number)
        ]
    finally:
        if can_fill:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def one_round(
    out: Path,
    options: dict[str, Any],
    whole: Whole,
    number: int,
    generator: random.Random,
    hindrances: Sequence[str],
) -> Round:
    how = signal.SIGTERM if number % 3 == 2 else signal.SIGKILL
    at_steps, met = [], ""
    for is_later in (False,) if hindrances else (False, True):
        before = newest(out)
        child = start(options, out)
        if is_later:
            wait_for_newer(out, before, whole.seconds)
        time.sleep(generator.uniform(0, whole.seconds * (_TRAINING if is_later else 1)))
        os.kill(child, how)
        code = end_of(child)
        if code not in (0, -how, 128 + how):
            raise RuntimeError(f"expected a run that was killed, found it ended with {code}")
        if code == 0:
            break
        at_steps.append(newest(out))
    if hindrances and (code == 0 or not (out / "run.json").exists()):
        shutil.rmtree(out, ignore_errors=True)  # it was killed too early or too late
        return one_round(out, options, whole, number, generator, hindrances)
    if hindrances:
        met = meet(hindrances[number % len(hindrances)], options, out, generator)
    while not (out / "adapter").is_dir():
        if end_of(start(options, out)) != 0:
            raise RuntimeError("expected a run to go on from where it was killed")
    found = Round(at_steps, result(out) == whole.result, met)
    shutil.rmtree(out)
    return found


def meet(hindrance: str, options: dict[str, Any], out: Path, generator: random.Random) -> str:
    """Start a run that is hindered; how it ended."""
    before, parts = checkpoints(out), set(out.glob("*.part"))
    files = sorted(before[max(before)].iterdir()) if before else [out / "run.json"]
    filler = out.parent / "filler"

    def hinder() -> None:
        if hindrance != "full" and os.getuid() == 0:  # whom no permission stops
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)

    if hindrance == "full":
        detail = f"{fill(filler, generator.randrange(400_000))} bytes free"
    else:
        hidden = out if hindrance == "read-only" else generator.choice(files)
        detail = str(hidden.relative_to(out.parent))
        mode = hidden.stat().st_mode
        hidden.chmod(0o555 if hidden == out else 0)

    code = end_of(start(options, out, hinder))
    if hindrance == "full":
        filler.unlink()
    else:
        hidden.chmod(mode)
    if code not in (0, _REFUSED):
        raise RuntimeError(f"{hindrance}, {detail}: expected an error of Poros, found exit {code}")
    after = checkpoints(out)
    # A run that has trained on removes old ones as it writes new ones.
    if before and max(after, default=0) < max(before):
        raise RuntimeError(f"{hindrance}, {detail}: expected {before}, found {after}")
    more = set(out.glob("*.part")) - parts
    if more:
        raise RuntimeError(f"{hindrance}, {detail}: expected no part of a file, found {more}")
    return f"{hindrance} ({detail}): {'refused' if code else 'finished'}"


def fill(filler: Path, free: int) -> int:
    """Write a file until the disk is full, then make it shorter; how many bytes are free then."""
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - free))
    return shutil.disk_usage(filler.parent).free


def checkpoints(out: Path) -> dict[int, Path]:
    """By their steps, those that are whole."""
    found = {int(each.name.split("-")[1]): each for each in out.glob("checkpoint-*")}
    return {step: each for step, each in found.items() if damage_of(each) is None}


def result(out: Path) -> tuple[bytes, list[float]]:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes(), losses(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("packed", "padded", "dpo"), default="packed")
    parser.add_argument("--hindered", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # a process that forks must have no threads
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        found = rounds_of(Path(folder), chosen.rounds, chosen.seed, chosen.kind, chosen.hindered)
    for each in found:
        print(f"{chosen.kind}: whole checkpoints behind the kills: {each.at_steps}; "
              f"{each.how + '; ' if each.how else ''}"
              f"{'the same bits' if each.is_equal else 'OTHER BITS'}")  # fmt: skip
    print(f"{sum(each.is_equal for each in found)} of {len(found)}")
    return int(not all(each.is_equal for each in found))


if __name__ == "__main__":
    sys.exit(main())
