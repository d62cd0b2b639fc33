"""The table of files in CONTRIBUTING.md, from the first line of each module's docstring.

python -m tests.file_table    # writes it anew
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- files: python -m tests.file_table -->", "<!-- end of files -->"
FOLDERS = (
    *("poros", "poros/host", "poros/slots", "poros/kernels", "poros/layer", "poros/head"),
    *("poros/model", "poros/accumulation", "poros/planning", "poros/self_check", "poros/cli"),
    *("poros/recipes", "poros/finetune"),
    *("loaders", "gates", "gates/fuzz", "examples"),
    "benchmarks",
)


def first_line(path: Path) -> str:
    """What a module says of itself."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


def lines() -> Iterator[str]:
    """The table."""
    for folder in FOLDERS:
        package = first_line(ROOT / folder / "__init__.py")
        yield f"\n**{folder}/**: {package}\n" if package else f"\n**{folder}/**\n"
        yield "| file | what it is |"
        yield "| --- | --- |"
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name != "__init__.py":
                yield f"| `{path.stem}` | {first_line(path)} |"


def written(text: str) -> str:
    """The text of CONTRIBUTING.md with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END + after


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
