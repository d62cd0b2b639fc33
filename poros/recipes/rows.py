"""Rows of training data: their format, and every line of a file checked before anything is loaded.

Formats, told by the names in a row:

    messages                   a list of {"role": ..., "content": ...}
    prompt, completion         texts, or lists of messages
    text                       one text
    prompt, chosen, rejected   preferences: texts, or lists of messages
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poros.errors import quoted
from poros.recipes.reading import Problem

Row = Mapping[str, Any]

FORMATS: Mapping[str, tuple[str, ...]] = {
    "preferences": ("prompt", "chosen", "rejected"),
    "messages": ("messages",),
    "completions": ("prompt", "completion"),
    "text": ("text",),
}
"""Names in a row of each format. The first whose names are all there is taken."""
ROLES = ("system", "user", "assistant", "tool", "developer")
_HINTS = {
    "conversations": 'rename "conversations" to "messages", "from" to "role", "value" to "content"',
    "instruction": 'rename "instruction" to "prompt" and "output" to "completion"',
    "question": 'rename "question" to "prompt" and "answer" to "completion"',
    "content": 'rename "content" to "text"',
}
_MOST_SHOWN = 20
_MOST_LINE_NUM_BYTES = 2**26


@dataclass
class Rows:
    """Rows of one format.

    Attributes:
        format: One of ``FORMATS``; empty if there is no row.
        rows: With the names of the format alone.
        ignored: Names that rows have besides.
        problems: What is wrong.
    """

    format: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    num_more: int = 0
    """Problems beyond those."""

    @property
    def is_conversational(self) -> bool:
        """Whether rows are messages, for which a chat template is needed."""
        first = next(iter(self.rows), {})
        return any(isinstance(value, list) for value in first.values())

    def found(self) -> list[Problem]:
        """The problems, and how many more there are."""
        if not self.num_more:
            return self.problems
        where = self.problems[-1].where
        return [*self.problems, Problem(where, f"... and {self.num_more} more mistakes behind it")]

    def take(self, where: str, row: object) -> None:
        """One more row, or what is wrong with it."""
        text = self._wrong(row)
        if text is not None:
            self.note(where, text)

    def note(self, where: str, text: str) -> None:
        """One more problem."""
        if len(self.problems) < _MOST_SHOWN:
            self.problems.append(Problem(where, text))
        else:
            self.num_more += 1

    def _wrong(self, row: object) -> str | None:
        if not isinstance(row, Mapping):
            return f"expected an object with names, found {quoted(row)}"
        found = next((name for name, keys in FORMATS.items() if set(keys) <= row.keys()), None)
        if found is None:
            return _unknown(row)
        if self.format and found != self.format:
            return (
                f"expected rows of one format, found {found} behind {self.format}; put them into "
                "files, and runs, of their own"
            )
        keys = FORMATS[found]
        wrong = next(filter(None, (_wrong_value(key, row[key]) for key in keys)), None)
        if wrong is None and len({isinstance(row[key], list) for key in keys}) > 1:
            wrong = f"expected {', '.join(keys)} to be all texts or all messages, found both"
        if wrong is None and self.rows:
            kinds = isinstance(row[keys[0]], list), isinstance(self.rows[0][keys[0]], list)
            if kinds[0] != kinds[1]:
                wrong = "expected texts in all rows or messages in all rows, found both"
        if wrong is not None:
            return wrong
        if found == "messages" and not any(m["role"] == "assistant" for m in row["messages"]):
            return "messages: expected an answer of the assistant, found none; remove the row"
        if found == "preferences" and row["chosen"] == row["rejected"]:
            return "chosen and rejected: expected two answers, found twice the same; remove the row"
        self.format = found
        self.ignored |= row.keys() - set(keys)
        self.rows.append({key: _bare(row[key]) for key in keys})
        return None


def _unknown(row: Row) -> str:
    names = ", ".join(quoted(name) for name in list(row)[:8]) or "none"
    hint = next((text for name, text in _HINTS.items() if name in row), None)
    missing = {"prompt", "completion", "chosen", "rejected"} & row.keys()
    if hint is None and missing:
        hint = "add what is missing of prompt, completion (or chosen, rejected)"
    wanted = "messages; or prompt, completion; or text; or prompt, chosen, rejected"
    return f"expected the names {wanted}; found {names}; {hint or 'rename them'}"


def _wrong_value(name: str, value: object) -> str | None:
    if isinstance(value, str):
        if name == "messages":
            return "messages: expected a list, found a text; write [{role: ..., content: ...}]"
        return None if value.strip() else f"{name}: expected a text, found an empty one"
    if name == "text" or not isinstance(value, list):
        kind = "a text" if name == "text" else "a text, or a list of messages"
        return f"{name}: expected {kind}, found {quoted(value)}"
    if not value:
        return f"{name}: expected messages, found none; remove the row"
    for number, message in enumerate(value):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return f"{where}: expected role and content, found {quoted(message)}"
        if message["role"] not in ROLES:
            return (
                f"{where}.role: expected one of {', '.join(ROLES)}, found {quoted(message['role'])}"
            )
        content = message["content"]
        if not isinstance(content, str):
            return f"{where}.content: expected a text, found {quoted(content)}"
        if not content.strip():
            return f"{where}.content: expected a text, found an empty one"
    return None


def _bare(value: Any) -> Any:
    """Without what messages have besides role and content."""
    if isinstance(value, str):
        return value
    return [{"role": each["role"], "content": each["content"]} for each in value]


def read_files(path: Path, name: str) -> Rows:
    """The rows of a JSONL file, or of all of them in a folder, in order of their names.

    Args:
        path: What is there.
        name: What a recipe calls it.
    """
    found = Rows()
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".json"))
        if not files:
            text = f"{name}: expected files *.jsonl in the folder, found none"
            found.problems.append(Problem(str(path), text))
    for each in files:
        _read(each, found)
    if not found.rows and not found.problems:
        text = f"{name}: expected at least one row, found none"
        found.problems.append(Problem(str(path), text))
    return found


def _read(path: Path, found: Rows) -> None:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                _take_line(f"{path}:{number}", line, number == 1, found)
    except OSError as error:
        reason = error.strerror or str(error)
        found.problems.append(Problem(str(path), f"expected a file to read, found: {reason}"))


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(_MOST_LINE_NUM_BYTES):
        yield line


def _take_line(where: str, line: bytes, is_first: bool, found: Rows) -> None:
    if len(line) >= _MOST_LINE_NUM_BYTES:
        found.problems.append(Problem(where, "expected a row a line, found a line of over 64 MiB"))
        return
    if is_first and line.startswith(b"\xef\xbb\xbf"):
        line = line[3:]
    if not line.strip():
        return
    try:
        text = line.decode("utf-8")
        row = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        text = f"expected UTF-8, found another byte at {error.start + 1}; convert the file"
        found.note(where, text)
    except json.JSONDecodeError as error:
        hint = "write one JSON object a line"
        if is_first and line.lstrip().startswith(b"["):
            hint = "a JSON list is no JSONL: write each of its objects on a line of its own"
        text = f"expected JSON, found a mistake at column {error.colno} ({error.msg}); {hint}"
        found.note(where, text)
    except ValueError as error:
        found.note(where, str(error))
    else:
        if is_first and isinstance(row, list):
            text = "a JSON list is no JSONL: write each of its objects on a line of its own"
            found.note(where, f"expected an object, found a list; {text}")
        else:
            found.take(where, row)


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected each name once, found {quoted(twice)} twice; remove one")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"expected JSON, found {constant}, which JSON has not; remove it")


def take_rows(rows: Iterable[object], name: str) -> Rows:
    """The same of rows that come from elsewhere, counted from 1."""
    found = Rows()
    for number, row in enumerate(rows, 1):
        found.take(f"{name}, row {number}", row)
    return found


def require_task(found: Rows, task: str, where: str) -> list[Problem]:
    """What does not fit ``task``."""
    wants_pairs = task == "dpo"
    if not found.format or (found.format == "preferences") == wants_pairs:
        return []
    text = "prompt, chosen, rejected" if wants_pairs else "messages, completions or text"
    other = "sft" if wants_pairs else "dpo"
    return [
        Problem(
            where,
            f"expected {text} for task {task}, found {found.format}; write task: {other} (--task "
            f"{other}), or give other data",
        )
    ]
