"""Kills a process that writes, reads or saves at a random moment, and looks at what the next finds.

    python -m tests.loading.kills --rounds 60 --seed 0

Each round forks a process that loads a small checkpoint into a store, opens one and trains from it,
or saves a model out of it, and ends it with SIGKILL at a moment drawn from the time that the whole
takes; a writer has begun its store by then, and no part of one opens. Then the next process starts:
it must find the bytes of ``from_pretrained``, a store that verifies, an untouched checkpoint, and
leave no folder but the store. With ``--cuts``, files are cut off instead while they are read: the
process must end by itself, with a typed error or with the right bytes.

Prints one line a kind and exits with 1 if anything was wrong.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from poros.errors import CheckpointFormatError, PorosError
from poros.gates import tiny
from poros.loaders.load import load
from poros.loaders.store import open_store
from tests.loading.loaded import budget_for, described, quantization, standard
from tests.support import prepare_plain

KILLED, DONE, REFUSED, BROKEN = -signal.SIGKILL, 0, 3, 1


@dataclass
class Count:
    """What became of the rounds of one kind."""

    rounds: int = 0
    in_the_middle: int = 0
    """Killed before it had come to its end, or cut off before it had read everything."""
    parts: int = 0
    """Of stores, that were left."""
    wrong: list[str] = field(default_factory=list)
    """What should not be, one line each."""


class Bench:
    """A checkpoint, a store of it, and what they have to be.

    Args:
        folder: Empty; everything lies in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.sound = folder / "source", folder / "sound"
        config = tiny.small_config("qwen2", num_layers=4, hidden_size=64)
        tiny.write_checkpoint(config, self.source, dtype=torch.bfloat16)
        self.expected = comparable(standard(self.source, quantization()))
        load(self.source, store=self.sound)
        self.contents = contents(self.source)
        self.budget = budget_for(self.sound, 2)
        self.batch = tiny.make_batches(1)[0]

    def write(self, store: Path) -> None:
        """Quantize the checkpoint into a store, and open it."""
        self.require_right(load(self.source, store=store))

    def read(self, store: Path) -> None:
        """Open a store, half of it on the disk, and train a step."""
        model = load(store, host_budget=self.budget)
        model = prepare_plain(tiny.attach_lora(model), device="cpu")
        model.train()
        model(**self.batch).loss.backward()

    def read_checkpoint(self, source: Path) -> None:
        """Load without a store."""
        self.require_right(load(source))

    def save(self, store: Path) -> None:
        """Save a model that lies in a store, and load what was saved."""
        load(store, host_budget=self.budget).save_pretrained(store.parent / "saved")
        self.require_right(load(store.parent / "saved"))

    def require_right(self, model: Any) -> None:
        found = comparable(model)
        differing = sorted(key for key in self.expected if found.get(key) != self.expected[key])
        if differing:
            raise RuntimeError(f"other bytes than from_pretrained: {differing[:3]}")

    def look_at_parts(self, place: Path, count: Count) -> None:
        """What a writer has left that was killed in the middle."""
        parts = [name for name in os.listdir(place) if name.startswith(".")]
        count.parts += len(parts)
        for name in parts:
            with suppress(CheckpointFormatError):
                open_store(place / name).close()
                count.wrong.append(f"a part of a store opens: {name}")

    def look(self, place: Path, count: Count) -> None:
        """Start again where a process was killed."""
        store = place / "store"
        try:
            self.require_right(load(self.source, store=store))
            open_store(store, verify=True).close()
        except Exception as error:
            count.wrong.append(f"{type(error).__name__}: {error}")
        left = sorted(set(os.listdir(place)) - {"store", "saved"})
        if left:
            count.wrong.append(f"left over: {left}")
        there = sorted(os.listdir(store))
        if there != sorted(os.listdir(self.sound)):
            count.wrong.append(f"in the store: {there}")
        if contents(self.source) != self.contents:
            count.wrong.append("the checkpoint was written to")


def comparable(model: Any) -> dict[str, Any]:
    """Tensors by name, their bytes as SHA-256."""
    found = described(model).items()
    return {key: value for key, value in found if "." in key and " " not in key}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def start(action: Callable[[], object]) -> int:
    """Run it in a process of its own; the process' id."""
    child = os.fork()
    if child:
        return child
    code = BROKEN
    try:
        action()
        code = DONE
    except PorosError:
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    """Its exit code, or the number of the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rounds_of(
    bench: Bench, kind: str, rounds: int, generator: random.Random, *, is_cut: bool = False
) -> Count:
    """Rounds of one kind, a method of the bench: the process is killed, or its file is cut off."""
    count, longest = Count(), 0.0
    origin, name = bench.sound, "slabs.safetensors"
    if kind == "read_checkpoint":
        origin, name = bench.source, "model.safetensors"
    for number in range(-1, rounds):
        place = bench.folder / f"{kind}{number}"
        place.mkdir()
        if kind != "write":
            shutil.copytree(origin, place / "store")
        begin = time.perf_counter()
        child = start(lambda place=place: getattr(bench, kind)(place / "store"))
        if number < 0:  # nobody interferes
            if end_of(child) != DONE:
                raise RuntimeError("expected it to work when nobody interferes")
            longest = time.perf_counter() - begin
            shutil.rmtree(place)
            continue
        wait = generator.uniform(0, longest)
        if kind == "write":  # once there is a part of a store; the first time at once
            while not os.listdir(place) and time.perf_counter() - begin < 60:
                time.sleep(0.001)
            wait *= number > 0
        time.sleep(wait)
        count.rounds += 1
        if is_cut:
            file = place / "store" / name
            os.truncate(file, generator.randrange(file.stat().st_size))
            ended = end_of(child)
            count.in_the_middle += ended == REFUSED
            if ended not in (DONE, REFUSED):
                count.wrong.append(f"ended with {ended}")
        else:
            os.kill(child, signal.SIGKILL)
            ended = end_of(child)
            count.in_the_middle += ended == KILLED
            if ended not in (KILLED, DONE):
                count.wrong.append(f"ended by itself with {ended}")
            bench.look_at_parts(place, count)
            bench.look(place, count)
        shutil.rmtree(place)
    return count


def run(rounds: int, cuts: int, seed: int) -> dict[str, Count]:
    """So many kills of writers, a quarter as many of the others, and ``cuts`` cuts in all."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a process that forks must have no threads
    generator = random.Random(seed)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for kind, share in (("write", rounds), ("read", rounds // 4), ("save", rounds // 4)):
            if rounds:
                found[f"killed: {kind}"] = rounds_of(bench, kind, share, generator)
        for kind in ("read_checkpoint", "read", "save") if cuts else ():
            count = rounds_of(bench, kind, cuts // 3, generator, is_cut=True)
            found[f"cut off: {kind}"] = count
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    found = run(**vars(parser.parse_args()))
    for kind, count in found.items():
        many = f"{count.rounds} rounds, {count.in_the_middle} in the middle"
        print(f"{kind}: {many}, {len(count.wrong)} wrong", *count.wrong, sep="\n    ")
    return int(any(count.wrong for count in found.values()))


if __name__ == "__main__":
    sys.exit(main())
