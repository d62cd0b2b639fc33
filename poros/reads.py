"""Reading a part of an open file into memory that is there."""

import os

_AT_ONCE_NUM_BYTES = 64 * 2**20


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
    """As ``read_into``, where there have to be enough bytes.

    Raises:
        EOFError: If the file ends before.
        OSError: If the system reports an error.
    """
    done = read_into(descriptor, target, offset)
    if done < len(target):
        raise EOFError(f"the end of the file at {offset + done}")
