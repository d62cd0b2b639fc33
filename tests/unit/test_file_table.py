"""What CONTRIBUTING.md says of the files is what they say of themselves."""

from file_table import BEGIN, ROOT, lines, written


def test_the_table_of_files_is_current() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert written(page) == page, "write it anew: python -m tests.file_table"


def test_a_change_would_show() -> None:
    """Control: the table is not empty, and a line that is gone is missed."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    row = next(line for line in lines() if line.startswith("| `manager` |"))
    assert BEGIN in page and written(page.replace(row + "\n", "")) != page.replace(row + "\n", "")
