"""Imports point one way, and files stay small.

The rules are checked on the syntax tree, so nothing is imported. An import counts as module level
when it runs as the module is imported: inside `if`, `try`, `with` or a class body too, but not
inside a function or under `TYPE_CHECKING`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600

# A package, or a file beside the packages, may import its own layer and those before it. Files of
# one package may import each other; circles are refused apart.
LAYERS = [
    {"config", "errors"},
    {"io", "utils"},
    {"streams", "eager_streams", "cuda_streams"},
    {"host"},
    {"slots"},
    {"kernels", "optim"},
    {"stream", "head"},
    {"replay"},
    {"model"},
    {"accumulation"},
    {"loaders"},
    {"planning", "self_check"},
    {"api"},
    {"merging"},
    {"reporting"},
    {"recipes"},
    {"finetune"},
    {"cli"},
    {"gates"},
    {"examples"},
]
# What stands above all may be imported inside functions: the registry of what is exact, the gate's
# commands, the demo.
LAZY = {"gates", "examples"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TYPE_ONLY = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


class Import(NamedTuple):
    """One name that a module imports, as full as it can be: `from a.b import c` gives a.b.c."""

    line: int
    name: str
    is_relative: bool
    is_inside: bool
    """In a function: not as the module is imported."""
    is_typed: bool
    """For type checkers alone."""


def imports_of(node: ast.AST, is_inside: bool = False, is_typed: bool = False) -> Iterator[Import]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            base = f"{each.module or ''}." if isinstance(each, ast.ImportFrom) else ""
            is_relative = isinstance(each, ast.ImportFrom) and each.level > 0
            for alias in each.names:
                yield Import(each.lineno, base + alias.name, is_relative, is_inside, is_typed)
        elif isinstance(each, ast.If) and ast.unparse(each.test) in TYPE_ONLY:
            for part, typed in ((each.body, True), (each.orelse, is_typed)):
                yield from imports_of(ast.Module(part, []), is_inside, typed)
        else:
            is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports_of(each, is_inside or is_function, is_typed)


@cache
def imports(source: str) -> list[Import]:
    """Parsed once: each rule looks at every module."""
    return list(imports_of(ast.parse(source)))


def is_allowed(module: str, found: Import) -> bool:
    """Whether `module` of poros may import it."""
    top, _, rest = found.name.partition(".")
    inner, part = rest.split(".")[0], module.partition(".")[2].split(".")[0]
    if top != "poros" or found.is_typed or inner in ("", "__version__"):
        return True  # a bare `import poros` loads nothing
    if found.is_inside and (inner in LAZY or inner not in LEVEL):
        return True
    return inner in LEVEL and part in LEVEL and LEVEL[inner] <= LEVEL[part]


def violations(module: str, source: str) -> list[str]:
    """Every rule that `source` breaks, taken as the text of `module` (a dotted name)."""
    found = []
    parts = module.split(".")
    if parts[0] == "poros" and len(parts) > 1 and parts[1] not in LEVEL:
        found.append(f"{module}: has no place in LAYERS of tests/unit/test_imports.py")
    for each in imports(source):
        names = each.name.split(".")
        if each.is_relative:
            said = "relative import"
        elif names[0] in ("loaders", "gates", "examples"):
            said = "by its top-level name"
        elif module.count(".") > 1 and any(name.startswith("test_") for name in names):
            said = "a test module"
        elif parts[0] == "poros" and not is_allowed(module, each):
            said = "which stands above it"
        else:
            continue
        found.append(f"{module}:{each.line}: {each.name}, {said}")
    if len(source.splitlines()) > MAX_LINES:
        found.append(f"{module}: {len(source.splitlines())} lines, more than {MAX_LINES}")
    return found


def cycles(sources: dict[str, str]) -> list[str]:
    """Modules of poros that import one another in a circle, and their users.

    Imports in functions and for type checkers count: modules of a circle cannot be read one by one.
    """
    inside = {module for module in sources if module.split(".")[0] == "poros"}
    uses = {
        module: {
            each.name if each.name in inside else each.name.rpartition(".")[0]
            for each in imports(sources[module])
        }
        for module in inside
    }
    while free := [name for name, used in uses.items() if not used & uses.keys() - {name}]:
        for name in free:
            del uses[name]
    return sorted(uses)


def sources() -> dict[str, str]:
    """Dotted module name and text of every Python file of the project."""
    homes = {folder: f"poros.{folder}" for folder in ("loaders", "gates", "examples")}
    found = {}
    for folder in ("poros", "loaders", "gates", "examples", "tests", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join((homes.get(folder, folder), *inside)).removesuffix(".__init__")
            found[module] = path.read_text(encoding="utf-8")
    return found


def test_the_project_keeps_the_rules() -> None:
    """Fails on the first module that breaks one, with all that it breaks."""
    found = sources()
    assert {"poros.errors", "poros.loaders", "poros.gates", "tests.unit.test_imports"} <= set(found)
    assert [line for module, text in found.items() for line in violations(module, text)] == []
    assert cycles(found) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("poros.host.layout", "from poros.slots.ring import DeviceRing"),
        ("poros.slots.manager", "from poros import stream"),
        ("poros.replay.remat", "try:\n    import poros.api\nexcept ImportError:\n    pass"),
        ("poros.stream.boundary", "class A:\n    from poros.api import prepare"),
        ("poros.stream.boundary", "def f():\n    from poros.api import prepare"),
        ("poros.stream.boundary", "from poros import prepare"),
        ("poros.stream.boundary", "if not TYPE_CHECKING:\n    import poros.api"),
        ("poros", "from poros.config import StreamingPolicy"),
        ("poros.api", "from poros.gates.parity import run"),
        ("poros.cli", "from poros import gates"),
        ("poros.gates.parity", "from gates.compare import equal"),
        ("poros.gates.parity", "def f():\n    import loaders.reader"),
        ("poros.gates.parity", "from .compare import equal"),
        ("tests.unit.test_ring", "from tests.faults.test_missing_waits import Slots"),
        ("poros.newcomer", "import os"),
        ("poros.host.layout", "x = 1\n" * (MAX_LINES + 1)),
    ],
)
def test_each_broken_rule_is_reported(module: str, source: str) -> None:
    """Negative controls: without them an empty list could mean a checker that sees nothing."""
    assert len(violations(module, source)) == 1


def test_what_the_rules_allow_is_not_reported() -> None:
    allowed = [
        ("poros.slots.ring", "from poros.streams import A\nfrom poros.host.layout import Layout"),
        ("poros.cli", "def check():\n    from poros.gates.parity import run"),
        ("poros", "if TYPE_CHECKING:\n    from poros.api import prepare"),
        ("poros.host.layout", "import typing\nif typing.TYPE_CHECKING:\n    import poros.api"),
        ("poros.loaders.reader", "from poros.loaders.header import x\nimport poros.host.store"),
        ("poros.api", "from poros.loaders.reader import read\nfrom poros import __version__"),
        ("poros.stream.boundary", "import poros"),
        ("poros.host.layout", "x = 1\n" * MAX_LINES),
    ]
    assert [found for row in allowed for found in violations(*row)] == []


def test_a_cycle_is_reported() -> None:
    """Layers alone would let two of one layer import each other, or one of them for its types."""
    chain = {"poros.host.store": "import poros.host.disk", "poros.host.disk": "import poros.errors"}
    assert cycles(chain) == []
    circle = ["poros.host.disk", "poros.host.store"]
    assert cycles({**chain, "poros.host.disk": "import poros.host.store"}) == circle
    lazy = "def f():\n    from poros.host.store import HostStore"
    assert cycles({**chain, "poros.host.disk": lazy}) == circle
    typed = "if TYPE_CHECKING:\n    from poros.host.store import HostStore"
    assert cycles({**chain, "poros.host.disk": typed}) == circle
    exported = {**chain, "poros": typed, "poros.host.disk": "def f():\n    from poros import x"}
    assert cycles(exported) == ["poros", *circle]
    found = sources()
    found["poros.slots.ring"] += "\nif TYPE_CHECKING:\n    from poros.api import prepare"
    assert {"poros.slots.ring", "poros.stream.body", "poros.api"} <= set(cycles(found))
    assert violations("poros.host.disk", "import poros.host.store") == []
