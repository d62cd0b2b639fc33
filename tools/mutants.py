"""Changes the product in one place at a time, and says which tests notice.

    REACHED=map python -m pytest -p tools.reached -n 2 -m "not gpu and not slow" tests
    python -m tools.mutants --reached map --seed 0 --number 200 --jobs 2 --out mutants.jsonl
    python -m tools.mutants --reached map --seed 0 --number 200 --core house

A mutant is one operator, comparison, constant, condition or statement changed in one file of a
core, drawn from all there are: ``step`` is what runs in a step (``STEP``), ``house`` what surrounds
it (``HOUSE``): kernels, head, loaders and planning. It runs in a copy of the checkout under the
tests that run the changed statement (``tools.reached``), the quickest first, until one fails. A
mutant that passes all of them has survived, and has to be read: it changes nothing, or nobody
looks. The same seed draws the same mutants from the same source; a run that was stopped goes on
where ``--out`` ends. Tests that failed as the map was written are left out; those that noticed a
mutant run once more, at the end, over files that are written out anew without a change.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from threading import Lock
from typing import Any, NamedTuple

import pytest

from tools.reached import Map

ROOT = Path(__file__).resolve().parents[1]

STEP = tuple(
    f"poros/{folder}/{name}.py".replace("//", "/")
    for folder, names in {
        "": "cuda_streams eager_streams streams",
        "slots": "manager ring schedule",
        "stream": "adapters args attributes body boundary condition context frozen general "
        "layer_index marks namespaces offload rng settings stack visit within",
        "replay": "call captures casts forms graphs pending recording remat routing rows segment "
        "segments uses",
        "accumulation": "calls distributed draws foreign gradients group head host_values names "
        "in_place loop micro_batch modules observed parked trainer",
        "model": "measuring passes runtime sizing",
    }.items()
    for name in names.split()
)
HOUSE = ("poros/kernels", "poros/head", "loaders", "poros/planning")
"""Folders; their kernels for a GPU (``*_gpu.py``) aside, which no test on a CPU runs as a whole."""
CORES = ("step", "house")
CHUNKS = (15, 60, 200)
"""How many tests run in one process: at first, behind those, and behind those and ever after."""
TIMEOUT_S = 300
"""For a chunk by default: what hangs has been noticed. A busy machine needs more."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutant(NamedTuple):
    """One change: the ``number``-th that can be made in ``file``.

    ``line`` and ``end``: the first and the last line of the statement it is in, of one that
    contains others those of its head. ``end`` is 0 for what runs as the file is imported.
    """

    file: str
    number: int
    line: int
    end: int
    change: str


class _Mutator(ast.NodeVisitor):
    """Counts the changes that can be made, and makes the one that is wanted."""

    def __init__(self, wanted: int | None = None) -> None:
        self.found: list[tuple[int, int, str]] = []
        self._wanted = wanted
        self._statement = (0, 0)
        self._is_in_function = False

    def _may(self, change: str) -> bool:
        """Note a change; whether it is to be made."""
        line, end = self._statement
        self.found.append((line, end if self._is_in_function else 0, change))
        return len(self.found) - 1 == self._wanted

    def visit(self, node: ast.AST) -> None:
        """Any node: statements are noted."""
        outer = self._statement
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            head = body[0].lineno - 1 if body else node.end_lineno
            self._statement = node.lineno, max(node.lineno, head or 0)
        super().visit(node)
        self._statement = outer

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            other = _COMPARISONS[type(operator)]
            if self._may(f"{type(operator).__name__} to {other.__name__}"):
                node.ops[index] = other()
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _OPERATORS.get(type(node.op))
        if other is not None and self._may(f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._may(f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            if self._may(f"{node.value} to {not node.value}"):
                node.value = not node.value
        elif isinstance(node.value, int) and self._may(f"{node.value} to {node.value + 1}"):
            node.value += 1

    def visit_If(self, node: ast.If) -> None:
        if self._may("condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if self._may("condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # an annotation has no effect
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        node.returns, returns = None, node.returns
        outer, self._is_in_function = self._is_in_function, True
        self.generic_visit(node)
        node.returns, self._is_in_function = returns, outer

    def visit_arguments(self, node: ast.arguments) -> None:
        outer, self._is_in_function = self._is_in_function, False  # defaults
        self.generic_visit(node)
        self._is_in_function = outer

    def generic_visit(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or isinstance(node, ast.Module | ast.ClassDef):
                continue
            for index, each in enumerate(block):
                is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                is_step = isinstance(each, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise)
                if not is_step or is_text:
                    continue
                self._statement, outer = (each.lineno, each.end_lineno or 0), self._statement
                is_wanted, self._statement = self._may("statement left out"), outer
                if is_wanted:
                    block[index] = ast.copy_location(ast.Pass(), each)
        super().generic_visit(node)


def files(core: str) -> tuple[str, ...]:
    """The files of a core, relative to the root."""
    if core == "step":
        return STEP
    found = (path for folder in HOUSE for path in sorted((ROOT / folder).glob("*.py")))
    return tuple(str(path.relative_to(ROOT)) for path in found if "_gpu" not in path.name)


def mutants(core: str = "step") -> Iterator[Mutant]:
    """All there are."""
    for file in files(core):
        mutator = _Mutator()
        mutator.visit(ast.parse((ROOT / file).read_text()))
        for number, (line, end, change) in enumerate(mutator.found):
            yield Mutant(file, number, line, end, change)


def mutated(mutant: Mutant) -> str:
    """The text of its file."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    _Mutator(mutant.number).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def chunks(tests: list[str]) -> list[list[str]]:
    """The tests that run together, in the order in which they run; those of a file side by side."""
    sizes, parts = list(CHUNKS), []
    while tests:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(sorted(tests[:size], key=lambda name: name.split("::")[0]))
        tests = tests[size:]
    return parts


def failing(copy: Path, tests: list[str], timeout_s: float, *options: str) -> list[str]:
    """What fails of these tests in this copy of the checkout, as pytest's summary names it."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return ["a test that hangs"]
    if not done.returncode:
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == pytest.ExitCode.INTERRUPTED and not lines:
        raise KeyboardInterrupt  # of the tests: nothing has failed
    return lines or [f"exit code {done.returncode}"]


class Campaign:
    """Which mutant has passed how many chunks of tests, and what noticed it."""

    def __init__(
        self, drawn: list[Mutant], reached: Map, out: Path, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.by: dict[Mutant, str] = {}
        self._passed = dict.fromkeys(drawn, 0)
        self._chunks = {
            mutant: chunks(reached.tests(mutant.file, mutant.line, mutant.end)) for mutant in drawn
        }
        self._out, self._lock, self._timeout_s = out, Lock(), timeout_s
        if out.exists():
            for line in out.read_text().splitlines():
                self._note(**json.loads(line))

    def work(self, copy: Path, waiting: "Queue[Mutant]", end: float) -> None:
        """Take mutants until none is left or the time is up."""
        while time.monotonic() < end:
            try:
                mutant = waiting.get_nowait()
            except Empty:
                return
            tests = self._chunks[mutant][self._passed[mutant]]
            try:
                (copy / mutant.file).write_text(mutated(mutant))
                by = "".join(failing(copy, tests, self._timeout_s, "-x")[:1])
            finally:
                shutil.copy(ROOT / mutant.file, copy / mutant.file)
            with self._lock:
                self._note(by, **mutant._asdict())
                with self._out.open("a") as out:
                    out.write(json.dumps({**mutant._asdict(), "by": by}) + "\n")
            if by:
                print(*mutant, "|", by[:200], flush=True)
            elif self.is_open(mutant):
                waiting.put(mutant)  # behind those that have passed less

    def is_open(self, mutant: Mutant) -> bool:
        """Whether tests are left for it, and none has failed."""
        return mutant not in self.by and self._passed[mutant] < len(self._chunks[mutant])

    def waiting(self) -> "Queue[Mutant]":
        """The mutants with tests left, those that have passed least first."""
        queue: Queue[Mutant] = Queue()
        for mutant in sorted(self._passed, key=lambda mutant: self._passed[mutant]):
            if self.is_open(mutant):
                queue.put(mutant)
        return queue

    def unreached(self) -> list[Mutant]:
        """Those whose statement no test runs."""
        return [mutant for mutant, parts in self._chunks.items() if not parts]

    def survived(self) -> list[Mutant]:
        """Those that passed all tests that run their statement."""
        return [
            mutant
            for mutant, parts in self._chunks.items()
            if parts and mutant not in self.by and not self.is_open(mutant)
        ]

    def require_passing_unchanged(self, copy: Path, core: str) -> None:
        """Raise unless what noticed mutants passes over files that are only written out anew."""
        for file in files(core):
            (copy / file).write_text(mutated(Mutant(file, -1, 0, 0, "nothing")))
        named = {by.split(" ", 1)[1].split(" - ")[0] for by in self.by.values() if "::" in by}
        failed = failing(copy, sorted(named), 60 * len(named)) if named else []
        if failed:
            raise SystemExit("expected tests that pass unchanged, found\n" + "\n".join(failed))

    def _note(self, by: str, **fields: Any) -> None:
        mutant = Mutant(**fields)
        if by:
            self.by[mutant] = by
        elif mutant in self._passed:
            self._passed[mutant] += 1


def main() -> None:
    """Draw mutants, run them, and print those that survived.

    Raises:
        SystemExit: If tests that noticed a mutant fail without one.
    """
    parser = argparse.ArgumentParser(
        prog="tools.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--reached", type=Path, required=True, help="folder of tools.reached")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", choices=CORES, default="step")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="no chunk begins after them")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a chunk")
    parser.add_argument(
        "--out", type=Path, help="a line of JSON for each chunk; named after the draw by default"
    )
    options = parser.parse_args()
    core = options.core
    out = options.out or Path(f"mutants_{core}_{options.seed}_{options.number}.jsonl")
    everything = list(mutants(core))
    drawn = random.Random(options.seed).sample(everything, options.number)
    campaign = Campaign(drawn, Map(options.reached), out, options.timeout)
    waiting, end = campaign.waiting(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for ended in [pool.submit(campaign.work, copy, waiting, end) for copy in copies]:
            ended.result()
        campaign.require_passing_unchanged(copies[0], core)
    unreached, survived = campaign.unreached(), campaign.survived()
    for word, those in (("UNREACHED", unreached), ("SURVIVED", survived)):
        for mutant in those:
            print(word, *mutant)
    still_open = options.number - len(campaign.by) - len(unreached) - len(survived)
    print(
        f"of {options.number} among {len(everything)}, {len(campaign.by)} were noticed, "
        f"{len(survived)} survived, {len(unreached)} are run by no test of one process, "
        f"{still_open} are not finished"
    )


if __name__ == "__main__":
    main()
