"""Opens files for reading, and reads parts of them into existing memory."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

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
