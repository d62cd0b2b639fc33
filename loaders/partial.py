"""Writes folders atomically: elsewhere first, then moved to their place.

Until then one is called ``.NAME.poros.partial``. Its writer keeps a lock on it for as long as it
lives, and the system releases that when the process ends, however it does. So another writer waits
for one that lives, and takes over what a dead one has left.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""The suffix of a folder that is being written, or whose writer was killed."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


@contextmanager
def partial_folder(directory: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, beside ``directory``; removed unless ``put_in_place``.

    Waits while another process, or thread, writes the same.

    Raises:
        OSError: If there is no place for it, or something is in ``directory`` by then.
    """
    partial = directory.parent / f".{directory.name}.poros{PARTIAL}"
    lock = _take(partial)
    try:
        if directory.exists() and any(directory.iterdir()):
            raise FileExistsError(errno.ENOTEMPTY, f"{directory} is not empty")
        for left in partial.iterdir():
            logger.info("poros: removing %s, whose writer is dead", left)
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        yield partial
    finally:
        if _is_at(partial, lock):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def put_in_place(partial: Path, directory: Path) -> None:
    """Flush a folder of ``partial_folder`` and move it, unless another was put there meanwhile.

    Raises:
        OSError: If one was, or if it cannot be moved.
    """
    _sync(partial)
    os.rename(partial, directory)
    _sync(directory.parent)


def _take(partial: Path) -> int:
    """Make the folder, or take it over; return the descriptor that keeps its lock."""
    while True:
        is_new = not partial.exists()
        with suppress(FileExistsError):
            partial.mkdir()
        try:
            lock = os.open(partial, _FLAGS)
        except FileNotFoundError:
            continue  # its writer has just put it in its place, or removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("poros: waiting for another writer, of %s", partial)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where nobody knows whether its writer lives
            if not is_new:
                os.close(lock)
                raise
        if _is_at(partial, lock):
            return lock
        os.close(lock)  # it is another folder's by now


def _is_at(partial: Path, lock: int) -> bool:
    """Whether an open folder is the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(partial, follow_symlinks=False), os.fstat(lock))
    return False


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
