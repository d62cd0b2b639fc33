"""Changes the core of the step in one place at a time, and says which tests notice.

    python -m tests.mutation_run --number 200 --seed 0 --jobs 2 --out mutants.jsonl

A mutant is one operator, comparison, constant, condition or statement changed in one file of
``CORE``, drawn from all there are. Each runs in a copy of the checkout: first a few quick test
files, then the others, until one fails. A mutant that all tests pass has survived, and has to be
read: it changes nothing, or nobody looks. The same seed draws the same mutants from the same
source.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]

CORE = tuple(
    f"poros/{folder}/{name}".replace("//", "/")
    for folder, names in {
        "": "streams",
        "slots": "manager ring schedule",
        "layer": "adapters args arrival attributes audit body call casts early frozen handover "
        "layer_index offload refused_calls remat retained rng settings side_outputs state staying "
        "streamed visit within",
    }.items()
    for name in names.split()
)
QUICK = ("refused", "programs", "arrival", "manager")
"""Test files that run first, by name, wherever they are."""
OTHERS = ("exact/test_*.py", "faults/test_*.py", "unit/test_*.py")
WITHOUT = ("benchmarks", "cli", "imports", "packaging", "registry", "registry_adapters")
"""Test files that see nothing of a step."""
TIMEOUT_S = 900

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


@dataclass(frozen=True)
class Mutant:
    """One change: the ``number``-th that can be made in ``file``."""

    file: str
    number: int
    line: int
    change: str


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


def mutants() -> Iterator[Mutant]:
    """All there are."""
    for name in CORE:
        mutator = _Mutator()
        mutator.visit(ast.parse((ROOT / f"{name}.py").read_text()))
        for number, (line, change) in enumerate(mutator.found):
            yield Mutant(f"{name}.py", number, line, change)


def mutated(mutant: Mutant) -> str:
    """The text of its file."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    _Mutator(mutant.number).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def judge(mutant: Mutant, copies: "Queue[Path]") -> dict[str, object]:
    """Run the tests on it; what noticed it, if anything did."""
    copy = copies.get()
    begin = time.monotonic()
    by = ""
    try:
        (copy / mutant.file).write_text(mutated(mutant))
        for tests in files():
            by = _failing(copy, tests)
            if by:
                break
    finally:
        shutil.copy(ROOT / mutant.file, copy / mutant.file)
        copies.put(copy)
    return {**asdict(mutant), "by": by, "seconds": round(time.monotonic() - begin)}


def files() -> tuple[list[str], list[str]]:
    """The test files that run first, and those that run then."""
    tests = ROOT / "tests"
    first = sorted(file for name in QUICK for file in tests.rglob(f"test_{name}.py"))
    left_out = {*first, *(file for name in WITHOUT for file in tests.rglob(f"test_{name}.py"))}
    others = sorted({file for pattern in OTHERS for file in tests.glob(pattern)} - left_out)
    return _relative(first), _relative(others)


def _relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def _failing(copy: Path, tests: list[str]) -> str:
    """The first test that fails; empty if none does."""
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    if not done.returncode:
        return ""
    lines = [each for each in done.stdout.splitlines() if each.startswith(("FAILED", "ERROR"))]
    return lines[0][:200] if lines else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts of the drawn ones")
    parser.add_argument("--out", type=Path, required=True, help="one line of JSON for each")
    options = parser.parse_args()
    everything = list(mutants())
    drawn = random.Random(options.seed).sample(everything, options.number)
    part, parts = map(int, options.part.split("/"))
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copy = Path(folder) / str(number)
            ignored = shutil.ignore_patterns(".*", "__pycache__")
            shutil.copytree(ROOT, copy, ignore=ignored)
            copies.put(copy)
        unchanged = copies.get()
        broken = _failing(unchanged, files()[0])
        copies.put(unchanged)
        if broken:
            raise SystemExit(f"expected tests that pass without a mutant, found {broken}")
        with ThreadPoolExecutor(options.jobs) as pool:
            for found in pool.map(partial(judge, copies=copies), drawn[part - 1 :: parts]):
                out.write(json.dumps(found) + "\n")
                out.flush()
                print(found["file"], found["line"], found["change"], "|", found["by"] or "SURVIVED")
    print(f"{len(everything)} mutants there are, {len(drawn[part - 1 :: parts])} were run")


if __name__ == "__main__":
    main()
