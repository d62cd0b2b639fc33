"""Every point where two streams are ordered, found in the source, and how to take each one away.

A mutation is made on the syntax tree and compiled; the running function then gets the mutated code,
so that whole models train with it. Nothing is listed by hand: a wait that is added to the source is
mutated from then on, and has to be missed by some scenario.
"""

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import poros

PACKAGE = Path(poros.__file__).parent

MANAGED = ("poros.slots.ring", "poros.slots.manager")
"""Whose calls of a ``StreamContext`` are mutated."""

STREAM_METHODS = ("wait_event", "wait_stream", "record_stream", "record")
"""What orders CUDA streams; mutated in ``poros.cuda_streams``."""


@dataclass(frozen=True)
class Mutation:
    module: str
    function: str
    """Qualified name inside the module, such as ``BlockManager.acquire``."""
    change: str
    source: ast.Module

    def __str__(self) -> str:
        return f"{self.module.removeprefix('poros.')}.{self.function}: {self.change}"

    @cached_property
    def code(self) -> CodeType:
        whole = compile(self.source, f"<{self}>", "exec")
        return next(each for each in _codes(whole) if each.co_qualname == self.function)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the running function the mutated code."""
        found: Any = importlib.import_module(self.module)
        for part in self.function.split("."):
            found = inspect.getattr_static(found, part)
        function = inspect.unwrap(getattr(found, "__func__", found))
        assert function.__code__.co_code != self.code.co_code
        monkeypatch.setattr(function, "__code__", self.code)


def stream_context_mutations(modules: Sequence[str] = MANAGED) -> list[Mutation]:
    """Of ``wait``, ``record`` and ``after=`` wherever a ``StreamContext`` is used."""
    return [each for module in modules for each in _mutations(module, _context_changes)]


def cuda_mutations() -> list[Mutation]:
    """Of every call in ``poros.cuda_streams`` that orders CUDA streams."""
    return _mutations("poros.cuda_streams", _cuda_changes)


def modules_that_order_streams() -> set[str]:
    """Modules of the package with a call that ``stream_context_mutations`` would mutate."""
    files = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = {".".join(("poros", *file.parts)) for file in files} - {"poros.cuda_streams"}
    return {name for name in names if _mutations(name, _context_changes)}


Parents = dict[ast.AST, ast.AST]
Change = tuple[str, Callable[[ast.AST, Parents], None]]
"""What to do, in words, and a function that does it to a node of a tree of its own."""


def _context_changes(node: ast.AST, parents: Parents) -> Sequence[Change]:
    if isinstance(node, ast.keyword) and node.arg == "after":
        return [(f"after={ast.unparse(node.value)} replaced by after=None", _after_nothing)]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    owner = ast.unparse(node.func.value).split(".")[-1]
    if owner.strip("_") != "streams":
        return []
    text = ast.unparse(node)
    if node.func.attr == "wait":
        return [(f"{text} removed", _evaluate_only)]
    if node.func.attr == "record":
        changes: list[Change] = [(f"{text} replaced by None", _record_nothing)]
        if isinstance(parents[node], ast.Assign):
            changes.append((f"{text} replaced by an older event", _record_earlier))
        return changes
    return []


def _cuda_changes(node: ast.AST, parents: Parents) -> Sequence[Change]:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in STREAM_METHODS
    ):
        return [(f"{ast.unparse(node)} removed", _evaluate_only)]
    return []


def _evaluate_only(node: ast.AST, parents: Parents) -> None:
    """``x.wait(y)`` becomes ``(x, y)``: evaluating these may have effects, which are kept."""
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    _replace(node, ast.Tuple([node.func.value, *node.args], ast.Load()), parents)


def _after_nothing(node: ast.AST, parents: Parents) -> None:
    assert isinstance(node, ast.keyword)
    node.value = ast.Constant(None)


def _record_nothing(node: ast.AST, parents: Parents) -> None:
    _replace(node, ast.Constant(None), parents)


def _record_earlier(node: ast.AST, parents: Parents) -> None:
    """What is kept keeps the event it has; a variable gets one from where the function begins."""
    statement = parents[node]
    assert isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0]
    if isinstance(target, ast.Attribute | ast.Subscript):
        older = copy.deepcopy(target)
        older.ctx = ast.Load()
        _replace(node, older, parents)
        return
    function = parents[statement]
    assert isinstance(function, ast.FunctionDef)
    function.body.remove(statement)
    function.body.insert(0, statement)


def _mutations(
    module: str, changes: Callable[[ast.AST, Parents], Sequence[Change]]
) -> list[Mutation]:
    file = module.removeprefix("poros.").replace(".", "/")
    tree = ast.parse((PACKAGE / f"{file}.py").read_text())
    parents_of_tree = _parents(tree)
    found = []
    for position, node in enumerate(ast.walk(tree)):
        for index, (change, _) in enumerate(changes(node, parents_of_tree)):
            mutated = copy.deepcopy(tree)
            parents = _parents(mutated)
            twin = list(ast.walk(mutated))[position]
            function = ".".join(_path(twin, parents))
            _, make = changes(twin, parents)[index]
            make(twin, parents)
            found.append(Mutation(module, function, change, ast.fix_missing_locations(mutated)))
    return found


def _parents(tree: ast.Module) -> Parents:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _path(node: ast.AST, parents: Parents) -> list[str]:
    """The class, if any, and the outermost function around ``node``."""
    path: list[str] = []
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef):
            path = [node.name]
        elif isinstance(node, ast.ClassDef):
            path.insert(0, node.name)
    return path


def _replace(node: ast.AST, new: ast.AST, parents: Parents) -> None:
    parent = parents[node]
    for name, value in ast.iter_fields(parent):
        if value is node:
            setattr(parent, name, new)
        elif isinstance(value, list) and node in value:
            value[value.index(node)] = new


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
