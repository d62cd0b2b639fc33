"""Writes folders atomically: elsewhere first, then moved to their place.

Until then one is called ``.NAME.poros-XXXXXXXX.partial`` and holds a marker file, on
which its writer keeps a lock for as long as it lives; the system releases it when the process
ends, however it does. So the next writer of that store knows a dead one from a living one at once,
and from what is not ours.
"""

import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from poros.errors import StoreWriteError, quoted
from poros.loaders.auxiliary_files import TEMPLATES

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""The suffix of a folder that is being written, or whose writer was killed."""

MARK = "poros-writer.lock"
"""In the folder, until the store is in its place."""

_ROOM = "make room on that disk, or choose a folder on another"
_RIGHTS = "choose a folder in which you may write"
_REMEDIES = {
    0: "choose a folder that does not exist yet, on a disk that works",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: f"{_ROOM}: your quota is used up",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose a file system that "
    "takes files of that size",
    errno.ENOENT: "make its parent folder, or choose another",
    errno.ENOTDIR: "choose a folder whose parent is a folder",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENAMETOOLONG: "choose a shorter name",
}

_TEXT = b"poros is writing a store here\n"
_NUM_TRIES = 100
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def partial_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder to write to, beside ``directory``; it is removed unless ``put_in_place``.

    What writers of ``directory`` left that were killed is removed first.

    Raises:
        OSError: If there is no place for it.
    """
    remove_stale(directory)
    partial, lock = _make(directory)
    try:
        yield partial
    finally:
        _remove(partial)
        os.close(lock)


def put_in_place(partial: Path, directory: Path) -> None:
    """Flush a folder of ``partial_folder`` and move it, unless another was put there meanwhile.

    Raises:
        OSError: If one was, or if it cannot be moved.
    """
    _sync(partial)
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(partial, 0o777 & ~mask)  # mkdtemp's is for its owner alone
    os.rename(partial, directory)
    with suppress(OSError):
        (directory / MARK).unlink()
    _sync(directory.parent)


@contextmanager
def writing_to(place: str) -> Iterator[None]:
    """Raise ``StoreWriteError`` with what to do, where the system reports an error.

    Args:
        place: As messages name it.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, StoreWriteError):
            raise
        if isinstance(error, OSError):
            number, reason = error.errno or 0, error.strerror or str(error)
        else:
            reason = str(error)
            number = next(map(int, re.findall(r"os error (\d+)", reason)), 0)
        raise StoreWriteError(
            f"{place}: expected to write there, found: {quoted(reason, is_bare=True)}. Nothing was "
            f"left there; {_REMEDIES.get(number, _REMEDIES[0])}"
        ) from error


def remove_stale(directory: Path) -> None:
    """Remove what killed writers of this store left: their locks are free.

    A folder with something in it but not our mark is left alone.
    """
    for partial in directory.parent.glob(f"{glob.escape(_prefix(directory))}*{PARTIAL}"):
        if partial.is_symlink():
            continue
        with suppress(OSError):
            partial.rmdir()  # killed before there was anything in it
            continue
        with suppress(OSError):
            lock = os.open(partial / MARK, _FLAGS)
            try:
                if os.pread(lock, len(_TEXT) + 1, 0) in (b"", _TEXT) and _take(lock):
                    logger.info("poros: removing %s, whose writer is dead", partial)
                    _remove(partial)
            finally:
                os.close(lock)


def _make(directory: Path) -> tuple[Path, int]:
    """Make the folder, and the descriptor that keeps its lock."""
    for _ in range(_NUM_TRIES):
        made = tempfile.mkdtemp(prefix=_prefix(directory), suffix=PARTIAL, dir=directory.parent)
        partial = Path(made)
        # Until it has its lock, another writer may take it for a dead one's and remove it.
        with suppress(FileNotFoundError):
            lock = os.open(partial / MARK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.write(lock, _TEXT)
                if _take(lock) is not False and os.fstat(lock).st_nlink:
                    return partial, lock
            except BaseException:
                _remove(partial)
                os.close(lock)
                raise
            os.close(lock)
    raise FileExistsError(f"found no folder of its own in {_NUM_TRIES} tries")


def _remove(partial: Path) -> None:
    """Remove such a folder and the files in it, as far as it can be.

    The mark goes last: a process killed meanwhile leaves a folder that is recognized as ours.
    """
    with suppress(OSError):
        for entry in partial.iterdir():
            if entry.name == TEMPLATES and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != MARK:
                entry.unlink()
        (partial / MARK).unlink()
    with suppress(OSError):
        partial.rmdir()


def _prefix(directory: Path) -> str:
    return f".{directory.name}.poros-"


def _take(lock: int) -> bool | None:
    """Take the lock of an open file; False if another has it, None where there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
