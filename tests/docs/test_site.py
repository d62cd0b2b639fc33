"""The documentation builds without a warning, and names every error, command and option."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from poros import errors
from tests.command_page import PAGE, lines

ROOT = Path(__file__).resolve().parents[2]
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def build(tree: Path, docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The site, from a tree that lies as the wheel does."""
    package = tree / "poros"
    package.mkdir(parents=True)
    for each in (*(ROOT / "poros").iterdir(), *(ROOT / name for name in ("loaders", "gates"))):
        if not (package / each.name).exists():
            (package / each.name).symlink_to(each)
    config = tree / "mkdocs.yml"
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config.write_text(f"docs_dir: {docs}\n{settings}")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)],
        env={**os.environ, "POROS_TREE": str(tree), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = build(tmp_path / "tree", ROOT / "docs", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "vram_budget" in page and "Exactness" in page


def test_control_a_page_that_is_missing_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](nowhere.md)")
    assert build(tmp_path / "tree", docs, tmp_path / "site").returncode != 0


def missing_errors(page: str) -> list[str]:
    found = inspect.getmembers(errors, inspect.isclass)
    return [
        name for name, kind in found if kind is not errors.PorosError and f"`{name}`" not in page
    ]


def test_every_error_is_in_the_index() -> None:
    assert missing_errors(ERRORS) == []
    assert missing_errors(ERRORS.replace("`ParityError`", "")) == ["ParityError"]


def test_the_reference_is_that_of_the_commands() -> None:
    """Written anew by `python -m tests.command_page`."""
    assert PAGE.read_text(encoding="utf-8") == "\n".join(lines())


def missing_places(text: str) -> list[str]:
    """Files and folders that a page names, from the root or from poros/, and that are not there."""
    named = re.findall(r"`([a-z_]+(?:/[\w.]+)+)`", text)
    return [
        name
        for name in [*named, *files_named(text)]
        if not any(
            (base / name).exists() or (base / f"{name}.py").is_file()
            for base in (ROOT, ROOT / "poros")
        )
    ]


def files_named(text: str) -> set[str]:
    return set(re.findall(r"[\w/]+\.py\b", text))


def test_control_a_file_that_is_gone_is_named() -> None:
    text = "`slots/manager`, `slots/no_such`, `tests/exact`, then `poros/kernels/linear9bit.py`"
    assert set(missing_places(text)) == {"slots/no_such", "poros/kernels/linear9bit.py"}


@pytest.mark.parametrize(
    ("page", "most_lines", "least_files"),
    [("step", 120, 20), ("weight", 60, 20), ("option", 60, 12)],
)
def test_the_files_of_a_walk_exist(page: str, most_lines: int, least_files: int) -> None:
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text(encoding="utf-8")
    assert missing_places(text) == []
    assert len(files_named(text)) > least_files and len(text.splitlines()) <= most_lines


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert missing_places(re.sub(r"`utils.py`", "", text)) == []
    folders = set(re.findall(r"^  ([a-z_]+)/ ", text, re.MULTILINE))
    packages = {each.parent.name for each in (ROOT / "poros").glob("*/__init__.py")}
    assert folders == packages, "the map of CONTRIBUTING.md"
    assert len(text.splitlines()) <= 150
