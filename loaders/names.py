"""Tells local paths from names of repositories on the hub.

Imports nothing slow, so that a command can reject a wrong path at once.
"""

import os
import re

from poros.errors import CheckpointFormatError, quoted

# "name" or "owner/name"; the hub refuses the rest, after a request for each attempt.
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95})?")
_FILES = (".safetensors", ".json", ".jsonl", ".parquet", ".csv", ".tsv", ".gz", ".txt", ".yaml")


def is_repository(name: str) -> bool:
    """Whether the hub could have a repository of that name.

    ``name`` and ``owner/name`` can be one. ``./name``, ``~/name``, ``/name``, ``a/b/c`` and
    ``name.safetensors`` are paths, whether there is something or not; so are other names of files
    that models, data and recipes are in.
    """
    return (
        _REPOSITORY.fullmatch(name) is not None
        and ".." not in name
        and "--" not in name
        and not name.endswith(_FILES)
    )


def is_local(source: str) -> bool:
    """Whether a source is a path, existing or not, and not a name on the hub.

    ``owner/name`` is a path if there is a folder ``owner``.
    """
    path = os.path.expanduser(source)
    return (
        os.path.lexists(path)
        or not is_repository(source)
        or ("/" in source and os.path.isdir(os.path.dirname(path)))
    )


def require_source(source: str, option: str) -> None:
    """Refuse a source that neither exists nor can be a repository, without a request.

    A single word is taken for a path too: the hub has few repositories without an owner, all of
    them under a full name as well, and a mistyped folder would be asked for over the network.

    Args:
        source: A path, or a name on the hub.
        option: What the user calls it.
    """
    if os.path.lexists(source) or ("/" in source and not is_local(source)):
        return
    raise CheckpointFormatError(
        f"{option}: expected a folder or file that exists, or OWNER/NAME of a repository on the "
        f"hub, found neither in {quoted(source)}; check the path (from {quoted(os.getcwd())})"
    )
