"""Where results are to be written: checked before the work, not found out after it."""

import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Any

from poros.errors import PolicyError, quoted


def require_file(path: Path, option: str) -> None:
    """Refuse a file that could not be written; makes the folders above it.

    Args:
        path: The file. It is not touched.
        option: What the user calls it.

    Raises:
        PolicyError: If it is a folder, or nothing can be written beside it.
    """
    if path.is_dir():
        raise PolicyError(f"{option}: expected a file to write, found the folder {_shown(path)}")
    require_folder(path.parent, option)


def require_folder(path: Path, option: str) -> None:
    """Refuse a folder in which nothing could be written; makes it if it is not there.

    Raises:
        PolicyError: If the system says no; the message has its reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as probe:
            probe.write(bytes(4096))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PolicyError(
            f"{option}: expected a folder to write to, found {_shown(path)}: "
            f"{quoted(reason, is_bare=True)}; choose another"
        ) from error


def why_not_writable(path: Path) -> str | None:
    """Why no folder could be made or written there; None if one could. Leaves nothing behind.

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
        with TemporaryFile(dir=path):
            return None
    except (OSError, ValueError) as error:
        return quoted(getattr(error, "strerror", None) or str(error), is_bare=True)


def require_empty_folder(path: Path, option: str) -> None:
    """Refuse a folder in which there is something; makes it if it is not there.

    Raises:
        PolicyError: If it is in use, or the system says no.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise PolicyError(
            f"{option}: expected an empty or new folder, found {_shown(path)} in use; name "
            "another one, or none to get a fresh temporary folder"
        )
    require_folder(path, option)


def write_json(path: Path, content: Any) -> None:
    """Write ``content``; a reader sees the old file or all of the new one."""
    with NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, suffix=".part", delete=False
    ) as part:
        try:
            json.dump(content, part, indent=1)
            part.write("\n")
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def _shown(path: Path) -> str:
    return quoted(str(path), limit=1000)
