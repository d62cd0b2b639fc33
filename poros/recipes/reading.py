"""Reads recipes: YAML with the line of every value, and flags of the command line on top.

Nothing is raised for the first thing that is wrong: all problems are collected, each with the file
and line or the flag that it comes from, what was expected, what was found, and what to do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.config import ALLOW_IS_GONE
from poros.errors import RecipeError, quoted, reason_of
from poros.recipes.recipe import SECTIONS, Recipe, Setting, settings
from poros.recipes.values import UnexpectedValueError

if TYPE_CHECKING:
    from yaml import MappingNode, Node

_MOST_NUM_BYTES = 1_000_000
_MOST_SHOWN = 60
_NULL = "tag:yaml.org,2002:null"

# What settings are called elsewhere; only for what an error suggests.
_ELSEWHERE = {
    "lr": "training.learning_rate",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.target_modules",
    "base_model": "model.source",
    "model_name_or_path": "model.source",
    "dataset": "data.source",
    "datasets": "data.source",
    "dataset_path": "data.source",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "max_steps": "training.steps",
    "micro_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.accumulation",
    "lr_scheduler": "training.schedule",
    "lr_scheduler_type": "training.schedule",
    "warmup_ratio": "training.warmup",
    "optim": "training.optimizer",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "sample_packing": "data.packing",
    "val_set_size": "data.validation",
    "output_dir": "output.folder",
    "save_steps": "output.save_every",
    "eval_steps": "output.evaluate_every",
    "vram_budget": "memory.vram",
    "load_in_4bit": "model.quantization",
}


@dataclass
class Draft:
    """A recipe that is being read: its values, their places, and the problems.

    Attributes:
        values: By dotted key.
        origins: ``recipe.yaml:12`` or a flag, by dotted key.
        problems: One line each.
        file: The recipe's file, if there is one.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    file: str | None = None

    def problem(self, key: str, what: str, where: str | None = None) -> None:
        """Note a problem of a key, at its place unless another is given."""
        where = where or self.origins.get(key) or self.file or "command line"
        # A flag says which setting is meant, a line of a file does not.
        self.problems.append(
            f"{where}: {what}" if where == _flag(key) else f"{where}: {key}: {what}"
        )

    def recipe(self) -> Recipe:
        """Build the recipe, with defaults for what is not set. Needs a draft without problems."""
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for key, value in self.values.items():
            section, name = key.split(".")
            parts[section][name] = value
        return Recipe(**{name: SECTIONS[name](**values) for name, values in parts.items()})

    def refuse(self) -> None:
        """Raise if there are problems.

        Raises:
            RecipeError: With a line for each.
        """
        if not self.problems:
            return
        shown = self.problems[:_MOST_SHOWN]
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown)} more")
        raise RecipeError("\n".join(shown))


def read_recipe(file: Path | None, flags: Mapping[str, str]) -> Draft:
    """Read a file and flags into a draft that lists every problem.

    Args:
        file: YAML; None for flags alone.
        flags: Texts by dotted key; each replaces the file's value.
    """
    draft = Draft()
    if file is not None:
        draft.file = quoted(str(file), is_bare=True)
        _read_file(draft, file)
    known = dict(settings())
    for key, text in flags.items():
        flag = known[key].flag
        draft.origins[key] = flag
        try:
            draft.values[key] = _from_flag(known[key], text)
        except UnexpectedValueError as error:
            draft.problem(key, f"{error}; {_example(flag + ' ', known[key])}")
    return draft


def _flag(key: str) -> str:
    return next((setting.flag for name, setting in settings() if name == key), "")


def _from_flag(setting: Setting, text: str) -> Any:
    names = [each.strip() for each in text.split(",")]
    is_option = setting.flag.startswith("--")  # a path may have commas in its name
    if setting.kind.takes_list and is_option and len(names) > 1:
        return tuple(setting.kind.of(each) for each in names)
    return setting.kind.of(text)


def _example(before: str, setting: Setting) -> str:
    """Return an example of how the setting is written."""
    if setting.default is None or setting.default == "":
        return "write one, or leave it out" if setting.default is None else "write one"
    default = setting.default
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"write for example {before}{shown}, the default"


def _read_file(draft: Draft, file: Path) -> None:
    import yaml

    where = draft.file or ""
    try:
        data = file.read_bytes()
    except OSError as error:
        reason = quoted(reason_of(error), is_bare=True)
        draft.problems.append(f"{where}: expected a file to read, found: {reason}; check the path")
        return
    if len(data) > _MOST_NUM_BYTES:
        draft.problems.append(
            f"{where}: expected a recipe of at most {_MOST_NUM_BYTES} bytes, found {len(data)}; "
            "is it a file of data? That is the second argument: poros finetune MODEL DATA"
        )
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        draft.problems.append(
            f"{where}:{number}: expected UTF-8, found other bytes; save it as UTF-8"
        )
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        problem = quoted(getattr(error, "problem", None) or str(error), is_bare=True)
        draft.problems.append(
            f"{where}{line}: expected YAML, found: {problem}; look at this line and the one before "
            "it: indentation by spaces, a space after each colon, quotes closed"
        )
        return
    if root is None or not isinstance(root, yaml.MappingNode):
        found = "an empty file" if root is None else "something else"
        draft.problems.append(
            f"{where}:1: expected sections such as `model:` and `data:`, found {found}; "
            "`poros finetune MODEL DATA --dry-run` prints a whole recipe"
        )
        return
    for key, name, node in _entries(draft, root, ""):
        if name not in SECTIONS:
            _unknown(draft, key, name, SECTIONS, "")
        elif isinstance(node, yaml.MappingNode):
            _read_section(draft, name, node)
        elif isinstance(node, yaml.ScalarNode) and name in ("model", "data") and node.tag != _NULL:
            _read_value(draft, f"{name}.source", node)  # model: NAME
        else:
            draft.problem(
                name,
                f"expected settings below it, each on a line of its own, found {_kind(node)}; "
                "indent them, or remove the section",
                _at(draft, key),
            )


def _read_section(draft: Draft, section: str, node: "MappingNode") -> None:
    known = {key.split(".")[1] for key, _ in settings() if key.startswith(f"{section}.")}
    for key, name, value in _entries(draft, node, f"{section}."):
        if name in known:
            _read_value(draft, f"{section}.{name}", value)
        else:
            _unknown(draft, key, name, known, section)


def _entries(
    draft: Draft, node: "MappingNode", prefix: str
) -> Iterable[tuple["Node", str, "Node"]]:
    """Yield key, text and value; duplicates are problems."""
    import yaml

    seen: dict[str, int] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else _kind(key)
        line = key.start_mark.line + 1
        if name in seen:
            draft.problem(
                f"{prefix}{quoted(name, is_bare=True)}",
                f"expected it once, found it on line {seen[name]} too; remove one",
                _at(draft, key),
            )
            continue
        seen[name] = line
        yield key, name, value


def _read_value(draft: Draft, key: str, node: "Node") -> None:
    import yaml

    setting = dict(settings())[key]
    draft.origins[key] = _at(draft, node)
    example = _example(f"{key.split('.')[1]}: ", setting)
    if isinstance(node, yaml.ScalarNode) and node.tag == _NULL:
        if setting.default is not None:
            draft.problem(key, f"expected {setting.kind.expects}, found nothing; {example}")
        return
    nodes = [node]
    if isinstance(node, yaml.SequenceNode) and setting.kind.takes_list and node.value:
        nodes = list(node.value)
    found = []
    for each in nodes:
        if not isinstance(each, yaml.ScalarNode):
            what = f"expected {setting.kind.expects}, found {_kind(each)}; {example}"
            draft.problem(key, what, _at(draft, each))
            return
        try:
            found.append(setting.kind.of(each.value))
        except UnexpectedValueError as error:
            draft.problem(key, f"{error}; {example}", _at(draft, each))
            return
    draft.values[key] = tuple(found) if isinstance(node, yaml.SequenceNode) else found[0]


def _unknown(draft: Draft, node: "Node", name: str, known: Iterable[str], section: str) -> None:
    shown = quoted(name, is_bare=True, limit=60)
    key = f"{section}.{shown}" if section else shown
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    full = [each for each, _ in settings() if each.split(".")[1] == name]
    if name == "allow_untested":
        draft.problem(key, ALLOW_IS_GONE, _at(draft, node))
        return
    if near:
        remedy = f"did you mean {near[0]}?"
    elif name in _ELSEWHERE:
        remedy = f"it is called {_ELSEWHERE[name]} here"
    elif full:
        remedy = f"did you mean {full[0]}, in the section {full[0].split('.')[0]}?"
    else:
        remedy = f"there are {', '.join(sorted(known))}"
    what = f"a setting of {section}" if section else "a section"
    draft.problem(key, f"expected {what}, found an unknown name; {remedy}", _at(draft, node))


def _at(draft: Draft, node: "Node") -> str:
    return f"{draft.file}:{node.start_mark.line + 1}"


def _kind(node: "Node") -> str:
    import yaml

    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list" if node.value else "an empty list"
    return "nothing" if node.tag == _NULL else f"{quoted(node.value, limit=60)}"
