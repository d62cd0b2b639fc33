"""The rows that a recipe names, from files or from a hub of data sets."""

from dataclasses import dataclass
from pathlib import Path

from poros.errors import RecipeError, quoted
from poros.recipes.reading import Problem
from poros.recipes.recipe import Recipe
from poros.recipes.rows import Rows, read_files, require_task, take_rows


@dataclass(frozen=True)
class Data:
    """The rows of a run."""

    rows: Rows
    validation: Rows | None
    """Of another file; None if they are a share of ``rows``, or none."""


def read_data(recipe: Recipe, problems: list[Problem] | None = None) -> Data:
    """The rows that a recipe names; those of files are checked line by line.

    Args:
        recipe: The recipe.
        problems: Gets what is wrong; None raises instead.

    Raises:
        RecipeError: With all that is wrong.
    """
    found: list[Problem] = []
    rows = _rows(recipe.data, "data")
    found += rows.found() + require_task(rows, recipe.task, recipe.data)
    validation = None
    if isinstance(recipe.validation, str):
        validation = _rows(recipe.validation, "validation")
        found += validation.found() + require_task(validation, recipe.task, recipe.validation)
        if not found and validation.format != rows.format:
            text = f"expected {rows.format}, as in {recipe.data}, found {validation.format}"
            found.append(Problem(recipe.validation, f"{text}; give rows of one format"))
    if recipe.validation is not None and not found and len(rows.rows) < 2 and validation is None:
        text = "validation: expected at least two rows to hold one out, found one"
        found.append(Problem(recipe.data, f"{text}; give more rows, or no validation"))
    if problems is not None:
        problems += found
    elif found:
        raise RecipeError("\n".join(map(str, found)))
    return Data(rows, validation)


def _rows(source: str, name: str) -> Rows:
    path = Path(source)
    if path.exists() and (path.is_dir() or path.suffix in (".jsonl", ".json")):
        return read_files(path, name)
    from datasets import load_dataset

    try:
        if path.exists():
            found = load_dataset(path.suffix.lstrip("."), data_files=str(path), split="train")
        else:
            found = load_dataset(source, split="train")
    except Exception as error:  # whatever a hub, or a reader of its files, says
        rows = Rows()
        reason = quoted(str(error).split("\n")[0], is_bare=True)
        text = f"{name}: expected a file or a data set of the hub, found none: {reason}"
        rows.problems.append(Problem(source, text))
        return rows
    return take_rows(found, source)
