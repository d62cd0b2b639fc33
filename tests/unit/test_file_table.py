"""What CONTRIBUTING.md says of the files is what they say of themselves."""

import tomllib

from file_table import BEGIN, FOLDERS, ROOT, lines, written


def test_the_table_of_files_is_current() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert written(page) == page, "write it anew: python -m tests.file_table"


def test_a_change_would_show() -> None:
    """Control: the table is not empty, and a line that is gone is missed."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    row = next(line for line in lines() if line.startswith("| `manager` |"))
    assert BEGIN in page and written(page.replace(row + "\n", "")) != page.replace(row + "\n", "")


def test_every_package_is_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = project["tool"]["setuptools"]
    moved = setuptools["package-dir"]
    packages = {_folder(name, moved) for name in setuptools["packages"]}
    assert packages <= set(FOLDERS)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in packages if f"{name.split('/')[-1]}/ " not in page] == []


def _folder(package: str, moved: dict[str, str]) -> str:
    """Where a package lies: at the place of the nearest package above it that has one."""
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        top = ".".join(parts[:length])
        if top in moved:
            return "/".join([moved[top], *parts[length:]])
    return "/".join(parts)
