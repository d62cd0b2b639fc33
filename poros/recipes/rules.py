"""What each value of a recipe may be."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from poros.config import parse_num_bytes
from poros.errors import PolicyError, quoted


class Refused(Exception):
    """A value that cannot be; the text says what was found instead, if not just the value."""


class Rule(NamedTuple):
    """What a value may be.

    Attributes:
        expected: In words.
        convert: Gives the value as the recipe takes it; raises ``Refused``.
        remedy: What to do, if more than to write what was expected.
    """

    expected: str
    convert: Callable[[Any], Any]
    remedy: str = ""


def is_path(text: str) -> bool:
    """Whether ``text`` can only be a path: a name on a hub has one slash, and no dot before it."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused
    return value


def _number(value: Any) -> float:
    # YAML reads 2e-4 as a text.
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Refused
        found = float(value)
    except ValueError:
        raise Refused from None
    if found != found or found in (float("inf"), float("-inf")):
        raise Refused
    return found


def _whole(least: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        found = _number(value)
        if found != int(found) or found < least:
            raise Refused
        return int(found)

    return convert


def _between(least: float, most: float, *, least_itself: bool, most_itself: bool) -> Any:
    def convert(value: Any) -> float:
        found = _number(value)
        if found < least or found > most:
            raise Refused
        if (found == least and not least_itself) or (found == most and not most_itself):
            raise Refused
        return found

    return convert


def _one_of(*names: str) -> Rule:
    def convert(value: Any) -> str:
        if value not in names:
            raise Refused
        return str(value)

    return Rule(f"one of {', '.join(names)}", convert)


def _dtype(value: Any) -> str:
    names = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if not isinstance(value, str) or value not in names:
        raise Refused
    return names[value]


def _size(value: Any) -> str:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Refused
        parse_num_bytes(value, "size")
    except PolicyError:
        raise Refused from None
    if isinstance(value, int | float):
        raise Refused(f"{value!r}, without a unit")
    return value


def _existing(kind: str, suffixes: tuple[str, ...] = ()) -> Callable[[Any], str]:
    """A name on a hub, or a path to something that is there."""

    def convert(value: Any) -> str:
        text = _text(value)
        path = Path(text).expanduser()
        if (is_path(text) or text.endswith(suffixes)) and not path.exists():
            raise Refused(f"{quoted(text)}, where nothing is")
        if text.endswith(suffixes) and path.is_dir():
            raise Refused(f"the folder {quoted(text)}")
        return str(path) if path.exists() else text

    return convert


def _validation(value: Any) -> float | str:
    if isinstance(value, bool):
        raise Refused
    if isinstance(value, str) and not _is_number(value):
        return _existing("data", (".jsonl", ".json"))(value)
    found = _number(value)
    if not 0 < found < 1:
        raise Refused
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _modules(value: Any) -> str | tuple[str, ...]:
    if value == "all-linear":
        return "all-linear"
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise Refused
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise Refused
    return tuple(name.strip() for name in names)


_POSITIVE = _between(0, float("inf"), least_itself=False, most_itself=False)
_NOT_NEGATIVE = _between(0, float("inf"), least_itself=True, most_itself=False)
_SHARE = _between(0, 1, least_itself=True, most_itself=False)
_WHOLE = Rule("a whole number from 1 on", _whole(1))
_SIZE = Rule("a size with its unit, such as 22GiB or 24GB", _size, "add the unit")

RULES: Mapping[str, Rule] = {
    "model": Rule(
        "a checkpoint's folder, a store's, or a name on the hub",
        _existing("model"),
        "give a folder that is there, or a name such as Qwen/Qwen2.5-7B-Instruct",
    ),
    "data": Rule(
        "a JSONL file, a folder of them, or a name on the hub",
        _existing("data", (".jsonl", ".json", ".parquet")),
        "give a file that is there",
    ),
    "task": _one_of("sft", "dpo"),
    "out": Rule("a folder", _text),
    "validation": Rule(
        "a share of the rows between 0 and 1, or a JSONL file that is there", _validation
    ),
    "max_length": Rule("a whole number from 8 on", _whole(8)),
    "packing": Rule("true or false", _flag),
    "loss_on": _one_of("answers", "everything"),
    "chat_template": Rule("chatml, plain, or a file with a template", _text),
    "vram": _SIZE,
    "host_memory": _SIZE,
    "quantization": _one_of("nf4", "none"),
    "placement": _one_of("streamed", "resident"),
    "beta": Rule("a number above 0", _POSITIVE),
    "allow_untested": Rule("true or false", _flag),
    "adapter.kind": _one_of("lora", "rslora", "dora"),
    "adapter.rank": _WHOLE,
    "adapter.alpha": Rule("a number above 0", _POSITIVE),
    "adapter.dropout": Rule("a number from 0 to below 1", _SHARE),
    "adapter.target_modules": Rule("all-linear, or names of modules", _modules),
    "adapter.dtype": Rule("one of float32, bfloat16", _dtype),
    "training.epochs": Rule("a number above 0", _POSITIVE),
    "training.steps": _WHOLE,
    "training.batch_size": _WHOLE,
    "training.accumulation": _WHOLE,
    "training.learning_rate": Rule("a number above 0", _POSITIVE),
    "training.schedule": _one_of("cosine", "linear", "constant"),
    "training.warmup": Rule("a share of the steps below 1, or a number of them", _NOT_NEGATIVE),
    "training.optimizer": _one_of(
        "adamw", "adamw_8bit", "paged_adamw_8bit", "lora_plus", "schedule_free"
    ),
    "training.loraplus_ratio": Rule("a number above 0", _POSITIVE),
    "training.weight_decay": Rule("a number from 0 on", _NOT_NEGATIVE),
    "training.max_grad_norm": Rule("a number from 0 on", _NOT_NEGATIVE),
    "training.save_every": _WHOLE,
    "training.log_every": _WHOLE,
    "training.seed": Rule("a whole number from 0 on", _whole(0)),
}
"""By dotted name."""
