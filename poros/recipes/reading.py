"""Reads recipes: YAML with the line of every value, and flags of the command line on top.

Nothing is raised for the first thing that is wrong: all problems are collected, each with the file
and line or the flag that it comes from, what was expected, what was found, and what to do.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from poros.errors import RecipeError, quoted, reason_of
from poros.recipes import passing
from poros.recipes.recipe import METHODS, SECTIONS, Recipe, named, settings
from poros.recipes.values import UnexpectedValueError, described, takes_list, value_of

_INSTEAD = {
    "training.max_steps": "training.num_train_epochs",
    "training.num_train_epochs": "training.max_steps",
    "memory.slots": "memory.vram",
    "memory.vram": "memory.slots",
}
"""Settings of which one is given: a flag for it replaces what a file says of the other."""


class _Name(str):
    """A name in a file, with its line."""

    line = 0


class _Loader(yaml.BaseLoader):
    """Reads texts, lists and mappings of YAML; types are those of the settings.

    Raises:
        MarkedYAMLError: Also for an alias of a list or a mapping, since a few lines of them are as
            much as any memory, and for a name that stands twice.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        node = super().compose_node(parent, index)
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise MarkedYAMLError(problem="an alias of a list; write it out", problem_mark=mark)
        return node

    def construct_scalar(self, node: Any) -> Any:
        is_nothing = node.style is None and node.value.lower() in ("", "null", "~")
        return None if is_nothing else super().construct_scalar(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[_Name, Any]:
        found: dict[_Name, Any] = {}
        for key, value in node.value:
            name = _Name(self.construct_object(key))
            name.line = key.start_mark.line + 1
            for each in found:
                if each == name:
                    problem = f"{name} on line {each.line} too; remove one"
                    raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            found[name] = self.construct_object(value)
        return found


@dataclass
class Draft:
    """A recipe that is being read: its values, their places, and the problems.

    Attributes:
        written: Texts, and lists and mappings of texts, by dotted key.
        values: Values by dotted key.
        origins: ``recipe.yaml:12`` or a flag, by dotted key.
        problems: Problems, one line each.
        file: The recipe's file, if there is one.
    """

    written: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    file: str | None = None

    def problem(self, key: str, what: str) -> None:
        """Note a problem of a key, at its place."""
        where = self.origins.get(key) or self.file or "command line"
        shown = quoted(key, is_bare=True, limit=80)
        # A flag says which setting is meant, a line of a file does not.
        self.problems.append(
            f"{where}: {what}" if where == _flag(key) else f"{where}: {shown}: {what}"
        )

    def placed(self, message: str) -> str:
        """Put the place of a setting before a message that begins with its key or its section.

        A library that refuses a section's settings names some of them: their places are put there.
        """
        key, _, said = message.partition(":")
        key, words = key.partition(" ")[0], {*re.findall(r"\w+", said)}
        named = [each for each in self.origins if each.startswith(f"{key}.")]
        named = [each for each in named if each.partition(".")[2] in words] or [key]
        places = dict.fromkeys(self.origins[each] for each in named if each in self.origins)
        return ": ".join([", ".join(places), message] if places else [message])

    def recipe(self) -> Recipe:
        """Build the recipe, with defaults for what is not set. Needs a draft without problems."""
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for key, value in self.values.items():
            section, name = key.split(".")
            where = parts[section] if key in settings() else parts[section].setdefault("more", {})
            where[name] = value
        return Recipe(**{name: SECTIONS[name](**values) for name, values in parts.items()})


def read_recipe(file: Path | None, flags: Mapping[str, str]) -> Draft:
    """Read a file and flags into a draft that lists every problem.

    Args:
        file: YAML; None for flags alone.
        flags: Texts by dotted key; each replaces the file's value.

    Raises:
        RecipeError: If the file is no YAML of sections, so that nothing in it can be read.
    """
    draft = Draft()
    if file is not None:
        draft.file = quoted(str(file), is_bare=True)
        _read_file(draft, file)
    for key, text in flags.items():
        draft.origins[key] = _flag(key) or "--set"
        if key in _INSTEAD and _INSTEAD[key] not in flags:
            draft.written.pop(_INSTEAD[key], None)
        section, _, name = key.partition(".")
        if section in SECTIONS and name:
            draft.written[key] = text
        else:
            _unknown(draft, key, "", section)
    _read_values(draft)
    return draft


def _flag(key: str) -> str:
    return settings()[key].flag if key in settings() else ""


def _from_flag(text: str) -> Any:
    """Read a flag whose setting takes lists: a list or a mapping of YAML, or names with commas."""
    if text.startswith(("[", "{")):
        try:
            return yaml.load(text, _Loader)
        except yaml.YAMLError:
            return text
    names = [each.strip() for each in text.split(",")]
    return names if len(names) > 1 else text


def _read_values(draft: Draft) -> None:
    """Turn what was written into values, each of the type of its setting."""
    given = draft.written.get("training.method")
    method = given if given in METHODS else METHODS[0]
    for key, written in draft.written.items():
        name = key.partition(".")[2]
        setting = settings().get(key)
        default = setting.default if setting is not None else None
        if written is None and default is None and setting is not None:
            continue
        hint = setting.hint if setting is not None else None
        try:
            hint = hint or _passed_on(draft, key, method)
            if hint is None:
                continue
            flag = draft.origins[key]
            is_flag = flag.startswith("--")
            if is_flag and takes_list(hint):
                written = _from_flag(written)
            draft.values[key] = value_of(hint, written)
        except UnexpectedValueError as error:
            before = f"{flag} " if is_flag and flag != "--set" else f"{name}: "
            draft.problem(key, f"{error}; {_example(before, default)}")


def _passed_on(draft: Draft, key: str, method: str) -> Any:
    """Return the type of a library's field; None, with a problem noted, if recipes refuse it."""
    section, name = key.split(".", 1)
    why = None if key in settings() else passing.refused(section, name, method)
    if why is not None:
        draft.problem(key, f"expected a field that a recipe passes on, found one of others: {why}")
        return None
    # A name from another tool, or of another section, needs no library to be known as wrong.
    if section not in passing.SECTIONS or (key not in settings() and named(name)):
        _unknown(draft, key, section, name)
        return None
    try:
        theirs = passing.types_of(section, method)
    except ImportError as error:
        draft.problem(key, f"expected trl and peft to read it with, found: {error}; install them")
        return None
    if name not in theirs:
        _unknown(draft, key, section, name, theirs)
    return theirs.get(name)


def _example(before: str, default: Any) -> str:
    if default is None or default == "":
        return "write one, or leave it out" if default is None else "write one"
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"write for example {before}{shown}, the default"


def _read_file(draft: Draft, file: Path) -> None:
    where = draft.file or ""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"{where}: expected a file to read, found: {reason_of(error)}; check the path"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise RecipeError(
            f"{where}:{number}: expected UTF-8, found other bytes; save it as UTF-8"
        ) from error
    try:
        said = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        problem = quoted(getattr(error, "problem", None) or str(error), is_bare=True)
        raise RecipeError(
            f"{where}{line}: expected YAML, found: {problem}; look at this line and the one before "
            "it: indentation by spaces, a space after each colon, quotes closed"
        ) from error
    if not isinstance(said, dict):
        found = "an empty file" if said is None else "something else"
        raise RecipeError(
            f"{where}:1: expected sections such as `model:` and `data:`, found {found}; "
            "`poros finetune MODEL DATA --print-recipe` prints a whole recipe"
        )
    for name, value in said.items():
        draft.origins[name] = f"{where}:{name.line}"
        if name not in SECTIONS:
            _unknown(draft, name, "", name)
        elif isinstance(value, dict):
            for setting, written in value.items():
                draft.origins[f"{name}.{setting}"] = f"{where}:{setting.line}"
                draft.written[f"{name}.{setting}"] = written
        elif isinstance(value, str) and name in ("model", "data"):
            draft.origins[f"{name}.source"] = draft.origins[name]
            draft.written[f"{name}.source"] = value  # model: NAME
        else:
            draft.problem(
                name,
                "expected settings below it, each on a line of its own, found "
                f"{described(value)}; indent them, or remove the section",
            )


def _unknown(draft: Draft, key: str, section: str, name: str, theirs: Iterable[str] = ()) -> None:
    """Note an unknown name: of a setting, or of a section if ``section`` is empty.

    Args:
        theirs: Names of the library's fields for this section and method.
    """
    known = [each.split(".")[1] for each in settings() if each.startswith(f"{section}.")]
    known = known or list(SECTIONS)
    same = named(name)
    near = same or get_close_matches(name, [*known, *theirs], n=1, cutoff=0.7)
    remedy = f"there are {', '.join(sorted(known))}"
    if near:
        remedy = f"did you mean {near[0]}{' here' if same else ''}?"
    elif section in passing.SECTIONS:
        remedy += ", and fields of the library's configuration for this method"
    what = f"a setting of {section}" if section else "a section"
    draft.problem(key, f"expected {what}, found an unknown name; {remedy}")
