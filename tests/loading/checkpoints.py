"""Checkpoints for the reader's tests: good ones, and files built byte by byte to be bad."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from poros.loaders.header import Header, open_regular, read_header

MIB = 2**20

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def good_tensors() -> dict[str, torch.Tensor]:
    """Small tensors with names as in a model."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{index}.weight": torch.randn(3, index + 2, generator=generator)
        for index in range(4)
    }


def write_single(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A folder with one model.safetensors and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors or good_tensors()), folder / SINGLE)
    (folder / CONFIG).write_text('{"model_type": "toy"}')
    return folder


def write_sharded(folder: Path) -> Path:
    """A folder with two shards of two tensors each, an index and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = good_tensors()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:2]}, folder / FIRST)
    save_file({name: tensors[name] for name in names[2:]}, folder / SECOND)
    write_index(folder, {name: FIRST if name in names[:2] else SECOND for name in names})
    (folder / CONFIG).write_text('{"model_type": "toy"}')
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": dict(weight_map)})
    (folder / INDEX).write_text(text)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """One tensor of a header, right by default."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header: object, data: bytes = bytes(8), *, length: int | None = None) -> bytes:
    """A file: the header as JSON, or as it is if it is bytes, and a length that may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def header_of(file: Path) -> Header:
    descriptor, _ = open_regular(file)
    try:
        return read_header(descriptor, file)
    finally:
        os.close(descriptor)


def open_files() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except OSError:  # the one that listed the folder
            continue
    return sorted(found)


def mappings(folder: Path) -> list[str]:
    """The mapped files below a folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[-1] for line in lines if str(folder.resolve()) in line]


def big_checkpoint(folder: Path, num_mib: int = 8, num_tensors: int = 1) -> Path:
    """Tensors of whole pages, so that pages and tensors are the same thing."""
    tensors = {
        f"layers.{index}": torch.full((num_mib * MIB // 8,), index + 1)
        for index in range(num_tensors)
    }
    return write_single(folder, tensors)
