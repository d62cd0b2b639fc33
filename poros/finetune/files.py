"""Reads rows out of files and data sets, each with its place.

JSON and CSV are read here, so that an error names the line: ``datasets`` names the file at most,
and in CSV it makes numbers of texts, fills up short lines and drops cells of long ones. It reads
everything else: Parquet, folders that it has saved, data sets by name.
"""

import csv
import glob
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from poros.errors import quoted, reason_of
from poros.finetune.forms import FORMATS
from poros.io.reading import open_regular, parse_strictly
from poros.loaders.names import is_local
from poros.recipes.recipe import DataPart
from poros.recipes.sources import Kind, files_of, kind_of, suffix_of

Row = tuple[str, Any]
"""The place of a row (``rows.jsonl:12``), and the row."""
Note = Callable[[str, str], None]
"""Takes a place and what is wrong there."""

_JSON_REMEDY = (
    "look at this column; in .jsonl each object is on one line: jq -c . FILE > FILE.jsonl"
)
_OPENING = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[')


def rows_of(source: str, key: str, data: DataPart, note: Note) -> Iterator[Row]:
    """Yield the rows of a source.

    Args:
        source: A path, or a name on the hub.
        key: The setting of the recipe that names it.
        note: Is called with what cannot be read; later rows follow as far as that is possible.
    """
    kind = kind_of(source, is_split=bool(data.split or data.config))
    if kind is not Kind.FILES:
        yield from _tables(source, kind, data, note)
        return
    for file in files_of(Path(source).expanduser()):
        shown = quoted(str(file), is_bare=True)
        try:
            if suffix_of(file) == ".parquet":
                yield from _tables(str(file), kind, data, note)
            else:
                yield from _texts(file, shown, note)
        except (OSError, ValueError) as error:
            what = f"expected a file to read, found: {reason_of(error)}; check its permissions"
            note(f"{shown}:1", f"{key}: {what}")


def _texts(file: Path, shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of a file of JSON or CSV."""
    packed = suffix_of(file)
    suffix = packed.removesuffix(".gz")
    unpacked: Any = nullcontext if suffix == packed else gzip.open
    with open_regular(file) as stream, unpacked(stream) as content:
        lines = _decoded(content, shown, note)
        if suffix in (".csv", ".tsv"):
            yield from _cells(lines, "\t" if suffix == ".tsv" else ",", shown, note)
        elif suffix == ".json":
            whole = "".join(lines)
            if not _OPENING.match(whole):
                yield from _objects(whole.split("\n"), shown, note)
                return
            for found in _parsed(whole, shown, 1, note):
                rows = found["data"] if isinstance(found, dict) else found
                for number, row in enumerate(rows, start=1):
                    yield f"{shown}, row {number}", row
        else:
            yield from _objects(lines, shown, note)


def _decoded(lines: Iterable[bytes], shown: str, note: Note) -> Iterator[str]:
    """Yield every line as text, without a byte order mark; an empty one if it is not UTF-8."""
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"the byte 0x{line[error.start]:02x} in column {error.start + 1}"
                note(f"{shown}:{number}", f"expected UTF-8, found {found}; save it as UTF-8")
                yield "\n"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"expected gzip, found: {quoted(str(error), is_bare=True)}; compress it anew"
        note(f"{shown}:{number + 1}", what)


def _objects(lines: Iterable[str], shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of JSON Lines."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            for row in _parsed(line.rstrip(), shown, number, note):
                yield f"{shown}:{number}", row


def _parsed(text: str, shown: str, line: int, note: Note) -> Iterator[Any]:
    """Yield the one value that a text is in JSON, or note why it is none.

    Args:
        line: The line of the file that the text begins on.
    """
    try:
        yield parse_strictly(text)
    except json.JSONDecodeError as error:
        where = f"{shown}:{line + error.lineno - 1}:{error.colno}"
        note(where, f"expected JSON, found: {error.msg}; {_JSON_REMEDY}")
    except (ValueError, RecursionError) as error:
        note(f"{shown}:{line}", f"expected JSON, found {quoted(str(error), is_bare=True)}")


def _cells(lines: Iterator[str], delimiter: str, shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of CSV, each with the line that it begins on; all cells are texts."""
    before = csv.field_size_limit(sys.maxsize)
    number = 1
    try:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        names = reader.fieldnames or ()
        if len({*names}) < len(names) or not any({*each.keys} <= {*names} for each in FORMATS):
            what = f"expected columns of a row, each once, found {quoted(', '.join(names))}"
            note(f"{shown}:1", f"{what}; name them in the first line, with {delimiter!r} between")
            return
        number = reader.line_num + 1
        for row in reader:
            if None in row or None in row.values():
                what = f"expected {len(names)} cells, as many as the first line names, found others"
                note(f"{shown}:{number}", f"{what}; put texts with separators in double quotes")
            else:
                yield f"{shown}:{number}", row
            number = reader.line_num + 1
    except csv.Error as error:
        reason = quoted(str(error), is_bare=True)
        what = f"expected CSV, found: {reason}; look at the double quotes from this line on"
        note(f"{shown}:{number}", what)
    finally:
        csv.field_size_limit(before)


def _tables(source: str, kind: Kind, data: DataPart, note: Note) -> Iterator[Row]:
    """Yield the rows that ``datasets`` reads; what Arrow has filled up with nulls is left out."""
    from datasets import load_dataset, load_from_disk, logging
    from trl.trainer.utils import remove_none_values

    from poros.loaders.settings import describe_error

    path, split = str(Path(source).expanduser()), data.split or "train"
    shown = quoted(source, is_bare=True) + ("" if kind is Kind.FILES else f"[{split}]")
    number = 0
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    try:
        if kind is Kind.FILES:
            found = load_dataset(
                "parquet", data_files=glob.escape(path), split="train", streaming=True
            )
        elif kind is Kind.NAMED:
            # What is cached of a folder may be older than its files.
            found = load_dataset(path, data.config, split=split, streaming=is_local(source))
        else:
            found = load_from_disk(path)
            if isinstance(found, dict):
                found = found[split]
            elif data.split:
                raise ValueError("one data set without splits")
        for row in found:
            number += 1
            yield f"{shown}, row {number}", remove_none_values(row)
    except Exception as error:  # of the network, the hub, the data set, and its builder
        found = describe_error(error)
        what = f"expected rows that the library datasets can read, found: {found}"
        remedy = "check the name, data.config (--config) and data.split (--split), or save it anew"
        note(f"{shown}, row {number + 1}", f"{what}; {remedy}")
    finally:
        logging.set_verbosity(verbosity)
