"""Finds a checkpoint's configuration, index and tensor files.

Files are chosen as transformers chooses them, so that both read the same bytes. Links are followed,
because a hub cache consists of them; what an index names must lie in its folder by name. A sparse
file that takes no room on the disk can have any length, so each has a limit.

Auxiliary files (tokenizer, processor, licence) are copied unread into what is made of a checkpoint;
code is not copied. Without them ``AutoTokenizer.from_pretrained(store)`` would give a tokenizer
with an empty vocabulary, and no error.
"""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from poros.errors import CheckpointFormatError, UnsupportedModelError, quoted
from poros.loaders.header import defect, open_regular, parse_json, read_start, shown
from poros.loaders.names import is_repository

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps further chat templates."""

AUXILIARY_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    f"{TEMPLATES}/*.jinja",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Names of these files, as patterns."""

MAX_CONFIG_NUM_BYTES = 4 * 2**20
"""Limit for ``config.json`` and for each other file of settings."""
MAX_INDEX_NUM_BYTES = 100_000_000
"""Limit for the index of a sharded checkpoint."""
MAX_AUXILIARY_NUM_BYTES = 256 * 2**20
"""Limit for each tokenizer file, and each other small file that goes into a store."""

_MAX_NAME = 1024  # characters of a file's name in an index


def find_source(
    source: str | os.PathLike[str],
    hub: Mapping[str, Any] | None = None,
) -> tuple[Path, dict[str, bytes], list[Path]]:
    """Find the files of a checkpoint and read its configuration and index; see ``Checkpoint.open``.

    Returns:
        Its folder; ``config.json``, and ``generation_config.json`` if it is there, read once for
        every use; and the shards, in the order of their names.

    Raises:
        CheckpointFormatError: If there is no checkpoint, or configuration or index are broken.
        UnsupportedModelError: If it is an adapter, or has one beside it.
    """
    path = _existing(source)
    name = None
    if path is not None and not path.is_dir():
        if path.suffix != ".safetensors":
            raise defect(
                path,
                "expected a folder, a .safetensors file or the name of a hub repository, found "
                "another file",
                remedy="pass the folder of the checkpoint",
            )
        path, name = path.parent, path.name
    elif path is None:
        path = _from_hub(os.fspath(source), hub or {})
    if name is None:
        _refuse_adapter(path)
    texts = {CONFIG: _read_config(path, source)}
    if os.path.lexists(path / GENERATION):
        texts[GENERATION] = read_small(path / GENERATION)
    config = parse_json(texts[CONFIG], path / CONFIG, strict=False)
    name = name or _weights_name(path, config)
    shards = _read_index(path / name) if name.endswith(".json") else [name]
    return path, texts, [path / shard for shard in shards]


def find_config(source: str | os.PathLike[str]) -> tuple[Path, dict[str, bytes]]:
    """Find a configuration without weights; return its folder and text.

    Raises:
        CheckpointFormatError: If there is none, or it is too large.
        UnsupportedModelError: If it is an adapter.
    """
    path = _existing(source)
    if path is None:
        path = fetch(os.fspath(source), [CONFIG, ADAPTER])
    if not path.is_dir():
        path = path.parent
    if not os.path.lexists(path / CONFIG):
        _refuse_adapter(path)
    return path, {CONFIG: _read_config(path, source)}


def read_small(file: Path, most: int = MAX_CONFIG_NUM_BYTES) -> bytes:
    """Read a file of at most ``most`` bytes."""
    with open_regular(file) as (descriptor, status):
        if not 0 < status.st_size <= most:
            kind = " of JSON" if file.suffix == ".json" else ""
            raise defect(file, f"expected 1 to {most} bytes{kind}, found {status.st_size}")
        return bytes(read_start(descriptor, status.st_size, file))


def read_auxiliary_files(path: Path) -> dict[str, bytes]:
    """Read a folder's auxiliary files, by name."""
    try:
        entries = [*path.iterdir(), *path.glob(f"{TEMPLATES}/*")]
        names = sorted(str(each.relative_to(path)) for each in entries)
        ours = [name for name in names if is_auxiliary_file(name) and not (path / name).is_dir()]
        # An empty file holds nothing, and the limit would refuse it.
        filled = [name for name in ours if (path / name).stat().st_size]
    except OSError as error:
        where = Path(error.filename or path)
        raise defect(where, f"expected to read it, found: {error.strerror}") from error
    return {name: read_small(path / name, MAX_AUXILIARY_NUM_BYTES) for name in filled}


def is_auxiliary_file(name: str) -> bool:
    """Whether a file of that name goes into a store; code never does."""
    in_place = "/" not in name.removeprefix(f"{TEMPLATES}/")
    has_code = name.endswith((".py", ".safetensors", ".bin", ".pt", ".pth", ".pkl"))
    matches = any(fnmatchcase(name, pattern) for pattern in AUXILIARY_FILES)
    return in_place and matches and not has_code and name.isprintable()


def _read_config(folder: Path, source: str | os.PathLike[str]) -> bytes:
    if not os.path.lexists(folder / CONFIG):
        what = f"expected a checkpoint with {CONFIG}, found none"
        raise defect(Path(source), what, remedy="give the folder of a checkpoint")
    return read_small(folder / CONFIG)


def fetch(repository: str, patterns: Sequence[str], **hub: Any) -> Path:
    """Download a repository's files that match ``patterns``, and return its folder.

    Args:
        repository: ``owner/name`` or ``name``. What cannot be one is refused without a request.
        patterns: Of names within the repository.
        **hub: Of ``huggingface_hub.snapshot_download``.
    """
    if not is_repository(repository):
        raise _no_repository(repository, "no name of a repository")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), **hub))
    except Exception as error:  # its own errors have no common base but this
        why = f"{type(error).__name__}, {quoted(str(error))}"
        raise _no_repository(repository, f"on the hub {why}") from error


def commit_of(path: Path) -> str | None:
    """Return the commit of a checkpoint in the hub's cache, as the names of its folders say."""
    return path.name if path.parent.name == "snapshots" else None


def _existing(source: str | os.PathLike[str]) -> Path | None:
    path = Path(source)
    try:
        path.is_dir()
        return path if os.path.lexists(path) else None
    except OSError as error:
        raise defect(
            quoted(os.fspath(source)),
            f"expected a readable folder or file, found: {error.strerror}",
            remedy="check the path and its permissions",
        ) from error


def _refuse_adapter(path: Path) -> None:
    """Refuse a folder with an adapter, which ``from_pretrained`` would attach."""
    file = path / ADAPTER
    if not os.path.lexists(file):
        return
    adapter = parse_json(read_small(file), file, strict=False)
    base = quoted(adapter.get("base_model_name_or_path"))
    if (path / CONFIG).exists() and any((path / name).exists() for name in (SINGLE, INDEX)):
        raise UnsupportedModelError(
            f"{shown(file)}: expected the base model alone, found an adapter beside it (of the "
            f"base {base}), which from_pretrained would attach. Move it to a folder of its own, "
            "load the base, and attach the adapter with "
            "peft.PeftModel.from_pretrained(model, FOLDER, is_trainable=True)"
        )
    raise UnsupportedModelError(
        f"{shown(file)}: expected a base model, found an adapter alone; its base is {base}. Load "
        "that, and attach the adapter with "
        f"peft.PeftModel.from_pretrained(model, {quoted(str(path), limit=400)}, is_trainable=True)"
    )


def _weights_name(path: Path, config: dict[str, Any]) -> str:
    """Choose the weights file or the index, in the order of transformers."""
    explicit = config.get("transformers_weights")
    if explicit is not None:
        _refuse_escape(explicit, path / CONFIG)
        return str(explicit)
    for name in (SINGLE, INDEX):
        if os.path.lexists(path / name):
            return name
    raise defect(
        path,
        f"expected {SINGLE} or {INDEX}, found neither",
        remedy="pass the folder that holds them, or the one .safetensors file to read; pickles and "
        "GGUF are never opened",
    )


def _read_index(file: Path) -> list[str]:
    """Return the names of the shards in an index, each of them checked, in order.

    Which tensor is in which of them their headers say.
    """
    text = read_small(file, MAX_INDEX_NUM_BYTES)
    weight_map = parse_json(text, file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise defect(
            file, f"expected a weight_map of file names by tensor, found {quoted(weight_map)}"
        )
    wrong = [name for name in weight_map.values() if not isinstance(name, str)]
    shards = wrong or sorted(set(weight_map.values()))
    for shard in shards:
        _refuse_escape(shard, file)
    return shards


def _refuse_escape(name: Any, file: Path) -> None:
    """Refuse a name that is invalid or leads out of the folder."""
    if (
        not isinstance(name, str)
        or ".." in PurePosixPath(name).parts
        or "\\" in name
        or Path(name).is_absolute()
        or not name.isprintable()
        or len(name) > _MAX_NAME
        or not name.endswith((".safetensors", ".index.json"))
    ):
        raise defect(
            file,
            f"expected the name of a .safetensors file in this folder, found {quoted(name)}",
            remedy="do not use this checkpoint before its source is clear",
        )


def _from_hub(repository: str, hub: Mapping[str, Any]) -> Path:
    """Fetch a repository into the hub's cache, as far as it is not there, and return its folder.

    The shards are fetched by the names in the index: repositories hold other copies of the same
    weights under names of their own.
    """
    names = (CONFIG, GENERATION, ADAPTER, SINGLE, INDEX, *AUXILIARY_FILES)
    path = fetch(repository, names, **hub)
    if not (path / SINGLE).exists() and (path / INDEX).exists():
        path = fetch(repository, _read_index(path / INDEX), **hub)
    return path


def _no_repository(repository: str, found: str) -> CheckpointFormatError:
    return defect(
        quoted(repository),
        "expected a folder, a .safetensors file or a hub repository, found no file or folder of "
        f"that name, and {found}",
        remedy="check the path or name, and the network unless the checkpoint is in the cache",
    )
