"""Changes the product in one place at a time, and says which tests notice.

    python -m tools.mutants --seed 0 --number 200 --jobs 2 --out mutants.jsonl
    python -m tools.mutants --seed 0 --number 200 --core house

A mutant is one operator, comparison, constant, condition or statement changed in one file of a
core, drawn from all there are: ``step`` is what runs in a step (``STEP``), ``house`` what surrounds
it (``HOUSE``): kernels, head, loaders and planning. It runs in a copy of the checkout under one
group of test files after the other, until a test fails: the quick ones first, then those that
import the changed file. A mutant that passes all of them has survived, and has to be read: it
changes nothing, or nobody looks. The same seed draws the same mutants from the same source; a run
that was stopped goes on where ``--out`` ends.
One more mutant changes nothing at all: tests that fail for it say nothing of the others.
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
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from threading import Lock
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

STEP = tuple(
    f"poros/{folder}/{name}.py".replace("//", "/")
    for folder, names in {
        "": "cuda_streams eager_streams streams",
        "slots": "manager ring schedule",
        "stream": "adapters args attributes body boundary condition context frozen general "
        "layer_index marks namespaces offload rng settings visit within",
        "replay": "call captures casts forms graphs recording remat routing rows uses",
        "accumulation": "calls distributed draws foreign gradients group head host_values names "
        "in_place loop micro_batch modules observed parked trainer",
        "model": "measuring runtime sizing",
    }.items()
    for name in names.split()
)
HOUSE = ("poros/kernels", "poros/head", "loaders", "poros/planning")
"""Folders; their kernels for a GPU (``*_gpu.py``) aside, which no test on a CPU runs as a whole."""
CORES = ("step", "house")
QUICK = ("refused", "programs", "slots")
"""Test files that run first, by name, wherever they are."""
OTHERS = ("exact/test_*.py", "faults/test_*.py", "unit/test_*.py")
OF_HOUSE = ("loading/test_*.py", "planning/test_*.py")
"""Test files that run beside the others for the house."""
WITHOUT = ("benchmarks", "cli", "imports", "packaging", "registry")
"""Test files that see nothing of a step."""
FILES_PER_GROUP = 5
TIMEOUT_S = 300
"""For a group by default: what hangs has been noticed. A busy machine needs more."""

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
    """One change: the ``number``-th that can be made in ``file``."""

    file: str
    number: int
    line: int
    change: str


def no_change(core: str) -> Mutant:
    """The mutant that is its own file, only written out from the syntax tree."""
    return Mutant(files(core)[0], -1, 0, "nothing")


class _Mutator(ast.NodeVisitor):
    """Counts the changes that can be made, and makes the one that is wanted."""

    def __init__(self, wanted: int | None = None) -> None:
        self.found: list[tuple[int, str]] = []
        self._wanted = wanted

    def _may(self, node: ast.AST, change: str) -> bool:
        """Note a change; whether it is to be made."""
        self.found.append((getattr(node, "lineno", 0), change))
        return len(self.found) - 1 == self._wanted

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            other = _COMPARISONS[type(operator)]
            if self._may(node, f"{type(operator).__name__} to {other.__name__}"):
                node.ops[index] = other()
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _OPERATORS.get(type(node.op))
        if other is not None and self._may(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._may(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            if self._may(node, f"{node.value} to {not node.value}"):
                node.value = not node.value
        elif isinstance(node.value, int) and self._may(node, f"{node.value} to {node.value + 1}"):
            node.value += 1

    def visit_If(self, node: ast.If) -> None:
        if self._may(node, "condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if self._may(node, "condition negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # an annotation has no effect
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        node.returns, returns = None, node.returns
        self.generic_visit(node)
        node.returns = returns

    def generic_visit(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or isinstance(node, ast.Module | ast.ClassDef):
                continue
            for index, each in enumerate(block):
                is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                is_step = isinstance(each, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise)
                if is_step and not is_text and self._may(each, "statement left out"):
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
        for number, (line, change) in enumerate(mutator.found):
            yield Mutant(file, number, line, change)


def mutated(mutant: Mutant) -> str:
    """The text of its file."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    _Mutator(mutant.number).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def groups(without: Collection[str] = (), core: str = "step") -> list[list[str]]:
    """The test files that run together, in the order in which the groups run."""
    patterns = OTHERS if core == "step" else (*OTHERS, *OF_HOUSE)
    tests = ROOT / "tests"
    left_out = {path for name in (*WITHOUT, *without) for path in tests.rglob(f"test_{name}*.py")}
    first = sorted(path for name in QUICK for path in tests.rglob(f"test_{name}.py"))
    others = {path for pattern in patterns for path in tests.glob(pattern)} - {*first, *left_out}
    # Long files and short ones in each group.
    ranked = sorted(others, key=lambda path: (-path.stat().st_size, path))
    number = -(-len(ranked) // FILES_PER_GROUP)
    parts = [first, *(sorted(ranked[index::number]) for index in range(number))]
    return [[str(path.relative_to(ROOT)) for path in part] for part in parts]


def near(file: str, tests: list[list[str]]) -> list[list[str]]:
    """The groups, with test files that import ``file`` right behind the first one."""
    module = file.removesuffix(".py").replace("/", ".")
    first, *rest = tests
    found = [
        each
        for group in rest
        for each in group
        if f"from {module} import" in (ROOT / each).read_text()
    ]
    others = [[each for each in group if each not in found] for group in rest]
    return [group for group in (first, found, *others) if group]


def failing(copy: Path, mutant: Mutant, tests: list[str], timeout_s: float = TIMEOUT_S) -> str:
    """The first test that fails in this copy of the checkout; empty if none does."""
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
    paths = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        (copy / mutant.file).write_text(mutated(mutant))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    finally:
        shutil.copy(ROOT / mutant.file, copy / mutant.file)
    if not done.returncode:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == pytest.ExitCode.INTERRUPTED and not lines:
        raise KeyboardInterrupt  # of the tests: nothing has failed
    return lines[0][:200] if lines else f"exit code {done.returncode}"


class Campaign:
    """Which mutant has passed how many groups of tests, and what noticed it."""

    def __init__(
        self,
        drawn: list[Mutant],
        tests: list[list[str]],
        out: Path,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.by: dict[Mutant, str] = {}
        self.is_spoiled = False
        """Whether tests fail for the mutant that changes nothing."""
        self.passed = dict.fromkeys(drawn, 0)
        self._tests = {file: near(file, tests) for file in {mutant.file for mutant in drawn}}
        self._out, self._lock = out, Lock()
        self._timeout_s = timeout_s
        if out.exists():
            for line in out.read_text().splitlines():
                self._note(**json.loads(line))

    def work(self, copy: Path, waiting: "Queue[Mutant]", end: float) -> None:
        """Take mutants until none is left or the time is up."""
        while time.monotonic() < end and not self.is_spoiled:
            try:
                mutant = waiting.get_nowait()
            except Empty:
                return
            group = self._tests[mutant.file][self.passed[mutant]]
            by = failing(copy, mutant, group, self._timeout_s)
            with self._lock:
                self._note(by, **mutant._asdict())
                with self._out.open("a") as out:
                    out.write(json.dumps({**mutant._asdict(), "by": by}) + "\n")
            self.is_spoiled |= bool(by) and mutant.number < 0
            if by:
                print(*mutant, "|", by, flush=True)
            elif self.is_open(mutant):
                waiting.put(mutant)  # behind those that have passed less

    def is_open(self, mutant: Mutant) -> bool:
        return mutant not in self.by and self.passed[mutant] < len(self._tests[mutant.file])

    def _note(self, by: str, **fields: Any) -> None:
        mutant = Mutant(**fields)
        if by:
            self.by[mutant] = by
        elif mutant in self.passed:
            self.passed[mutant] += 1


def main() -> None:
    """Draw mutants, run them, and print those that survived.

    Raises:
        SystemExit: If tests fail for the mutant that changes nothing.
    """
    parser = argparse.ArgumentParser(
        prog="tools.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", choices=CORES, default="step")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="no group begins after them")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a group")
    parser.add_argument("--without", nargs="*", default=(), help="test files to leave out, by name")
    parser.add_argument(
        "--out", type=Path, help="a line of JSON for each group; named after the draw by default"
    )
    options = parser.parse_args()
    core, unchanged = options.core, no_change(options.core)
    out = options.out or Path(f"mutants_{core}_{options.seed}_{options.number}.jsonl")
    everything = list(mutants(core))
    drawn = [unchanged, *random.Random(options.seed).sample(everything, options.number)]
    campaign = Campaign(drawn, groups(options.without, core), out, options.timeout)
    waiting: Queue[Mutant] = Queue()
    for mutant in sorted(drawn, key=lambda mutant: campaign.passed[mutant]):
        if campaign.is_open(mutant):
            waiting.put(mutant)
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for ended in [pool.submit(campaign.work, copy, waiting, end) for copy in copies]:
            ended.result()
    if unchanged in campaign.by:
        raise SystemExit(f"expected tests that pass unchanged, found {campaign.by[unchanged]}")
    still_open = [mutant for mutant in drawn if campaign.is_open(mutant)]
    survived = [mutant for mutant in drawn[1:] if mutant not in {*campaign.by, *still_open}]
    for mutant in survived:
        print("SURVIVED", *mutant)
    print(
        f"of {options.number} among {len(everything)}, {len(campaign.by)} were noticed, "
        f"{len(survived)} survived, {len(still_open)} are not finished"
    )


if __name__ == "__main__":
    main()
