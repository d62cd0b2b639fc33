"""Opens files for reading, reads parts of them into existing memory, and parses JSON strictly."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from poros.errors import quoted

_AT_ONCE_NUM_BYTES = 64 * 2**20


def open_descriptor(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; links are followed.

    It never waits for a pipe and never opens a device, which can itself have an effect.

    Returns:
        The descriptor, which the caller closes, and its status.

    Raises:
        OSError: If the system reports an error.
        ValueError: If it is not a regular file, or the name cannot be one.
    """
    status = os.stat(path)
    if stat.S_ISREG(status.st_mode):
        # A pipe that took the place of the file in between would block without the flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor, status
        os.close(descriptor)
    raise ValueError("a folder, a pipe or a device")


def open_regular(path: Path) -> BinaryIO:
    """As ``open_descriptor``, as a binary file object."""
    return os.fdopen(open_descriptor(path)[0], "rb")


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` from ``offset`` on; the position of the descriptor is not used.

    Returns:
        How many bytes there were: fewer than wanted only if the file ends before.

    Raises:
        OSError: If the system reports an error.
    """
    done = 0
    while done < len(target):
        piece = target[done : done + _AT_ONCE_NUM_BYTES]
        count = os.preadv(descriptor, [piece], offset + done)
        if not count:
            break
        done += count
    return done


def parse_strictly(text: str) -> Any:
    """Parse JSON as the standard defines it.

    Python's own parser also accepts duplicate keys, NaN, Infinity, and keys with surrogates.

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
