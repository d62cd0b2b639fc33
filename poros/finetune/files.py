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
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any, cast

from poros.errors import quoted, reason_of
from poros.finetune.forms import FORMATS, no_form
from poros.io import strict_json
from poros.io.reading import open_regular
from poros.loaders.names import is_local
from poros.recipes.recipe import DataPart
from poros.recipes.sources import Kind, files_of, kind_of, suffix_of

Row = tuple[str, int, Any]
"""What stands before the number of a row in its place (``rows.jsonl:``), the number, the row."""
Note = Callable[[str, str], None]
"""Takes a place and what is wrong there."""

_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_OPENING = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[')
_READ = frozenset(key for each in FORMATS for key in (*each.keys, *each.others))
# What datasets reads, and what to do where it cannot.
_TABLES = {
    Kind.FILES: ("a Parquet file", "write it anew"),
    Kind.SAVED: ("a folder of save_to_disk", "check data.split (--split), or save it anew"),
    Kind.NAMED: (
        "a file, a folder or a data set on the hub",
        "check the name, data.config (--config) and data.split (--split)",
    ),
}


def rows_of(source: str, key: str, data: DataPart, digest: Any, note: Note) -> Iterator[Row]:
    """Yield the rows of a source.

    Args:
        source: A path, or a name on the hub.
        key: Of the recipe, that names it.
        data: With the configuration and the split of a data set.
        digest: Gets the bytes of all files; of a data set by name, what is read of its rows.
        note: Gets what cannot be read; the rows behind it follow as far as that is possible.
    """
    kind = kind_of(source, is_split=bool(data.split or data.config))
    if kind is Kind.NAMED:
        yield from _tables(source, kind, data, digest, note)
        return
    path = Path(source).expanduser()
    files = files_of(path) if kind is Kind.FILES else sorted(path.rglob("*"))
    for file in files:
        shown = quoted(str(file), is_bare=True)
        try:
            if file.is_dir():
                continue
            with open_regular(file) as stream:
                file_digest(cast(Any, stream), lambda: digest)
            if kind is Kind.FILES and suffix_of(file) == ".parquet":
                yield from _tables(str(file), kind, data, digest, note)
            elif kind is Kind.FILES:
                yield from _texts(file, shown, note)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = quoted(reason_of(error), is_bare=True)
            note(f"{shown}:1", f"expected a whole gzip file, found: {reason}; pack it anew")
        except (OSError, ValueError) as error:
            reason = quoted(reason_of(error), is_bare=True)
            what = f"{key}: expected a file to read, found: {reason}; check its permissions"
            note(f"{shown}:1", what)
    if kind is Kind.SAVED:
        yield from _tables(source, kind, data, digest, note)


def _texts(file: Path, shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of a file of JSON or CSV, which gzip may have packed."""
    suffix = suffix_of(file)
    is_csv = suffix in (".csv", ".tsv")
    with open_regular(file) as stream:
        raw: Iterable[bytes] = stream
        if file.suffix == ".gz":
            raw = gzip.GzipFile(fileobj=stream)
        lines = _decoded(raw, shown, note, takes_mark=is_csv)
        if is_csv:
            yield from _cells(lines, "\t" if suffix == ".tsv" else ",", shown, note)
        elif suffix == ".json":
            whole = "".join(lines)
            if _OPENING.match(whole):
                yield from _elements(whole, shown, note)
            else:
                yield from _objects(whole.split("\n"), shown, note)
        else:
            yield from _objects(lines, shown, note)


def _decoded(lines: Iterable[bytes], shown: str, note: Note, *, takes_mark: bool) -> Iterator[str]:
    """Yield every line as text: an empty one in place of one that is none."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            mark = next((mark for mark in _MARKS if line.startswith(mark)), b"")
            line = line.removeprefix(mark)
            if mark and not (takes_mark and _MARKS[mark] == "UTF-8"):
                note(
                    f"{shown}:1",
                    f"expected plain UTF-8, found the byte order mark of {_MARKS[mark]}; save the "
                    "file as UTF-8 without BOM",
                )
            if mark and _MARKS[mark] != "UTF-8":
                return
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            found = f"the byte 0x{line[error.start]:02x} in column {error.start + 1}"
            note(f"{shown}:{number}", f"expected UTF-8, found {found}; save it as UTF-8")
            yield "\n"


def _objects(lines: Iterable[str], shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of JSON Lines."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield f"{shown}:", number, strict_json.parse(line)
        except json.JSONDecodeError as error:
            what = f"expected JSON, found: {error.msg}; {_json_remedy(line)}"
            note(f"{shown}:{number}:{error.colno}", what)
        except (ValueError, RecursionError) as error:
            note(f"{shown}:{number}", f"expected JSON, found {quoted(str(error), is_bare=True)}")


def _json_remedy(line: str) -> str:
    start = line.strip()[:2]
    if start.startswith("["):
        return "a list has to be one object a line: jq -c '.[]' FILE > FILE.jsonl"
    if start == "{" or not line.strip().endswith("}"):
        return "each object has to stand on one line: jq -c . FILE > FILE.jsonl"
    return "look at this column: quotes, commas and braces"


def _elements(text: str, shown: str, note: Note) -> Iterator[Row]:
    """Yield the elements of a list of JSON, or of an object that has it as its data."""
    try:
        found = strict_json.parse(text)
    except json.JSONDecodeError as error:
        what = f"expected a list of rows, found: {error.msg}; look at this column"
        note(f"{shown}:{error.lineno}:{error.colno}", what)
        return
    except (ValueError, RecursionError) as error:
        note(f"{shown}:1", f"expected JSON, found {quoted(str(error), is_bare=True)}")
        return
    rows = found["data"] if isinstance(found, dict) else found
    for number, row in enumerate(rows, start=1):
        yield f"{shown}, row ", number, row


def _cells(lines: Iterator[str], delimiter: str, shown: str, note: Note) -> Iterator[Row]:
    """Yield the rows of CSV, each with the line that it begins on; all cells are texts."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    number = 1
    before = csv.field_size_limit(sys.maxsize)
    try:
        for cells in reader:
            if not names:
                names = cells
                wrong = _header_problem(names)
                if wrong:
                    note(f"{shown}:1", f"{wrong}; the first line of the file names its columns")
                    return
            elif len(cells) == len(names):
                yield f"{shown}:", number, dict(zip(names, cells, strict=True))
            elif cells:
                note(
                    f"{shown}:{number}",
                    f"expected {len(names)} cells, as many as the first line names, found "
                    f"{len(cells)}; put texts with separators in double quotes",
                )
            number = reader.line_num + 1
    except csv.Error as error:
        reason = quoted(str(error), is_bare=True)
        what = f"expected CSV, found: {reason}; look at the double quotes from this line on"
        note(f"{shown}:{number}", what)
    finally:
        csv.field_size_limit(before)


def _header_problem(names: list[str]) -> str:
    twice = sorted({quoted(each) for each in names if names.count(each) > 1})
    if twice:
        return f"expected every column once, found {', '.join(twice)} twice; remove one"
    if not any(set(each.keys) <= set(names) for each in FORMATS):
        return no_form(set(names))
    return ""


def _tables(source: str, kind: Kind, data: DataPart, digest: Any, note: Note) -> Iterator[Row]:
    """Yield the rows that ``datasets`` reads; what Arrow has filled up with nulls is left out."""
    from datasets import load_dataset, load_from_disk

    path, split = str(Path(source).expanduser()), data.split or "train"
    shown = quoted(source, is_bare=True)
    if kind is not Kind.FILES:
        shown = f"{shown}[{split}]"
    number = 0
    try:
        with _without_logs():
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
                if kind is Kind.NAMED:
                    read = {name: value for name, value in row.items() if name in _READ}
                    digest.update(json.dumps(read, default=str).encode())
                yield f"{shown}, row ", number, _without_nulls(row)
    except Exception as error:  # of the network, the hub, the data set, and its builder
        wanted, remedy = _TABLES[kind]
        reason = quoted(f"{type(error).__name__}: {error}", is_bare=True, limit=400)
        note(f"{shown}, row {number + 1}", f"expected {wanted}, found: {reason}; {remedy}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence ``datasets``, which logs the errors that it raises."""
    from datasets import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
