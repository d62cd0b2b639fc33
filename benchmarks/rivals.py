"""Whole runs of `poros finetune` beside other trainers, over one checkpoint and one file of rows.

    python -m benchmarks rivals qwen2.5-7b --length 512 --out rivals.jsonl
    python -m benchmarks rivals qwen2.5-7b --arms poros:4GiB trl:checkpointed --length 2048
    python -m benchmarks rivals qwen2.5-7b --whole-rows --sites unsloth=FOLDER soup=FOLDER \
        --arms trl:resident unsloth:offload-27 unsloth:auto@6GiB soup

A checkpoint of random weights at true shapes, a tokenizer of 8,000 tokens and rows of the text that
Python comes with are written into ``--folder``, once. Each arm is a process of its own and trains
LoRA of rank 16 on all linear layers, in bf16 autocast, on rows packed to ``--length`` tokens, one a
micro-batch, with fused AdamW:

* ``poros:SIZE``: the command `poros finetune --vram SIZE`;
* ``trl:resident`` and ``trl:checkpointed``: TRL's ``SFTTrainer`` over a 4-bit base of transformers;
* ``unsloth:resident``, ``unsloth:checkpointed`` (with its own checkpointing), ``unsloth:offload-N``
  (``offload_layers=N``) and ``unsloth:auto``: the same trainer over Unsloth's model;
* ``soup:accumulated`` (or ``soup``): the command `soup train` with ``stream_layers``. It packs no
  rows there, and needs ``--whole-rows``. ``soup:batched`` takes the rows of a step as one batch, as
  its manual advises, with the loss in chunks.

``+no-liger`` behind an arm leaves Liger's kernels out. ``@SIZE`` behind it has another process
hold the memory of the GPU but for SIZE, for arms that go by what is free. Trainers want different
versions of libraries: ``--sites NAME=FOLDER`` puts a folder before others on the path of the arms
of that name (``pip install --target FOLDER``).

With ``--whole-rows`` no arm packs: each row is longer than ``--length`` (one in a hundred may not
be) and is cut to it, and there are as many rows as a run trains. What HF's trainer shuffles with
one seed then comes in one order, so that losses of arms with the same ``--steps`` can be compared.

Times are between the logs of two steps, the median of the last half; tokens are those of whole
rows, padding included (packing leaves little). Peaks are those that the allocator saw from the
start, loading and first steps included. Bytes of the host are those of the process after the last
step, without mapped files. Packed rows are packed by each in its own way, and TRL's adapters over
4 bits are bfloat16, so losses are near each other, not equal.

``--work 512x8:6 2048x1:9`` has each arm train rows of 512 tokens, 8 a step, for 6 steps, then rows
of 2,048, one a step, for 9. TRL and Unsloth load once for all of it and begin each with the first
values of the adapter; their peaks from the second on leave loading out. Poros and Soup are
commands, and begin anew.

``--lease NAME`` keeps apart what was measured on different machines; ``rival_table`` draws the
table of a page from the lines of ``--out``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rival_arms import COMMANDS, Work, parse_arm, parse_work, run_arm
from benchmarks.rival_inputs import write_inputs
from benchmarks.rival_table import summary, table

ARMS = ("poros:4GiB", "poros:24GiB", "trl:resident", "trl:checkpointed")
TIMEOUT_S = 500
LAST_LINES = 15
"""Of what a process said that failed."""
Result = dict[str, Any]
UNSLOTH_FIRST = """
import importlib.util, runpy
if importlib.util.find_spec("unsloth"):
    import unsloth
runpy.run_module("benchmarks.rivals", run_name="__main__", alter_sys=True)
"""
"""A program that is this module, after Unsloth, which changes transformers, TRL and PEFT as it is
imported, and says that it is to be imported before them."""
HOLD = """
import sys, torch
torch.zeros(1, device="cuda")
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(free - int(sys.argv[1]), 1), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
"""A program that holds the memory of the GPU but for its argument until its input ends."""


@contextmanager
def leaving(room: int | None) -> Iterator[None]:
    """While inside, no more than ``room`` bytes of the GPU are free for other processes."""
    if room is None:
        yield
        return
    command = [sys.executable, "-c", HOLD, str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        if holder.stdout is None or holder.stdout.readline() != b"held\n":
            raise SystemExit("the memory of the GPU could not be held by another process")
        yield
        holder.communicate()


def environment(sites: Sequence[str], name: str) -> dict[str, str]:
    """Variables of an arm's process: its own folders come first on the path, then this checkout."""
    given = dict(os.environ)
    own = [folder for each, _, folder in (site.partition("=") for site in sites) if each == name]
    here = str(Path(__file__).resolve().parents[1])
    path = [*(str(Path(each).resolve()) for each in own), here]
    path += filter(None, given.get("PYTHONPATH", "").split(os.pathsep))
    return {**given, "PYTHONPATH": os.pathsep.join(path)}


def measure(options: argparse.Namespace, arm: str, works: Sequence[Work]) -> list[Result]:
    """Run one arm in a process of its own; what it measured of each work, as far as it came."""
    result = options.folder / "result.json"
    result.unlink(missing_ok=True)
    way = parse_arm(arm)
    program = ["-c", UNSLOTH_FIRST] if way.name == "unsloth" else ["-m", "benchmarks.rivals"]
    command = [sys.executable, *program, options.model, "--arm", arm]
    command += ["--folder", str(options.folder), "--work", *map(str, works)]
    command += ["--whole-rows"] if options.whole_rows else []
    said = options.folder / "said.txt"  # no pipe: a process that is left over would hold it
    note = ""
    with leaving(way.room), said.open("w", encoding="utf-8") as file:
        began = time.time()
        try:
            subprocess.run(
                [*command, "--result", str(result)],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=options.timeout,
                check=False,
                cwd=options.folder,  # Unsloth and Soup write where they are run
                env=environment(options.sites, way.name),
            )
        except subprocess.TimeoutExpired:
            note = f"not ready after {options.timeout} s"
    wall_s = round(time.time() - began, 1)
    done = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
    rows = []
    for index, work in enumerate(works):
        row: Result = {"arm": arm, "length": work.length, "accumulation": work.accumulation}
        row |= {"lease": options.lease} if options.lease else {}
        row |= {"model": options.model}
        row |= {"layers": options.layers} if options.layers else {}
        if index < len(done):
            row |= done[index] | ({} if index else {"began": began, "wall_s": wall_s})
        else:
            row |= {"note": note or " ".join(lines[-3:])[-300:], "last": lines[-LAST_LINES:]}
        rows.append(row)
    return rows


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    known = argparse.ArgumentParser(prog="benchmarks.rivals", description=__doc__)
    known.add_argument("model", help="one of benchmarks.models.SHAPES")
    known.add_argument("--layers", type=int, help="fewer than the model has")
    known.add_argument("--folder", type=Path, default=Path("rivals"))
    known.add_argument("--length", type=int, default=512)
    known.add_argument("--steps", type=int, default=24)
    known.add_argument("--accumulation", type=int, default=8)
    known.add_argument("--work", nargs="+", type=parse_work, metavar="LENGTHxROWS:STEPS")
    known.add_argument("--arms", nargs="+", default=list(ARMS))
    known.add_argument("--whole-rows", action="store_true", help="cut rows, instead of packing")
    known.add_argument("--sites", nargs="+", default=[], metavar="NAME=FOLDER")
    known.add_argument("--timeout", type=int, default=TIMEOUT_S, help="seconds an arm may take")
    known.add_argument("--json", action="store_true", help="print a line of JSON an arm instead")
    known.add_argument("--out", type=Path, help="raw data: a line an arm, appended")
    known.add_argument("--lease", help="name of this use of a machine, kept in the raw data")
    known.add_argument("--arm", help=argparse.SUPPRESS)
    known.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser().parse_args(arguments)
    works = options.work or [Work(options.length, options.accumulation, options.steps)]
    if options.arm is not None:
        run_arm(options, options.arm, works)
        return
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    for work in works:
        most = max(each.num_tokens for each in works if each.length == work.length)
        whole = work.length if options.whole_rows else None
        write_inputs(options.folder, options.model, options.layers, most, whole)
    rows: list[Result] = []
    for arm in options.arms:
        is_command = parse_arm(arm).name in COMMANDS
        for part in [[work] for work in works] if is_command else [works]:
            new = measure(options, arm, part)
            rows += new
            for row in new:
                line = json.dumps(summary(row)) if options.json else table([row]).splitlines()[-1]
                print(line, flush=True)
                for said in row.get("last", []):
                    print(f"    {said}", file=sys.stderr, flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    main()
