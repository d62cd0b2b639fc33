"""Where a checkpoint lies: configuration, index and the files that hold the tensors.

Files are chosen as transformers chooses them, so that both read the same bytes. Links are followed,
because a hub cache consists of them; what an index names must lie in its folder by name.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from poros.errors import CheckpointFormatError
from poros.loaders.header import defect, open_regular, parse_json, quoted, read_at

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_CONFIG_NUM_BYTES = 16 * 2**20
MAX_INDEX_NUM_BYTES = 100_000_000

_MAX_NAME = 1024  # characters of a file's name in an index
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_HUB_FILES = [CONFIG, "generation_config.json", INDEX, SINGLE, "*.py"]


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one checkpoint."""

    path: Path
    config: dict[str, Any]
    config_text: bytes
    files: list[Path]
    """The shards, in the order of their names."""
    index: Path | None
    """None for a single file."""
    weight_map: dict[str, str]
    """Of the index: the file that holds each tensor."""


def find_source(source: str | os.PathLike[str], **hub: Any) -> Source:
    """Find the files of a checkpoint and read its configuration and index; see ``Checkpoint.open``.

    Raises:
        CheckpointFormatError: If there is no checkpoint, or configuration or index are broken.
    """
    path = Path(source)
    name = None
    try:
        is_folder, exists = path.is_dir(), os.path.lexists(path)
    except OSError as error:
        raise defect(
            quoted(os.fspath(source)),
            f"expected a readable folder or file, found: {error.strerror}",
            remedy="check the path and its permissions",
        ) from error
    if exists and not is_folder:
        _refuse_pickles([path], path)
        if path.suffix != ".safetensors":
            raise defect(
                path,
                "expected a folder, a .safetensors file or the name of a hub repository, found "
                "another file",
                remedy="pass the folder of the checkpoint",
            )
        path, name = path.parent, path.name
    elif not exists:
        path = _from_hub(os.fspath(source), **hub)
    text = _read_bounded(path / CONFIG, MAX_CONFIG_NUM_BYTES)
    config = parse_json(text, path / CONFIG, strict=False)
    name = name or _weights_name(path, config)
    if not name.endswith(".index.json"):
        return Source(path, config, text, [path / name], None, {})
    weight_map = _read_index(path / name)
    files = [path / each for each in sorted(set(weight_map.values()))]
    return Source(path, config, text, files, path / name, weight_map)


def _weights_name(path: Path, config: dict[str, Any]) -> str:
    """The file to begin with, chosen in the order of transformers."""
    explicit = config.get("transformers_weights")
    if explicit is not None:
        if not isinstance(explicit, str) or not explicit.endswith((".safetensors", ".index.json")):
            raise defect(
                path / CONFIG,
                "expected transformers_weights to name a safetensors file or an index, found "
                f"{quoted(explicit)}",
            )
        _refuse_escape(explicit, path / CONFIG)
        return explicit
    for name in (SINGLE, INDEX):
        if os.path.lexists(path / name):
            return name
    try:
        others = sorted(each for each in path.iterdir() if each.suffix != ".json")
    except OSError as error:
        raise defect(path, f"expected a readable folder, found: {error.strerror}") from error
    _refuse_pickles(others, path)
    raise defect(
        path,
        f"expected {SINGLE} or {INDEX}, found {quoted([each.name for each in others])}",
        remedy="pass the folder that holds them, or the one .safetensors file to read",
    )


def _refuse_pickles(files: Iterable[Path], path: Path) -> None:
    found = [each.name for each in files if each.suffix.lower() in _PICKLES]
    if found:
        raise defect(
            path,
            f"expected safetensors, found only {quoted(found)}: a pickle can run code and is never "
            "opened",
            remedy="convert the checkpoint to safetensors",
        )


def _read_index(file: Path) -> dict[str, str]:
    """The ``weight_map`` of an index, every name in it checked."""
    weight_map = parse_json(_read_bounded(file, MAX_INDEX_NUM_BYTES), file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise defect(
            file, f"expected a weight_map of file names by tensor, found {quoted(weight_map)}"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise defect(file, f"expected a file name, found {quoted(shard)}", tensor=name)
    for shard in set(weight_map.values()):
        _refuse_pickles([Path(shard)], file)
        _refuse_escape(shard, file)
    return weight_map


def _refuse_escape(name: str, file: Path) -> None:
    """Refuse a name that leads out of the folder, or is none."""
    parts = PurePosixPath(name).parts
    if (
        ".." in parts
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


def _read_bounded(file: Path, max_num_bytes: int) -> bytes:
    """A small file as a whole."""
    descriptor, status = open_regular(file)
    try:
        if not 0 < status.st_size <= max_num_bytes:
            raise defect(
                file, f"expected 1 to {max_num_bytes} bytes of JSON, found {status.st_size}"
            )
        return read_at(descriptor, status.st_size, 0, file)
    finally:
        os.close(descriptor)


def _from_hub(repository: str, **hub: Any) -> Path:
    """The folder in the hub's cache, fetched as far as it is not there and a network may be used.

    The shards are fetched by the names in the index: repositories hold other copies of the same
    weights under names of their own.
    """
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repository, allow_patterns=_HUB_FILES, **hub))
        if not (path / SINGLE).exists() and (path / INDEX).exists():
            shards = sorted(set(_read_index(path / INDEX).values()))
            path = Path(snapshot_download(repository, allow_patterns=shards, **hub))
    except CheckpointFormatError:
        raise
    except (OSError, ValueError) as error:  # the hub's own errors derive from these
        raise defect(
            quoted(repository),
            "expected a folder, a .safetensors file or a hub repository, found none: "
            f"{type(error).__name__}, {quoted(str(error))}",
            remedy="check the name, and the network unless the checkpoint is in the cache",
        ) from error
    return path
