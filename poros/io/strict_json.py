"""Parses JSON strictly, as the standard defines it.

Python's own parser also accepts duplicate keys, NaN, Infinity, and keys with surrogates.
"""

import json
from typing import Any

from poros.errors import quoted


def parse(text: str) -> Any:
    """Parse a text.

    Raises:
        json.JSONDecodeError: If it is no JSON.
        ValueError: If an object has a key twice, a key is no text, or a number is NaN or Infinity.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {quoted(twice, limit=40)} twice in one object; remove one")
    for name in found:
        if not name.isascii():
            name.encode()  # UnicodeEncodeError, a ValueError
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a number or null")
