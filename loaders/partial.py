"""Folders that are being written: whose they are, and whether their writer is alive.

Such a folder is called ``.NAME.poros-XXXXXXXX.partial`` and holds a file that says who made it, on
which its writer keeps a lock for as long as it lives; the system releases it when the process
ends, however it does. So the next writer of that store knows a dead one from a living one at once,
and from what is not ours.
"""

import glob
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from poros.loaders.extras import TEMPLATES

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""How the name of a folder ends that somebody is still writing, or was when they were killed."""

MARK = "poros-writer.lock"
"""In the folder, until the store is in its place."""

_TEXT = b"poros is writing a store here\n"
_NUM_TRIES = 100
_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


def make_partial(directory: Path) -> tuple[Path, int]:
    """Make a folder for the writer of ``directory``, beside it.

    Returns:
        The folder, and the descriptor that keeps the lock.

    Raises:
        OSError: If there is no place for it.
    """
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
                remove_partial(partial)
                os.close(lock)
                raise
            os.close(lock)
    raise FileExistsError(f"found no folder of its own in {_NUM_TRIES} tries")


def remove_stale(directory: Path) -> None:
    """Remove what writers of this store left that were killed: nobody holds their locks.

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
                    remove_partial(partial)
            finally:
                os.close(lock)


def remove_partial(partial: Path) -> None:
    """Remove a folder of ``make_partial`` and the files in it, as far as it can be.

    The mark goes last, so that whoever is killed meanwhile leaves what is known as ours.
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
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
