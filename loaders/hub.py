"""The folder of a hub repository in the local cache, fetched as far as it is not there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poros.errors import CheckpointFormatError, quoted
from poros.loaders.header import defect
from poros.loaders.names import is_repository


def fetch(repository: str, patterns: Sequence[str], **hub: Any) -> Path:
    """The folder of a repository, with the files that match ``patterns``.

    Args:
        repository: ``owner/name`` or ``name``. What cannot be one is refused without a request.
        patterns: Of names within the repository.
        **hub: Of ``huggingface_hub.snapshot_download``.

    Raises:
        CheckpointFormatError: If there is no such repository, or no way to it.
    """
    if not is_repository(repository):
        raise _none(repository, "no file or folder of that name, and no name of a repository")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), **hub))
    except Exception as error:  # its own errors have no common base but this
        why = f"{type(error).__name__}, {quoted(str(error))}"
        raise _none(repository, f"no file or folder of that name, and on the hub {why}") from error


def _none(repository: str, found: str) -> CheckpointFormatError:
    return defect(
        quoted(repository),
        f"expected a folder, a .safetensors file or a hub repository, found none: {found}",
        remedy="check the path or name, and the network unless the checkpoint is in the cache",
    )
