"""Reads rows to train on, and checks every one of them before anything is loaded.

Rows come from JSONL (one object a line), from a folder of such files, from a Parquet file, or by
name from the hub through ``datasets``. Nothing here imports torch.
"""

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from poros.errors import DataFormatError, PorosError, quoted, reason_of
from poros.finetune.forms import FORMS, METHODS, Form, form_of, problems
from poros.io import strict_json
from poros.loaders.names import is_local
from poros.recipes.recipe import Recipe

_MOST_SHOWN = 30


@dataclass
class Rows:
    """Rows of one form.

    Attributes:
        form: Of all of them.
        rows: What is used of each: the keys of the form, and tools.
        files: Where they come from.
        places: Number of the file and of the line of each row, one after the other.
        digest: Of the bytes they were read from.
        unused: Keys that nothing reads.
    """

    form: Form
    rows: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    places: "array[int]" = field(default_factory=lambda: array("q"))
    digest: str = ""
    unused: tuple[str, ...] = ()

    def place(self, number: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:12``."""
        return f"{self.files[self.places[2 * number]]}:{self.places[2 * number + 1]}"

    def chosen(self, numbers: Sequence[int]) -> "Rows":
        """Select rows, in that order."""
        places = array("q")
        for number in numbers:
            places.extend(self.places[2 * number : 2 * number + 2])
        return replace(self, rows=[self.rows[number] for number in numbers], places=places)


def read_data(recipe: Recipe) -> tuple[Rows, Rows | None]:
    """Read the rows to train on, and those to validate on, if any.

    Raises:
        DataFormatError: If a row is not what it should be: file, line, what was expected and found,
            and what to do, for the first rows of which that is so.
    """
    reader = _Reader(recipe)
    train = reader.read(recipe.data.source, "data.source")
    validation = recipe.data.validation
    if isinstance(validation, str):
        held_out = reader.read(validation, "data.validation")
        reader.refuse()
        return train, held_out
    reader.refuse()
    if not validation:
        return train, None
    if len(train.rows) < 2:
        raise DataFormatError(
            f"{train.place(0)}: expected at least two rows to hold some out for validation, found "
            "one; leave out data.validation (--validation)"
        )
    numbers = list(range(len(train.rows)))
    num_held_out = min(max(1, round(validation * len(numbers))), len(numbers) - 1)
    chosen = set(random.Random(recipe.training.seed).sample(numbers, num_held_out))
    return (
        train.chosen([each for each in numbers if each not in chosen]),
        train.chosen(sorted(chosen)),
    )


class _Reader:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._form: Form | None = None
        self._problems: list[str] = []
        self._num_problems = 0

    def read(self, source: str, key: str) -> Rows:
        from xxhash import xxh3_128

        digest = xxh3_128()
        files: list[str] = []
        places = array("q")
        rows: list[dict[str, Any]] = []
        unused: set[str] = set()
        for file, number, row in self._rows(source, key, digest):
            if not files or files[-1] != file:
                files.append(file)
            where = f"{file}:{number}"
            if not isinstance(row, dict):
                found = "a list" if isinstance(row, list) else quoted(row, limit=40)
                self._note(where, f"expected an object in braces, found {found}; write one a line")
                continue
            form = form_of(row)
            if self._form is None and isinstance(form, Form):
                self._form = form
                self._check_form(where, form)
            wrong = list(problems(row, self._form)) if self._form else [str(form)]
            for each in wrong:
                self._note(where, each)
            if self._form is not None and not wrong:
                used = (*FORMS[self._form.name], "tools")
                unused.update(row.keys() - set(used))
                rows.append({name: row[name] for name in used if row.get(name) is not None})
                places.extend((len(files) - 1, number))
        if not rows and not self._num_problems:
            shown = quoted(source, is_bare=True)
            self._note(f"{shown}:1", "expected rows, found none; write one JSON object a line")
        names = tuple(sorted(quoted(name, is_bare=True, limit=40) for name in unused))
        form = self._form or Form("text", is_chat=False)
        return Rows(form, rows, files, places, digest.hexdigest(), names)

    def refuse(self) -> None:
        if not self._num_problems:
            return
        shown = self._problems
        if self._num_problems > len(shown):
            shown = [*shown, f"and {self._num_problems - len(shown)} more"]
        raise DataFormatError("\n".join(shown))

    def _note(self, where: str, what: str) -> None:
        self._num_problems += 1
        if len(self._problems) < _MOST_SHOWN:
            self._problems.append(f"{where}: {what}")

    def _check_form(self, where: str, form: Form) -> None:
        """Check that the recipe can train on rows of that form."""
        method, loss_on = self._recipe.training.method, self._recipe.data.loss_on
        keys = ", ".join(FORMS[form.name])
        if form.name not in METHODS[method]:
            other = next(name for name, forms in METHODS.items() if form.name in forms)
            wanted = " or ".join(f"({', '.join(FORMS[name])})" for name in METHODS[method])
            self._note(
                where,
                f"expected rows for {method} {wanted}, found {keys}; train with --method {other} "
                f"(training.method: {other}), or give other rows",
            )
        elif (loss_on == "assistant" and not form.is_chat) or (
            loss_on == "completion" and form.name not in ("completions", "preferences")
        ):
            wanted = "messages" if loss_on == "assistant" else "prompt and completion"
            self._note(
                where,
                f"expected rows with {wanted} for data.loss_on: {loss_on} (--loss-on), found "
                f"{keys}; leave it out",
            )

    def _rows(self, source: str, key: str, digest: Any) -> Iterator[tuple[str, int, Any]]:
        """Yield file, line number and row."""
        if not is_local(source):
            yield from self._hub_rows(source, digest)
            return
        path = Path(source).expanduser()
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            try:
                if file.suffix == ".parquet":
                    yield from self._parquet_rows(file, digest)
                else:
                    yield from self._lines(file, digest)
            except OSError as error:
                reason = quoted(reason_of(error), is_bare=True)
                self._note(f"{_shown(file)}:1", f"{key}: expected a file to read, found: {reason}; "
                    "check its permissions")  # fmt: skip

    def _lines(self, file: Path, digest: Any) -> Iterator[tuple[str, int, Any]]:
        shown = _shown(file)
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                if number == 1 and line.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
                    kind = "UTF-8" if line.startswith(b"\xef") else "UTF-16"
                    self._note(
                        f"{shown}:1",
                        f"expected plain UTF-8, found the byte order mark of {kind}; save the file "
                        "as UTF-8 without BOM",
                    )
                    if kind == "UTF-16":
                        return
                    line = line[3:]
                if not line.strip():
                    continue
                try:
                    yield shown, number, strict_json.parse(line.decode())
                except UnicodeDecodeError as error:
                    found = f"the byte 0x{line[error.start]:02x} in column {error.start + 1}"
                    self._note(
                        f"{shown}:{number}",
                        f"expected UTF-8, found {found}; save it as UTF-8",
                    )
                except json.JSONDecodeError as error:
                    what = f"expected JSON, found: {error.msg}; {_json_remedy(line)}"
                    self._note(f"{shown}:{number}:{error.colno}", what)
                except (ValueError, RecursionError) as error:
                    reason = quoted(str(error), is_bare=True)
                    self._note(f"{shown}:{number}", f"expected JSON, found {reason}")

    def _parquet_rows(self, file: Path, digest: Any) -> Iterator[tuple[str, int, Any]]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise DataFormatError(
                f"{_shown(file)}:1: expected the package pyarrow to read it, found none; pip "
                "install '.[finetune]' in a clone of Poros, or write JSONL"
            ) from error
        digest.update(file.read_bytes())
        try:
            table = parquet.ParquetFile(file)
            number = 0
            for batch in table.iter_batches(1000):
                for row in batch.to_pylist():
                    number += 1
                    yield _shown(file), number, row
        except (ArrowException, ValueError) as error:
            reason = quoted(str(error), is_bare=True)
            self._note(
                f"{_shown(file)}:1", f"expected a Parquet file, found: {reason}; write it anew"
            )

    def _hub_rows(self, name: str, digest: Any) -> Iterator[tuple[str, int, Any]]:
        from datasets import load_dataset

        split = self._recipe.data.split or "train"
        try:
            found = load_dataset(name, split=split)
        except PorosError:
            raise
        except Exception as error:  # of the network, the hub, the data set, and its builder
            reason = quoted(f"{type(error).__name__}: {error}", is_bare=True, limit=400)
            raise DataFormatError(
                f"data.source: expected a file, a folder or a data set on the hub, found "
                f"{quoted(name)}: {reason}; check the name, and data.split (--split)"
            ) from error
        digest.update(str(found._fingerprint).encode())
        for number, row in enumerate(found, start=1):
            yield f"{quoted(name, is_bare=True)}[{split}]", number, row


def _shown(file: Path) -> str:
    return quoted(str(file), is_bare=True)


def _json_remedy(line: bytes) -> str:
    start = line.strip()[:2]
    if start.startswith(b"["):
        return "a list has to be one object a line: jq -c '.[]' FILE > FILE.jsonl"
    if start == b"{" or not line.strip().endswith(b"}"):
        return "each object has to stand on one line: jq -c . FILE > FILE.jsonl"
    return "look at this column: quotes, commas and braces"
