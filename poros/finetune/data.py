"""Reads the rows of one or several sources, and checks each before anything is loaded.

All rows of a source are written alike, and those of all sources become the same form. Files of JSON
and CSV are read without an import of torch.
"""

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from poros.errors import DataFormatError, quoted, refuse_all
from poros.finetune.files import rows_of
from poros.finetune.forms import (
    FORMATS,
    METHODS,
    TEXT,
    Form,
    as_completion,
    as_messages,
    form_of,
    normalised,
    problems,
    said,
)
from poros.recipes.recipe import Recipe


@dataclass
class Rows:
    """Rows of one form.

    Attributes:
        rows: The used keys of each row: those of the form, and tools.
        places: The place of each row: ``rows.jsonl:12``, or ``rows.parquet, row 12``.
        unused: Keys that nothing reads.
        read: The format of each source, and the number of its rows.
    """

    form: Form
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    read: tuple[tuple[str, int], ...] = ()

    @property
    def has_images(self) -> bool:
        return any(row.get("images") for row in self.rows)

    def chosen(self, numbers: Sequence[int]) -> "Rows":
        """Select rows, in that order."""
        rows = [self.rows[number] for number in numbers]
        return replace(self, rows=rows, places=[self.places[number] for number in numbers])

    def settled(self, *, has_template: bool) -> "Rows":
        """Make of instructions what the model is trained on: messages if it has a template."""
        if self.form.name != "instructions":
            return self
        name, write = ("messages", as_messages) if has_template else ("completions", as_completion)
        form = Form(self.form.format._replace(form=name), is_chat=has_template)
        return replace(self, form=form, rows=[write(row) for row in self.rows])


def read_data(recipe: Recipe) -> tuple[Rows, Rows | None]:
    """Read the rows to train on, and those to validate on, if any.

    Raises:
        DataFormatError: If rows are not what they should be: file, line, and what to do for each.
    """
    reader = _Reader(recipe)
    parts = [reader.read(source, "data.source") for source in recipe.data.sources]
    validation, seed = recipe.data.validation, recipe.training.seed
    num_sources = len(parts)
    if isinstance(validation, str):
        parts.append(reader.read(validation, "data.validation"))
    refuse_all(DataFormatError, reader.problems)
    parts = reader.alike(parts)
    refuse_all(DataFormatError, reader.problems)
    parts, others = parts[:num_sources], parts[num_sources:]
    rows, held_out = _joined(parts), list[int]()
    if validation and not isinstance(validation, str):
        held_out = _held_out(rows, validation, seed)
        others = [rows.chosen(held_out)]
    weights = recipe.data.weights or (1.0,) * num_sources
    train = rows.chosen(_taken(parts, weights, {*held_out}, seed))
    return train, others[0] if others else None


class _Reader:
    """Reads sources, and collects what is wrong with them."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.problems: list[str] = []

    def read(self, source: str, key: str) -> Rows:
        """Read a source; its first row with a form decides the form of all."""
        data, method = self._recipe.data, self._recipe.training.method
        found = Rows(Form(TEXT, is_chat=False))
        form: Form | None = None
        unused: set[str] = set()
        num_before = len(self.problems)
        path = Path(source).expanduser()
        folder = path if path.is_dir() else path.parent  # that images are named from
        for where, row in rows_of(source, key, data, self._note):
            if not isinstance(row, dict):
                shown = "a list" if isinstance(row, list) else quoted(row, limit=40)
                self._note(where, f"expected an object in braces, found {shown}; write one a line")
                continue
            first = form_of(row, method)
            if form is None and isinstance(first, Form):
                form = first
                self._check_form(where, form)
            wrong = list(problems(row, first, form))
            for each in wrong:
                self._note(where, each)
            if form is None or wrong:
                continue
            used = normalised(row, form)
            if "images" in used:
                used["images"] = [str(folder / path) for path in used["images"]]
            unused.update(row.keys() - {*form.format.keys, *form.format.others})
            found.rows.append(used)
            found.places.append(where)
        if not found.rows and len(self.problems) == num_before:
            what = "expected rows, found none; write some, in .jsonl one JSON object a line"
            self._note(f"{quoted(source, is_bare=True)}:1", what)
        found.form = form or found.form
        found.unused = tuple(sorted(quoted(name, is_bare=True, limit=40) for name in unused))
        found.read = ((found.form.format.title, len(found.rows)),)
        return found

    def alike(self, every: Sequence[Rows]) -> list[Rows]:
        """Make rows of one form of those of all sources, as far as they mean the same."""
        first = next((each for each in every if each.form.name != "instructions"), every[0])
        if self._recipe.data.loss_on == "assistant":
            first = first.settled(has_template=True)
        if first.form.name == "instructions":
            return list(every)
        settled = [each.settled(has_template=first.form.name == "messages") for each in every]
        for each in settled:
            if (each.form.name, each.form.is_chat) != (first.form.name, first.form.is_chat):
                self._note(
                    each.places[0],
                    f"expected rows of one form in all sources, found {said(each.form)} beside "
                    f"{said(first.form)}; write them all alike, or train on them in two runs",
                )
        return settled

    def _note(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def _check_form(self, where: str, form: Form) -> None:
        """Check that the recipe can train on rows of that form."""
        method, loss_on = self._recipe.training.method, self._recipe.data.loss_on
        if form.name not in METHODS[method]:
            other = next(name for name, forms in METHODS.items() if form.name in forms)
            keys = [each.keys for each in FORMATS if each.form in METHODS[method]]
            wanted = " or ".join(f"({', '.join(each)})" for each in keys)
            self._note(
                where,
                f"expected rows for {method} {wanted}, found {said(form)}; train with --method "
                f"{other} (training.method: {other}), or give other rows",
            )
        elif (loss_on == "assistant" and not (form.is_chat or form.name == "instructions")) or (
            loss_on == "completion" and form.name in ("messages", "text")
        ):
            wanted = "messages" if loss_on == "assistant" else "prompt and completion"
            self._note(
                where,
                f"expected rows with {wanted} for data.loss_on: {loss_on} (--loss-on), found "
                f"{said(form)}; leave it out",
            )


def _taken(
    parts: Sequence[Rows], weights: Sequence[float], held_out: AbstractSet[int], seed: int
) -> list[int]:
    """Number the rows of all sources, each as often as the weight of its source says.

    With 2.5 each row is taken twice, and half of them, drawn by the seed, once more; of each source
    at least one is taken.
    """
    generator = random.Random(seed)
    taken: list[int] = []
    start = 0
    for part, weight in zip(parts, weights, strict=True):
        numbers = [each for each in range(start, start + len(part.rows)) if each not in held_out]
        times = int(weight)
        num_more = round((weight - times) * len(numbers))
        if times == num_more == 0:
            num_more = min(1, len(numbers))
        taken += numbers * times + sorted(generator.sample(numbers, num_more))
        start += len(part.rows)
    return taken


def _held_out(rows: Rows, share: float, seed: int) -> list[int]:
    """Choose a share of the rows to hold out, by their numbers."""
    from datasets import Dataset

    num_rows = len(rows.rows)
    if num_rows < 2:
        raise DataFormatError(
            f"{rows.places[0]}: expected at least two rows to hold some out for validation, found "
            "one; leave out data.validation (--validation)"
        )
    num_held_out = min(max(1, round(share * num_rows)), num_rows - 1)
    numbers = Dataset.from_dict({"row": list(range(num_rows))})
    return sorted(numbers.train_test_split(num_held_out, seed=seed)["test"]["row"])


def _joined(parts: Sequence[Rows]) -> Rows:
    found = Rows(parts[0].form)
    for part in parts:
        found.rows += part.rows
        found.places += part.places
        found.read += part.read
    found.unused = tuple(sorted({name for part in parts for name in part.unused}))
    return found
