"""Kills runs at random moments and starts them again, until each is finished.

    python -m tests.finetune.kills --rounds 10 --seed 0

Each round begins a run in a new folder, in a process of its own, and ends that process three times
at a moment drawn from the time that a whole run takes: by SIGKILL, or by SIGTERM in every third
round. Then it is left alone. The adapter and the loss of every step must be, bit for bit, those of
a run that nobody interrupted. Prints one line a round, and exits with 1 if a bit differs.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poros.finetune.run import Interrupted
from tests.finetune.subjects import losses, recipe_of, rows, run, write_model, write_rows

_NUM_KILLS = 3
_BROKEN = 1


class Round(NamedTuple):
    """What became of one run."""

    at_steps: list[int]
    """The newest whole checkpoint behind each kill, 0 for none."""
    is_equal: bool


def start(options: dict[str, Any], out: Path) -> int:
    """Train in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    code = _BROKEN
    try:
        run(recipe_of(**options, output__folder=out))
        code = 0
    except Interrupted as stopped:
        code = 128 + stopped.signal
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest(out: Path) -> int:
    steps = [int(each.parent.name.split("-")[1]) for each in out.glob("checkpoint-*/whole.json")]
    return max(steps, default=0)


def rounds_of(folder: Path, number: int, seed: int, kind: str) -> list[Round]:
    """Runs of one kind, each killed three times."""
    generator = random.Random(seed)
    model = write_model(folder / "model")
    form, more = ("preferences", {"training__method": "dpo"}) if kind == "dpo" else ("messages", {})
    options = {
        "model__source": model,
        "data__source": write_rows(folder / f"{form}.jsonl", rows(form)),
        "data__chat_template": "chatml",
        "data__max_length": 64,
        "data__pad_to": 16,
        "data__packing": "false" if kind != "packed" else "true",
        "training__batch_size": 2,
        "training__accumulation": 2,
        "training__steps": 14,
        "training__learning_rate": 1e-3,
        "adapter__rank": 4,
        "adapter__dropout": 0.1,
        "memory__slots": 2,
        "output__save_every": 3,
        **more,
    }
    begin = time.monotonic()
    if end_of(start(options, folder / "whole")) != 0:
        raise RuntimeError("expected a run to end well when nobody interferes")
    longest = time.monotonic() - begin
    expected = result(folder / "whole")
    found = []
    for each in range(number):
        out = folder / f"run{each}"
        how = signal.SIGTERM if each % 3 == 2 else signal.SIGKILL
        at_steps = []
        for _ in range(_NUM_KILLS):
            child = start(options, out)
            time.sleep(generator.uniform(0, longest))
            os.kill(child, how)
            code = end_of(child)
            if code not in (0, -how, 128 + how):
                raise RuntimeError(f"expected a run that was killed, found it ended with {code}")
            if code == 0:
                break
            at_steps.append(newest(out))
        while not (out / "adapter").is_dir():
            if end_of(start(options, out)) != 0:
                raise RuntimeError("expected a run to go on from where it was killed")
        found.append(Round(at_steps, result(out) == expected))
    return found


def result(out: Path) -> tuple[bytes, list[float]]:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes(), losses(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("packed", "padded", "dpo"), default="packed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # a process that forks must have no threads
    with tempfile.TemporaryDirectory() as folder:
        found = rounds_of(Path(folder), chosen.rounds, chosen.seed, chosen.kind)
    for each in found:
        print(f"{chosen.kind}: whole checkpoints behind the kills: {each.at_steps}; "
              f"{'the same bits' if each.is_equal else 'OTHER BITS'}")  # fmt: skip
    print(f"{sum(each.is_equal for each in found)} of {len(found)}")
    return int(not all(each.is_equal for each in found))


if __name__ == "__main__":
    sys.exit(main())
