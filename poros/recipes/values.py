"""Kinds of values: each parses what was written, and describes what it expects.

What was written is a text, or a list or a mapping of such: no type that YAML has guessed.
"""

import enum
import math
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from poros.config import LEAST_BUDGET, parse_num_bytes
from poros.errors import PolicyError, quoted

TRUTH = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}


class UnexpectedValueError(ValueError):
    """A value is not what a kind expects; the message describes what it expects."""


@dataclass(frozen=True)
class Kind:
    """One kind of values.

    Args:
        expects: In words, for people: "a number above 0".
        read: From what was written; raises ``ValueError`` if it is none of these.
        takes_list: Whether it may be a list or a mapping.
        shown: In the help of the command line.
    """

    expects: str
    read: Callable[[Any], Any]
    takes_list: bool = False
    shown: str = "TEXT"

    def of(self, written: Any) -> Any:
        """The value of a text, a list or a mapping.

        Raises:
            UnexpectedValueError: If there is none.
        """
        try:
            if isinstance(written, str) or (written and self.takes_list):
                return self.read(written)
        except UnexpectedValueError:
            raise
        except (ValueError, OverflowError, RuntimeError, LookupError, PolicyError):
            pass
        raise UnexpectedValueError(f"expected {self.expects}, found {described(written)}")


def described(written: Any) -> str:
    """What was written, for a message."""
    if isinstance(written, list):
        return "a list" if written else "an empty list"
    if isinstance(written, dict):
        return "a mapping"
    return "nothing" if written is None else quoted(written, limit=60)


def whole(least: int = 1, most: int = 2**31 - 1) -> Kind:
    """Make a kind of whole numbers within bounds; it reads ``1_000`` and ``1e3``."""

    def read(text: str) -> int:
        number = float(text) if re.fullmatch(r"[0-9.]+[eE][+]?[0-9]+", text) else int(text)
        if number != int(number) or not least <= number <= most:
            raise ValueError
        return int(number)

    upper = f" to {most}" if most < 2**31 - 1 else " or more"
    return Kind(f"a whole number, {least}{upper}", read, shown="INTEGER")


def real(least: float, most: float = math.inf, *, is_above: bool = False) -> Kind:
    """A finite number within bounds, of which the lower does not count itself if ``is_above``."""

    def read(text: str) -> float:
        number = float(text)
        is_within = number > least if is_above else number >= least
        if not (is_within and number <= most and math.isfinite(number)):
            raise ValueError
        return number

    lower = f"above {least:g}" if is_above else f"from {least:g}"
    upper = "" if most == math.inf else f" up to {most:g}"
    return Kind(f"a number {lower}{upper}", read, shown="NUMBER")


def share_or_number(*, is_above: bool = False) -> Kind:
    """A share below 1, not 0 if ``is_above``, or a whole number."""
    share = real(0, is_above=is_above)

    def read(text: str) -> float:
        number: float = share.read(text)
        return number if number < 1 else whole().read(text)

    return Kind(f"{share.expects} and below 1, or a whole number", read, shown="NUMBER")


def choice(*names: str, refused: Iterable[str] = (), why: str = "") -> Kind:
    """One of some names; of those that are ``refused``, why."""

    def read(text: str) -> str:
        if text in refused:
            raise UnexpectedValueError(why)
        return {name: name for name in names}[text]

    return Kind(f"one of {', '.join(names)}", read, shown="|".join(names))


def size() -> Kind:
    """Bytes such as ``22GiB``; kept as it is written."""

    def read(text: str) -> str:
        parse_num_bytes(text, "size", at_least=LEAST_BUDGET)
        return text

    return Kind("a size such as 22GiB or 24GB", read, shown="SIZE")


def _text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError
    Path(text).expanduser()  # a RuntimeError if the user is not there
    return text


def one_or_several() -> Kind:
    """A text, or a list of them, which becomes a tuple."""

    def read(written: Any) -> Any:
        return tuple(map(_TEXT.of, written)) if isinstance(written, list) else _TEXT.of(written)

    return Kind(_TEXT.expects, read, takes_list=True)


def is_name(text: str) -> bool:
    """Whether a text is a name of modules, and no pattern of such."""
    return re.fullmatch(r"[\w.\- ]*", text) is not None


def modules() -> Kind:
    """``all-linear``, a list of names of modules, or a pattern, as PEFT takes them."""

    def read(written: Any) -> str | tuple[str, ...]:
        names = written if isinstance(written, list) else [written]
        if isinstance(written, str) and not is_name(written):
            try:
                re.compile(written)  # PEFT takes a text for a pattern of whole names
            except re.error as error:
                raise ValueError from error
            return written
        if not all(re.fullmatch(r"[A-Za-z_][\w.-]*", str(each)) for each in names):
            raise ValueError
        return tuple(names) if isinstance(written, list) else str(written)

    hint = "all-linear or a list of names of modules such as [q_proj, v_proj], or a pattern"
    return Kind(hint, read, takes_list=True)


def share_or_source() -> Kind:
    """A share of the rows, such as ``0.05`` or ``5%``, or the name of a file."""

    def read(text: str) -> float | str:
        match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*", text)
        if match is None:
            return _text(text)
        number = float(match[1]) / (100 if match[2] else 1)
        if not 0 <= number <= 0.5:
            raise ValueError
        return number

    expects = "a share of the rows from 0 up to 0.5, or a file of rows"
    return Kind(expects, read, shown="NUMBER|FILE")


def kind_of(hint: Any, choices: Iterable[str] = ()) -> Kind:
    """The kind of a field, from its type hint: numbers are finite and not negative.

    Args:
        hint: ``bool``, ``int``, ``float``, ``str``, an ``Enum``, ``Literal``, ``list``, ``dict``,
            one of them annotated with a kind, or a union of them.
        choices: The only values there are, if the field's metadata lists them.
    """
    members = [Literal[tuple(choices)]] if choices else _members(hint)
    kinds = [_member_kind(each) for each in members]
    if len(kinds) == 1:
        return kinds[0]

    def read(written: Any) -> Any:
        for each in kinds:
            try:
                return each.of(written)
            except UnexpectedValueError:
                continue
        raise ValueError

    expects = " or ".join(dict.fromkeys(each.expects for each in kinds))
    shown = "|".join(dict.fromkeys(each.shown for each in kinds))
    return Kind(expects, read, any(each.takes_list for each in kinds), shown)


def _members(hint: Any) -> list[Any]:
    """List the types of a hint in the order in which they are tried: a text may be anything."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    members: tuple[Any, ...] = get_args(hint) if is_union else (hint,)
    every = [each for each in members if each is not type(None)]
    if any(isinstance(each, enum.EnumType) or _origin(each) is dict for each in every):
        return [each for each in every if each is not str]  # one of its values, or JSON
    return sorted(every, key=lambda each: (each is str, _origin(each) is list))


def _origin(hint: Any) -> Any:
    return get_origin(hint) or hint


def _member_kind(member: Any) -> Kind:
    origin = _origin(member)
    if origin is Annotated:
        given: Kind = get_args(member)[1]
        return given
    if origin is Literal and get_args(member) != (False,):
        return choice(*get_args(member))
    if isinstance(origin, enum.EnumType):
        every: list[Any] = list(origin)
        return choice(*(str(each.value) for each in every))
    if origin is list:
        item = kind_of(*get_args(member))

        def read(written: Any) -> list[Any]:
            return [item.of(each) for each in (written if isinstance(written, list) else [written])]

        return Kind(f"a list of {item.expects}", read, takes_list=True)
    kinds = {bool: _SWITCH, Literal: _SWITCH, int: whole(0), float: real(0), str: _TEXT}
    mapping = Kind("a mapping such as {name: value}", _mapping, takes_list=True)
    return {**kinds, dict: mapping}.get(origin, Kind("nothing", {}.__getitem__))


def _mapping(written: Any) -> dict[str, Any]:
    if not isinstance(written, dict):
        raise ValueError
    return {name: _plain(each) for name, each in written.items()}


def _plain(written: Any) -> Any:
    """A value of no particular kind."""
    if isinstance(written, list):
        return [_plain(each) for each in written]
    if not isinstance(written, str):
        return written and _mapping(written)
    for kind in (_SWITCH, whole(-(2**31)), real(-math.inf)):
        try:
            return kind.of(written)
        except UnexpectedValueError:
            continue
    return written


_TEXT = Kind("a text that is not empty, with ~NAME only for a user that is there", _text)
_SWITCH = Kind("true or false", lambda text: TRUTH[text.lower()], shown="BOOL")
