"""Opens files for reading, reads parts of them into existing memory, and maps them."""

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

_AT_ONCE_NUM_BYTES = 64 * 2**20
_MAP_NORESERVE = 0x4000  # Linux on its 64-bit machines; mmap names it from Python 3.13 on


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


def read_exactly(descriptor: int, target: memoryview, offset: int) -> None:
    """As ``read_into``, but raise if there are too few bytes.

    Raises:
        EOFError: If the file ends before.
        OSError: If the system reports an error.
    """
    done = read_into(descriptor, target, offset)
    if done < len(target):
        raise EOFError(f"the end of the file at {offset + done}")


def mapping_flags(private: bool) -> dict[str, int]:
    """Options of ``mmap``; private, what is written to a page stays in this process."""
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    # Nothing is reserved for pages that may be written: a file may be larger than memory.
    return {"flags": kind | _MAP_NORESERVE}
