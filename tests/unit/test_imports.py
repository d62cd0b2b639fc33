"""Imports point one way, and files stay small.

The rules are checked on the syntax tree, so nothing is imported. An import counts as module level
when it runs as the module is imported: inside `if`, `try`, `with` or a class body too, but not
inside a function or under `TYPE_CHECKING`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600

# A package, or a file beside the packages, may import its own layer and those before it. Files of
# one package may import each other; circles are refused apart.
LAYERS = [
    {"config", "errors"},
    {"io", "utils"},
    {"streams", "cuda_streams"},
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


@cache
def tree(source: str) -> ast.Module:
    """Parsed once: each rule looks at every module."""
    return ast.parse(source)


def module_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_ONLY:
            yield from module_level(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from module_level(getattr(node, field, []))


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import names, as full as it can be: `from a.b import c` gives a.b.c."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module or ''}.{alias.name}" for alias in node.names]


def inner_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and first name below `poros` of each module-level import of poros."""
    for node in module_level(tree(source).body):
        for name in names(node):
            top, _, rest = name.partition(".")
            if top == "poros":
                yield node.lineno, rest.split(".")[0]


def allowed(module: str, inner: str) -> bool:
    """Whether `module` may import `poros.<inner>` at module level."""
    part = module.split(".")[1] if "." in module else ""
    if inner in ("", "__version__"):
        return True  # a bare `import poros` loads nothing
    return inner in LEVEL and part in LEVEL and LEVEL[inner] <= LEVEL[part]


def violations(module: str, source: str) -> list[str]:
    """Every rule that `source` breaks, taken as the text of `module` (a dotted name)."""
    found = []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"{module}:{node.lineno}: relative import")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in names(node):
                if name.split(".")[0] in ("loaders", "gates", "examples"):
                    found.append(f"{module}:{node.lineno}: {name} by its top-level name")
                is_test = any(part.startswith("test_") for part in name.split("."))
                if is_test and module.count(".") > 1:
                    found.append(f"{module}:{node.lineno}: {name}, a test module")
    parts = module.split(".")
    if parts[0] == "poros":
        if len(parts) > 1 and parts[1] not in LEVEL:
            return [*found, f"{module}: has no place in LAYERS of tests/unit/test_imports.py"]
        upward = set()
        for line, inner in inner_names(source):
            if not allowed(module, inner):
                upward.add(inner)
                found.append(f"{module}:{line}: imports poros.{inner} at module level")
        inside = [name.split(".")[1] for name in all_imports(tree(source)) if "poros." in name]
        for inner in sorted(set(inside) & LEVEL.keys() - LAZY - upward):
            if not allowed(module, inner):
                found.append(f"{module}: imports poros.{inner}, which stands above it")
    if len(source.splitlines()) > MAX_LINES:
        found.append(f"{module}: {len(source.splitlines())} lines, more than {MAX_LINES}")
    return found


def all_imports(node: ast.AST) -> Iterator[str]:
    """What a module names in imports anywhere in it, those for type checkers aside."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield from names(inner)
        elif isinstance(inner, ast.If) and ast.unparse(inner.test) in TYPE_ONLY:
            for each in inner.orelse:
                yield from all_imports(each)
        else:
            yield from all_imports(inner)


def cycles(sources: dict[str, str]) -> list[str]:
    """Modules of poros that import one another in a circle, and their users.

    Imports in functions and for type checkers count: modules of a circle cannot be read one by one.
    """
    inside = {module for module in sources if module.split(".")[0] == "poros"}
    uses: dict[str, set[str]] = {}
    for module in inside:
        nodes = ast.walk(tree(sources[module]))
        imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        uses[module] = {
            name if name in inside else name.rpartition(".")[0]
            for node in imports
            for name in names(node)
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
        ("poros.host.store", "import poros.slots.manager"),
        ("poros.slots.manager", "from poros import stream"),
        ("poros.slots.manager", "if True:\n    from poros.stream.boundary import x"),
        ("poros.replay.remat", "try:\n    import poros.api\nexcept ImportError:\n    pass"),
        ("poros.replay.remat", "try:\n    pass\nexcept ImportError:\n    import poros.api"),
        ("poros.stream.boundary", "class A:\n    from poros.api import prepare"),
        ("poros.stream.boundary", "def f():\n    from poros.api import prepare"),
        ("poros.stream.boundary", "from poros import prepare"),
        ("poros.stream.boundary", "from poros import *"),
        ("poros.stream.boundary", "if not TYPE_CHECKING:\n    import poros.api"),
        ("poros", "from poros.config import StreamingPolicy"),
        ("poros", "import poros.loaders"),
        ("poros.kernels.lora", "from poros.replay.call import LayerCall"),
        ("poros.api", "from poros.gates.parity import run"),
        ("poros.cli", "from poros import gates"),
        ("poros.slots.manager", "from poros.loaders.reader import read"),
        ("poros.loaders.reader", "from poros.api import prepare"),
        ("poros.loaders.reader", "import poros.self_check.compare"),
        ("poros.loaders.reader", "from poros import planning"),
        ("poros.gates.parity", "from gates.compare import equal"),
        ("poros.gates.parity", "def f():\n    import loaders.reader"),
        ("poros.gates.parity", "from .compare import equal"),
        ("tests.unit.test_ring", "import gates"),
        ("tests.unit.test_ring", "from tests.faults.test_missing_waits import Slots"),
        ("poros.newcomer", "import os"),
        ("poros.host.layout", "x = 1\n" * (MAX_LINES + 1)),
    ],
)
def test_each_broken_rule_is_reported(module: str, source: str) -> None:
    """Negative controls: without them an empty list could mean a checker that sees nothing."""
    assert len(violations(module, source)) == 1


def test_what_the_rules_allow_is_not_reported() -> None:
    """The limits of the rules, from the other side."""
    allowed = [
        ("poros.slots.ring", "from poros.streams import A\nfrom poros.host.layout import Layout"),
        ("poros.cli", "def check():\n    from poros.gates.parity import run"),
        ("poros", "if TYPE_CHECKING:\n    from poros.api import prepare"),
        ("poros.host.layout", "import typing\nif typing.TYPE_CHECKING:\n    import poros.api"),
        ("poros.kernels.lora", "from poros.kernels.paths import choose"),
        ("poros.loaders.reader", "from poros.loaders.header import x\nimport poros.host.store"),
        ("poros.gates.parity", "from poros.api import prepare\nimport poros.loaders.reader"),
        ("poros.api", "from poros.loaders.reader import read\nfrom poros import __version__"),
        ("poros.slots.ring", "import poros.slots.manager"),
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
