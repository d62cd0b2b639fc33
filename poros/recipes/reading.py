"""A recipe from a YAML file and from options, with all that is wrong in it, each with its place."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from poros.errors import RecipeError, quoted
from poros.recipes.recipe import AdapterRecipe, Recipe, TrainingRecipe, made
from poros.recipes.rules import RULES, Refused

_MOST_NUM_BYTES = 2**20
_GROUPS = ("adapter", "training")
_KINDS = {"": Recipe, "adapter.": AdapterRecipe, "training.": TrainingRecipe}


class Given(NamedTuple):
    """A value, and where it was said: ``recipe.yaml:12``, or ``--rank``."""

    value: Any
    where: str


class Problem(NamedTuple):
    """Something that is wrong, where, and what to do about it."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def read_recipe(
    path: Path | None,
    options: Mapping[str, Given],
    *,
    further: Callable[[Recipe], Sequence[Problem]] = lambda recipe: (),
) -> Recipe:
    """The recipe of a file and of options, which go before what the file says.

    Args:
        path: The file; None if there is none.
        options: By dotted name.
        further: Finds what else is wrong in a recipe whose values are right, such as in its data.

    Raises:
        RecipeError: With everything that is wrong, each with its place and what to do about it.
    """
    problems: list[Problem] = []
    given = dict(_read_yaml(path, problems)) if path is not None else {}
    given.update(options)
    where = str(path) if path is not None else "the command line"
    values = dict(_values(given, problems))
    problems += [
        Problem(where, f"{name}: expected one, found none; {_missing(name)}")
        for name in ("model", "data")
        if name not in given
    ]
    _raise(problems)
    recipe = made(values)
    problems += _contradictions(recipe, given)
    _raise(problems)
    problems += further(recipe)
    _raise(problems)
    return recipe


def written(recipe: Recipe) -> str:
    """The recipe as YAML, as ``read_recipe`` reads it."""
    text: str = yaml.safe_dump(recipe.as_dict(), sort_keys=False, allow_unicode=False)
    return text


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise RecipeError("\n".join(map(str, problems)))


def _missing(name: str) -> str:
    return "give --recipe or MODEL and DATA" if name == "model" else f"add {name}: ..."


def _read_yaml(path: Path, problems: list[Problem]) -> Iterator[tuple[str, Given]]:
    """Dotted names and values of a file."""
    try:
        content = path.read_bytes()
        if len(content) > _MOST_NUM_BYTES:
            raise ValueError(f"expected a recipe, found {len(content)} bytes")
        node = yaml.compose(content.decode("utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        what = quoted(error.problem or "", is_bare=True)
        problems.append(Problem(line, f"expected YAML, found a mistake in it ({what}); mend it"))
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = quoted(getattr(error, "strerror", None) or str(error), is_bare=True)
        problems.append(Problem(str(path), f"expected a recipe in YAML, found: {reason}"))
        return
    if not isinstance(node, yaml.MappingNode):
        text = "expected `name: value` lines, found none; see poros finetune --print-recipe"
        problems.append(Problem(str(path), text))
        return
    yield from _entries(node, "", path, problems)


def _entries(
    node: yaml.MappingNode, prefix: str, path: Path, problems: list[Problem]
) -> Iterator[tuple[str, Given]]:
    seen: set[str] = set()
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = prefix + str(getattr(key, "value", "?"))
        if name in seen:
            problems.append(Problem(where, f"{name}: expected it once, found it again; remove one"))
        seen.add(name)
        if name in _GROUPS:
            if isinstance(value, yaml.MappingNode):
                yield from _entries(value, f"{name}.", path, problems)
            else:
                text = f"{name}: expected indented lines below it, found {_shown(_plain(value))}"
                problems.append(Problem(where, f"{text}; see poros finetune --print-recipe"))
        elif name not in RULES:
            problems.append(Problem(where, f"{quoted(name)} is not known{_nearest(name)}"))
        else:
            yield name, Given(_plain(value), where)


def _plain(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError:
        return None
    finally:
        loader.dispose()


def _nearest(name: str) -> str:
    own = get_close_matches(name, RULES, n=1, cutoff=0.5)
    # In the wrong group, or in none.
    last = name.rpartition(".")[2]
    own += [known for known in RULES if known.rpartition(".")[2] == last][:1]
    own += get_close_matches(last, [known.rpartition(".")[2] for known in RULES], n=1, cutoff=0.6)
    found = next(iter(own), None)
    return f"; did you mean {found}?" if found else "; remove it"


def _values(given: Mapping[str, Given], problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    optional = {
        f"{prefix}{each.name}"
        for prefix, kind in (
            ("", Recipe),
            ("adapter.", AdapterRecipe),
            ("training.", TrainingRecipe),
        )
        for each in fields(kind)
        if each.default is None and each.default is not MISSING
    }
    for name, (value, where) in given.items():
        if value is None and name in optional:
            continue
        rule = RULES[name]
        try:
            yield name, rule.convert(value)
        except Refused as error:
            found = str(error) or _shown(value)
            remedy = rule.remedy or f"write {rule.expected}"
            text = f"{name}: expected {rule.expected}, found {found}; {remedy}"
            problems.append(Problem(where, text))


def _shown(value: Any) -> str:
    return "nothing" if value is None else quoted(value)


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Values by dotted name."""
    found = {each.name: getattr(recipe, each.name) for each in fields(Recipe)}
    for group in _GROUPS:
        inner = found.pop(group)
        found |= {f"{group}.{each.name}": getattr(inner, each.name) for each in fields(inner)}
    return found


def _contradictions(recipe: Recipe, given: Mapping[str, Given]) -> Iterator[Problem]:
    """What does not go together, said where the second of the two was."""

    def problem(name: str, text: str) -> Problem:
        return Problem(given[name].where, f"{name}: {text}")

    # A printed recipe has all defaults in it.
    defaults = _flat(Recipe(model="", data=""))
    values = _flat(recipe)

    def is_given(*names: str) -> bool:
        return all(name in given and values[name] != defaults[name] for name in names)

    if recipe.task == "dpo" and recipe.packing:
        yield problem(
            "packing",
            "expected false with task dpo, whose rows are pairs, found true; remove it",
        )
    if recipe.task == "dpo" and is_given("loss_on"):
        yield problem("loss_on", "expected none with task dpo, which compares answers; remove it")
    if recipe.task == "sft" and is_given("beta"):
        yield problem("beta", "expected none with task sft; remove it, or write task: dpo")
    if is_given("training.steps", "training.epochs"):
        yield problem("training.steps", "expected either steps or epochs, found both; remove one")
    if recipe.placement == "resident" and is_given("vram"):
        yield problem(
            "vram",
            "expected none with placement resident, which takes what it takes; remove one",
        )
    if recipe.training.optimizer != "lora_plus" and is_given("training.loraplus_ratio"):
        yield problem(
            "training.loraplus_ratio",
            f"expected none with optimizer {recipe.training.optimizer}; remove it, or write "
            "optimizer: lora_plus",
        )
    if recipe.training.optimizer == "schedule_free" and is_given("training.schedule"):
        yield problem(
            "training.schedule",
            "expected none with optimizer schedule_free, which has no schedule; remove it",
        )
