"""Tells what a source of rows is: files of one kind, a folder that ``datasets`` has saved, a name.

Imports nothing slow, so that a command can reject a wrong path at once.
"""

from enum import Enum
from pathlib import Path

from poros.loaders.names import is_local

_TEXTS = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*_TEXTS, ".parquet", *(f"{each}.gz" for each in _TEXTS))
"""Suffixes of files of rows."""


class Kind(Enum):
    """The kinds of sources."""

    FILES = "files of rows"
    SAVED = "a folder written by save_to_disk of datasets"
    NAMED = "a data set by name, with configurations and splits"


def suffix_of(file: Path) -> str:
    """Return the suffix of a file that is one of ``SUFFIXES``; "" if it has none of them."""
    return next((each for each in SUFFIXES if file.name.endswith(each)), "")


def files_of(path: Path) -> list[Path]:
    """Return the files of rows in a folder, in order, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if suffix_of(each) and each.is_file())


def kind_of(source: str, *, is_split: bool) -> Kind:
    """Return what a source is.

    Args:
        source: A path, or a name on the hub.
        is_split: Whether the recipe names a configuration or a split: a folder is a data set then,
            such as a clone of a repository of the hub.
    """
    path = Path(source).expanduser()
    if not is_local(source):
        return Kind.NAMED
    if not path.is_dir():
        return Kind.FILES
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return Kind.SAVED
    is_nested = not files_of(path) and any(suffix_of(each) for each in path.glob("*/**/*"))
    return Kind.NAMED if is_split or is_nested else Kind.FILES
