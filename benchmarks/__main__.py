"""One entry point of all benchmarks: ``python -m benchmarks NAME [options]``.

A benchmark is a module of this package that can be run by itself. Nothing is listed by hand.
"""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """The benchmarks, and the first line of each module's docstring; none is imported for it."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.stem != "__main__" and '\nif __name__ == "__main__":\n' in source:
            text = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = " ".join(text.split("\n\n")[0].split())
    return found


def usage() -> str:
    known = names()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {line}" for name, line in known.items()]
    return "\n".join(["usage: python -m benchmarks NAME [options]", "", *lines])


def main() -> None:
    """Run the module that is named, as ``python -m benchmarks.NAME`` does."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return
    if name not in names():
        sys.exit(f"expected the name of a benchmark, found {name!r}\n\n{usage()}")
    sys.argv = [f"benchmarks.{name}", *options]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
