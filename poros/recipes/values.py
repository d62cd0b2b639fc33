"""Types of a recipe's values, read by pydantic.

Values are read from texts, or lists and mappings of texts, and not from types that YAML guesses.
"""

import enum
import functools
import operator
import re
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as Unread

from poros.config import LEAST_BUDGET, parse_num_bytes
from poros.errors import PolicyError, quoted

_IN_YAML = {"a valid boolean": "true or false", "a valid dictionary": "a mapping"}


class UnexpectedValueError(ValueError):
    """A value is not of its type; the message says what was expected and found."""


def value_of(hint: Any, written: Any) -> Any:
    """Read what was written.

    Args:
        hint: The type of the value. Numbers are finite.
        written: A text, a list or a mapping; None is nothing.

    Raises:
        UnexpectedValueError: If it is none of that type.
    """
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(written)
    except Unread as error:
        wrong = error.errors()
    wanted = [_wanted(each["msg"]) for each in wrong]
    if wanted[0].startswith("expected "):
        raise UnexpectedValueError(wanted[0])
    expected = " or ".join(dict.fromkeys(wanted))
    raise UnexpectedValueError(f"expected {expected}, found {described(wrong[-1]['input'])}")


def _wanted(message: str) -> str:
    """Return what pydantic or a check of ours expected."""
    for before in ("Input should be ", "Value error, "):
        message = message.removeprefix(before)
    message = message.partition(", unable")[0]
    if message.startswith(("greater", "less")):
        return f"a number {message}"
    return _IN_YAML.get(message, message)


def described(written: Any) -> str:
    """Describe a written value, for a message."""
    if isinstance(written, list):
        return "a list" if written else "an empty list"
    if isinstance(written, dict):
        return "a mapping"
    return "nothing" if written is None else quoted(written, limit=60)


def readable(hint: Any, choices: Iterable[str] = ()) -> Any:
    """The type that reads a field of a library from what was written.

    Numbers are not negative, texts not empty; one value may stand for a list of one.

    Args:
        choices: The only values there are, if the field's metadata lists them.
    """
    if choices:
        return Literal[tuple(choices)]
    is_union = get_origin(hint) in (Union, types.UnionType)
    members = [each for each in (get_args(hint) if is_union else (hint,)) if each is not type(None)]
    if any(isinstance(each, enum.EnumType) or _origin(each) is dict for each in members):
        members = [each for each in members if each is not str]  # one of its values, or JSON
    members.sort(key=lambda each: (each is str, _origin(each) is list))  # a text may be anything
    every: list[Any] = [_readable_member(each) for each in members]
    read = functools.reduce(operator.or_, every)
    return Annotated[read, Field(union_mode="left_to_right")] if len(members) > 1 else read


def _readable_member(member: Any) -> Any:
    origin = _origin(member)
    if isinstance(origin, enum.EnumType):
        every: list[Any] = list(origin)
        return Literal[tuple(str(each.value) for each in every)]
    if origin is list:
        return Annotated[list[readable(*get_args(member))], BeforeValidator(_several)]  # type: ignore[misc]
    if origin is dict and get_args(member)[1:] in ((), (Any,)):
        return Annotated[dict[str, Any], BeforeValidator(_plain)]
    ours = {int: Annotated[int, Field(ge=0)], float: Annotated[float, Field(ge=0)], str: Text}
    return bool if get_args(member) == (False,) else ours.get(member, member)


def takes_list(hint: Any) -> bool:
    """Whether a list or a mapping may be read as that type."""
    return _origin(hint) in (list, tuple, dict) or any(
        takes_list(each) for each in get_args(hint) if _origin(hint) is not Literal
    )


def shown(hint: Any) -> str:
    """Describe a type in the help of the command line."""
    if _origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if _origin(hint) is Annotated:
        return shown(get_args(hint)[0])
    members = [each for each in get_args(hint) if each is not type(None)]
    if members and _origin(hint) is not tuple:
        return "|".join(dict.fromkeys(map(shown, members)))
    return {int: "INTEGER", float: "NUMBER", bool: "BOOL"}.get(hint, "TEXT")


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _several(written: Any) -> Any:
    return [written] if isinstance(written, str) else written


def _plain(written: Any) -> Any:
    """Convert texts within a mapping to numbers and truth values."""
    if isinstance(written, list):
        return [_plain(each) for each in written]
    if isinstance(written, dict):
        return {name: _plain(each) for name, each in written.items()}
    try:
        return value_of(Annotated[int | float | bool, Field(union_mode="left_to_right")], written)
    except UnexpectedValueError:
        return written


def refusing(names: Iterable[str], why: str) -> BeforeValidator:
    """Refuse some names that the type would accept, with a reason."""

    def check(written: Any) -> Any:
        if written in names:
            raise ValueError(why)
        return written

    return BeforeValidator(check)


def _text(text: str) -> str:
    try:
        if text.strip() and "\0" not in text:
            Path(text).expanduser()  # a RuntimeError if the user is not there
            return text
    except RuntimeError:
        pass
    raise ValueError("a text that is not empty, with ~NAME only for a user that is there")


def _size(text: str) -> str:
    try:
        parse_num_bytes(text, "size", at_least=LEAST_BUDGET)
    except PolicyError as error:
        raise ValueError("a size such as 22GiB or 24GB") from error
    return text


def _whole_from_1(number: float) -> float:
    if number >= 1 and number != int(number):
        raise ValueError("a number below 1, or a whole number")
    return int(number) if number >= 1 else number


def is_name(text: str) -> bool:
    """Whether a text is a name of modules, and no pattern of such."""
    return re.fullmatch(r"[\w.\- ]*", text) is not None


def _modules(written: Any) -> Any:
    """Check ``all-linear``, names of modules, or a pattern of whole names, as PEFT takes them."""
    names = written if isinstance(written, list) else [written]
    is_right = bool(names) and all(
        re.fullmatch(r"[A-Za-z_][\w.-]*", each) for each in map(str, names)
    )
    if isinstance(written, str) and not is_name(written):
        with suppress(re.error):
            re.compile(written)
            is_right = True
    if not is_right:
        raise ValueError(
            "all-linear or a list of names of modules such as [q_proj, v_proj], or a pattern"
        )
    return written


def _share(written: Any) -> Any:
    """Read a share of the rows, such as ``0.05`` or ``5%``; leave the name of a file."""
    text = str(written).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return written
    if not 0 <= number <= 0.5:
        raise ValueError("a share of the rows from 0 up to 0.5, or a file of rows")
    return number


Text = Annotated[str, AfterValidator(_text)]
Size = Annotated[str, AfterValidator(_size)]
ShareOrNumber = Annotated[float, Field(ge=0), AfterValidator(_whole_from_1)]
"""A share below 1, or a whole number."""
Modules = Annotated[str | tuple[str, ...], BeforeValidator(_modules)]
ShareOrFile = Annotated[float | Text, Field(union_mode="left_to_right"), BeforeValidator(_share)]
