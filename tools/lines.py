"""Counts the lines of the project, and the files that one warm training step passes through.

    python -m tools.lines

Prints two tables in Markdown. The first has the lines of each top folder: code, docstrings (strings
that stand alone, those behind attributes included), comments that have a line of their own, and
blank lines. The second lists every file of the product of which a function runs in a warm step,
with all of the file's lines: what one has to read to follow a step. The step is the fourth of a
small random model on the CPU, prepared with the default settings: forward, backward and optimizer,
after the self-check and after the room is settled.
"""

import ast
import io
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("poros", "loaders", "gates", "examples")
"""Folders that are installed."""
OTHERS = ("tests", "tools", "benchmarks")
NUM_STEPS_BEFORE = 3


@dataclass(frozen=True)
class Lines:
    """Numbers of lines of one file, or of several together."""

    files: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0

    @property
    def total(self) -> int:
        return self.code + self.docstrings + self.comments + self.blank

    def __add__(self, other: "Lines") -> "Lines":
        return Lines(
            self.files + other.files,
            self.code + other.code,
            self.docstrings + other.docstrings,
            self.comments + other.comments,
            self.blank + other.blank,
        )


def lines_of(source: str) -> Lines:
    """Count the lines of one Python file.

    A line that holds code and a comment is code. A blank line within a docstring belongs to the
    docstring, and one within another string is code.

    Args:
        source: Text of the file.

    Raises:
        SyntaxError: If the text is no Python.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    empty = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held: set[int] = set()
    comments: set[int] = set()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in empty:
            held.update(range(token.start[0], token.end[0] + 1))
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    num_lines = len(source.splitlines())
    code, alone = held - docstrings, comments - held
    return Lines(
        1, len(code), len(docstrings), len(alone), num_lines - len(code | docstrings | alone)
    )


def count(folder: str) -> Lines:
    """The lines of all Python files below a top folder."""
    total = Lines()
    for path in sorted((ROOT / folder).rglob("*.py")):
        total += lines_of(path.read_text(encoding="utf-8"))
    return total


def files_run_by(call: Callable[[], Any]) -> list[Path]:
    """The files of the product that have a function, a method or a class body which ``call`` runs.

    Functions that a library has made from text, such as the methods of a dataclass, have no file.

    Args:
        call: Runs in this thread. Threads that it starts are seen too, others are not; on a CPU
            autograd runs a backward in the thread that asks for it.
    """
    found: set[str] = set()

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = tuple(ROOT / folder for folder in PRODUCT)
    return sorted(
        path
        for path in map(Path, found)
        if path.is_absolute() and any(path.is_relative_to(folder) for folder in inside)
    )


def warm_step() -> Callable[[], None]:
    """A training step of a small prepared model on the CPU, which has trained a few already."""
    import poros
    from poros.gates.tiny import make_model

    model: Any = make_model("qwen2", num_layers=4)
    poros.prepare(model)
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    tokens = torch.randint(0, 100, (1, 16), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(NUM_STEPS_BEFORE):
        step()
    return step


def table() -> Iterator[str]:
    """The lines of each top folder, in Markdown."""
    yield "| folder | files | code | docstrings | comments | blank | all lines |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    product = Lines()
    for name in (*PRODUCT, "product", *OTHERS):
        found = product if name == "product" else count(name)
        if name in PRODUCT:
            product += found
        label = "**product, together**" if name == "product" else f"{name}/"
        numbers = (
            *(found.files, found.code, found.docstrings),
            *(found.comments, found.blank, found.total),
        )
        yield f"| {label} | " + " | ".join(f"{each:,}" for each in numbers) + " |"


def closure(files: list[Path]) -> Iterator[str]:
    """The files of a step with their whole lines, in Markdown."""
    found = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    yield "| file | lines |"
    yield "| --- | --- |"
    for path, number in found.items():
        yield f"| {path.relative_to(ROOT)} | {number} |"
    yield f"| **{len(found)} files** | **{sum(found.values()):,}** |"


def main() -> None:
    """Print both tables."""
    print("\n".join(table()))
    step = warm_step()
    print("\nFiles that a warm step on the CPU passes through, default settings:\n")
    print("\n".join(closure(files_run_by(step))))


if __name__ == "__main__":
    main()
