"""Fuzzes whole loads: random changes to small checkpoints and stores, each in its own process.

    python -m tests.loading.fuzz --minutes 60 --seed 7
    python -m tests.loading.fuzz --seed 7 --only 1234   # one program again, with a traceback

A program is a copy of a sound base with one to three changes (``tests.loading.mutations.KINDS``),
loaded and run forward, or planned. It depends on seed and number alone. It may end in an error of
Poros, or in a model; of those, every third is compared with that of ``from_pretrained``, bit for
bit. It fails if anything else is raised, if a message could disturb a terminal, if bytes differ, or
if the process dies or hangs, which the parent counts by signal. A forward pass that raises is
counted, but is no failure: a configuration may well ask for what its model cannot do.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.children import run_forked

HANG_S = 120.0
ADDRESS_SPACE_NUM_BYTES = 16 * 2**30

FAILED = ("untyped", "message", "differs", "signal", "hang")


@dataclass
class Found:
    """What came of the programs that were run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    num_programs: int = 0

    def add(self, record: dict[str, Any]) -> None:
        self.num_programs += 1
        self.outcomes[record["outcome"]] += 1
        if record["outcome"] in FAILED:
            self.failures.append(record)


def run(
    seed: int,
    *,
    num_programs: int | None = None,
    minutes: float | None = None,
    controls: dict[int, str] | None = None,
    hang_s: float = HANG_S,
    bases: Path | None = None,
) -> Found:
    """Run programs one after the other, each in a child.

    Args:
        seed: Of all of them.
        num_programs: How many at most.
        minutes: For how long at most.
        controls: By number of a program: "crash", "hang" or "raise", which the harness has to find.
        hang_s: For how long a program may run.
        bases: A folder of ``make_bases``; None makes one.
    """
    found, controls = Found(), controls or {}
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    with TemporaryDirectory(prefix="poros-fuzz-") as folder:
        place = bases or make_bases(Path(folder))
        for number in count() if num_programs is None else range(num_programs):
            if time.monotonic() > end:
                break
            found.add(_watched(place, seed, number, controls.get(number, ""), hang_s))
    return found


def _watched(folder: Path, seed: int, number: int, control: str, hang_s: float) -> dict[str, Any]:
    """One program in a child, whether it ends by itself or not."""
    record: dict[str, Any] = {"number": number}
    code = f"from tests.loading import fuzz; fuzz.run_here({str(folder)!r}, {seed}, {number}, "
    try:
        ran = run_forked(f"{code}{control!r})", timeout_s=hang_s)
    except subprocess.TimeoutExpired:
        return record | {"outcome": "hang"}
    if ran.returncode:
        outcome = "signal" if ran.returncode < 0 else "untyped"
        what = signal.Signals(-ran.returncode).name if ran.returncode < 0 else "exit"
        return record | {"outcome": outcome, "what": what, "stderr": ran.stderr[-2000:]}
    return record | json.loads((folder / "record.json").read_text())


def run_here(folder: str, seed: int, number: int, control: str) -> None:
    """What a child does: one program, or what the harness has to find."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_NUM_BYTES, ADDRESS_SPACE_NUM_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if control == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif control == "hang":
        time.sleep(10**6)
    record = {"outcome": "untyped", "what": "control"}
    if control != "raise":
        record = program(Path(folder), seed, number)
    (Path(folder) / "record.json").write_text(json.dumps(record))


def make_bases(folder: Path) -> Path:
    """The sound ones, below ``folder``."""
    from tests.loading.loaded import Kinds, standard

    kinds = Kinds(folder / "kinds")
    tiny_one = {"num_layers": 2, "hidden_size": 32, "tie_word_embeddings": False, "vocab_size": 64}
    dense = kinds.dense(**tiny_one)
    bases = {"dense": dense, "moe": kinds.dense("qwen3_moe", **tiny_one)}
    bases |= {"4bit": kinds.packed(source=dense), "store": kinds.store(dense)}
    bases["4bit single"] = kinds.packed(source=dense, bnb_4bit_use_double_quant=False)
    for name, path in bases.items():
        (folder / name).symlink_to(path)
    standard(dense, None).save_pretrained(folder / "sharded", max_shard_size="20KB")
    return folder


def program(folder: Path, seed: int, number: int, *, is_told: bool = False) -> dict[str, Any]:
    """Run one program; what came of it."""
    from tests.loading.mutations import KINDS

    rng = random.Random(f"{seed}:{number}")
    base = rng.choice(sorted(KINDS))
    place = folder / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / base, place)
    changes = [rng.choice(KINDS[base]) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    record = {"number": number, "base": base}
    for change in changes:
        try:
            change(place, rng)
        except Exception:  # two changes that do not go together
            return record | {"outcome": "not made"}
    try:
        return record | _loaded(place, base, rng)
    except Exception as error:
        if is_told:
            traceback.print_exc()
        trace = "".join(traceback.format_exception(error))
        return record | {"outcome": "untyped", "what": trace[-2000:]}


def _loaded(place: Path, base: str, rng: random.Random) -> dict[str, Any]:
    import poros
    from poros.errors import PorosError
    from poros.loaders.load import load

    is_planned = base == "dense" and rng.random() < 0.3
    try:
        if is_planned:
            poros.plan(place, seq_len=8, rank=2)
            return {"outcome": "planned"}
        model = load(place)
    except PorosError as error:
        text = str(error)
        is_fit = text.isascii() and len(text) < 5000 and text.replace("\n", "").isprintable()
        return {"outcome": "refused" if is_fit else "message", "what": text[:500]}
    compared = {"outcome": ""}
    # Before the forward pass, in which bitsandbytes may cast a bias in place.
    if base != "store" and rng.random() < 0.3:
        compared = _compared(model, place, base)
    if compared["outcome"] == "differs":
        return compared
    return {"outcome": _run_forward(model) + compared["outcome"]}


def _run_forward(model: Any) -> str:
    import torch

    from poros.gates import tiny

    try:
        with torch.no_grad():
            tiny.without_repacking(model)(input_ids=torch.arange(8)[None], use_cache=False)
    except Exception:
        return "forward raised"
    return "ran"


def _compared(model: Any, place: Path, base: str) -> dict[str, Any]:
    from tests.loading.loaded import differences, quantization, standard

    used = getattr(model.config, "quantization_config", None)
    if getattr(used, "llm_int8_enable_fp32_cpu_offload", False):
        return {"outcome": ", from_pretrained makes other weights on a CPU"}
    try:
        expected = standard(place, None if base.startswith("4bit") else quantization())
    except Exception:
        return {"outcome": ", from_pretrained raised"}
    differing = differences(model, expected)
    if differing:
        return {"outcome": "differs", "what": differing[:9]}
    return {"outcome": ", equal"}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="for how long")
    parser.add_argument("--programs", type=int, help="how many at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this one program here, and say why it failed")
    asked = parser.parse_args()
    if asked.only is not None:
        with TemporaryDirectory(prefix="poros-fuzz-") as folder:
            print(program(make_bases(Path(folder)), asked.seed, asked.only, is_told=True))
        return 0
    if asked.minutes is None and asked.programs is None:
        parser.error("say for how long (--minutes) or how many (--programs)")
    start = time.monotonic()
    found = run(asked.seed, num_programs=asked.programs, minutes=asked.minutes)
    print(f"seed {asked.seed}: {found.num_programs} programs, {time.monotonic() - start:.0f} s")
    for outcome, number in found.outcomes.most_common():
        print(f"{number:7} {outcome}")
    for failure in found.failures:
        print(json.dumps(failure))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
