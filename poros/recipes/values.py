"""The kinds of values that a recipe holds: each parses a text and describes what it expects."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.config import LEAST_BUDGET, parse_num_bytes
from poros.errors import PolicyError, quoted

TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")


class UnexpectedValueError(ValueError):
    """A text is not what a kind expects; the message describes what it expects."""


@dataclass(frozen=True)
class Kind:
    """One kind of values.

    Args:
        expects: In words, for people: "a number above 0".
        read: From a text; raises ``ValueError`` if it is none of these.
        takes_list: Whether it is given as a list of texts too.
    """

    expects: str
    read: Callable[[str], Any]
    takes_list: bool = False

    def of(self, text: str) -> Any:
        """The value that ``text`` stands for.

        Raises:
            UnexpectedValueError: If it stands for none.
        """
        try:
            return self.read(text)
        except UnexpectedValueError:
            raise
        except (ValueError, OverflowError, RuntimeError, PolicyError):
            raise UnexpectedValueError(f"expected {self.expects}, found {quoted(text)}") from None


def whole(least: int = 1, most: int = 2**31 - 1) -> Kind:
    """Make a kind of whole numbers within bounds; it reads ``1_000`` and ``1e3``."""

    def read(text: str) -> int:
        number = float(text) if re.fullmatch(r"[0-9.]+[eE][+]?[0-9]+", text) else int(text)
        if number != int(number) or not least <= number <= most:
            raise ValueError
        return int(number)

    upper = f" to {most}" if most < 2**31 - 1 else " or more"
    return Kind(f"a whole number, {least}{upper}", read)


def real(
    least: float, most: float = math.inf, *, is_above: bool = False, takes_list: bool = False
) -> Kind:
    """A number within bounds, of which the lower does not count itself if ``is_above``."""

    def read(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) or not least <= number <= most:
            raise ValueError
        if is_above and number == least:
            raise ValueError
        return number

    lower = f"above {least:g}" if is_above else f"from {least:g}"
    upper = "" if most == math.inf else f" up to {most:g}"
    return Kind(f"a number {lower}{upper}", read, takes_list)


def choice(*names: str, refused: Mapping[str, str] | None = None) -> Kind:
    """One of some names; of those that are ``refused``, why."""

    def read(text: str) -> str:
        if text in (refused or {}):
            raise UnexpectedValueError((refused or {})[text])
        if text not in names:
            raise ValueError
        return text

    return Kind(f"one of {', '.join(names)}", read)


def switch(*others: str) -> Kind:
    """Yes or no, or one of some names."""

    def read(text: str) -> bool | str:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        if text not in others:
            raise ValueError
        return text

    return Kind(" or ".join(("true or false", *others)), read)


def size() -> Kind:
    """Bytes such as ``22GiB``; kept as it is written."""

    def read(text: str) -> str:
        parse_num_bytes(text, "size", at_least=LEAST_BUDGET)
        return text

    return Kind("a size such as 22GiB or 24GB", read)


def text(*, takes_list: bool = False) -> Kind:
    """Any text that is not empty and names no home of an unknown user."""
    expects = "a text that is not empty, with ~NAME only for a user that is there"
    return Kind(expects, _text, takes_list)


def _text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError
    Path(text).expanduser()  # a RuntimeError if the user is not there
    return text


def words(*alone: str) -> Kind:
    """A name that stands alone, or a list of names."""

    def read(text: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", text):
            raise ValueError
        return text

    hint = f"{', '.join(alone)} or " if alone else ""
    return Kind(f"{hint}a list of names of modules such as [q_proj, v_proj]", read, takes_list=True)


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

    return Kind("a share of the rows from 0 up to 0.5, or a file of rows", read)
