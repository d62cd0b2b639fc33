"""Checks output paths before the work begins, and writes files and folders whole or not at all.

Note: Folders
    A folder is written as ``.NAME.poros.partial`` beside its place, then renamed. Its writer keeps
    a lock on it for as long as it lives, and the system releases the lock when the process ends in
    any way. So another writer waits for a live one, and takes over what a dead one has left.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any

from poros.errors import PolicyError, PorosError, StoreWriteError, quoted, reason_of
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""The suffix of a folder that is being written, or whose writer was killed."""

_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


def require_file(path: Path, option: str) -> None:
    """Refuse a file that could not be written; makes the folders above it.

    Args:
        path: The file. It is not touched.
        option: What the user calls it.

    Raises:
        PolicyError: If it is a folder, a pipe or a device, or nothing can be written beside it.
    """
    try:
        parent = Path(os.path.realpath(path)).parent
        found = "a folder, a device or a pipe" if path.exists() and not path.is_file() else None
    except (OSError, ValueError) as error:
        found = reason_of(error)
    if found is not None:
        raise PolicyError(f"{option}: expected a file to write, found {_shown(path)}: {found}")
    require_folder(parent, option)


def require_folder(path: Path, option: str) -> None:
    """Refuse a folder in which nothing could be written; makes it if it is not there.

    Raises:
        PolicyError: If the system refuses; the message has its reason.
    """
    reason = why_not_writable(path)
    if reason is not None:
        raise PolicyError(
            f"{option}: expected a folder to write to, found {_shown(path)}: {reason}; choose "
            "another"
        )
    path.mkdir(parents=True, exist_ok=True)


def why_not_writable(path: Path) -> str | None:
    """Return why no folder could be written there; None if one could. Leaves nothing behind.

    Args:
        path: A folder, there or not; the nearest one above it that exists is tried.
    """
    try:
        while True:
            try:
                path.lstat()
                break
            except FileNotFoundError:
                path = path.parent
        with TemporaryFile(dir=path) as probe:
            probe.write(bytes(4096))
        return None
    except (OSError, ValueError) as error:
        return reason_of(error)


def require_empty_folder(path: Path, option: str) -> None:
    """Refuse a folder in which there is something; makes it if it is not there.

    Raises:
        PolicyError: If it is in use, or the system refuses.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise PolicyError(
            f"{option}: expected an empty or new folder, found {_shown(path)} in use; name "
            "another one, or none to get a fresh temporary folder"
        )
    require_folder(path, option)


@contextmanager
def writing(
    path: Path, errors: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Turn an error of the body into one that names what was to be written.

    Args:
        errors: ``Exception`` where a library writes: safetensors, ``torch.save`` and tokenizers
            each have other errors for a disk that is full.

    Raises:
        StoreWriteError: If one comes. What the body has left is the body's to remove.
    """
    try:
        yield
    except PorosError:
        raise
    except errors as error:
        raise StoreWriteError(
            f"{quoted(str(path), is_bare=True, limit=1000)}: expected to write it, found: "
            f"{reason_of(error)}{_free(path)}; make room, fix the "
            "permissions, or choose another place in a folder that exists"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text``; a reader sees the old file or all of the new one. Links are followed.

    Raises:
        StoreWriteError: If it cannot be written; nothing of it is left, and an old file stays.
    """
    target = Path(os.path.realpath(path))
    with (
        writing(path),
        NamedTemporaryFile(
            "w",
            dir=target.parent,
            prefix=target.name,
            suffix=".part",
            encoding="utf-8",
            delete=False,
        ) as part,
    ):
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, 0o644)
            os.replace(part.name, target)
        except BaseException:
            os.unlink(part.name)
            raise


def write_json(path: Path, content: Any) -> None:
    """As ``write_text``, of ``content`` as JSON."""
    write_text(path, json.dumps(content, indent=1) + "\n")


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
            lock = os.open(partial, _FOLDER)
        except FileNotFoundError:
            continue  # its writer has just put it in its place, or removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("poros: waiting for another writer, of %s", partial)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: another writer cannot be noticed
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


def _free(path: Path) -> str:
    try:
        return f" ({size(shutil.disk_usage(path.parent).free)} are free)"
    except OSError:
        return ""


def _shown(path: Path) -> str:
    return quoted(str(path), limit=1000)
