"""Checkpoints and stores for tests: good ones, and files built byte by byte to be bad."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from poros.host.layout import BlockLayout, view
from poros.host.store import HostStore
from poros.loaders.header import Header, open_regular, read_header
from poros.loaders.store import About, OpenStore
from poros.loaders.store_writer import StoreWriter
from poros.model.origin import Origin
from tests.support import same_bits

MIB = 2**20

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def good_tensors() -> dict[str, torch.Tensor]:
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
    with open_regular(file) as (descriptor, _):
        return read_header(descriptor, file)


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
    lines, below = Path("/proc/self/maps").read_text().splitlines(), str(folder.resolve())
    return [line.split(maxsplit=5)[-1] for line in lines if below in line]


def big_checkpoint(folder: Path, num_mib: int = 8, num_tensors: int = 1) -> Path:
    """Tensors of whole pages, so that pages and tensors are the same thing."""
    tensors = {
        f"layers.{index}": torch.full((num_mib * MIB // 8,), index + 1)
        for index in range(num_tensors)
    }
    return write_single(folder, tensors)


# A store of three slabs that is no model's, for what needs no model.

ABOUT = About(
    origin=Origin("a1b2"),
    quantization=None,
    is_prequantized=False,
    dtype="bfloat16",
    vision="keep",
    auto_class=None,
    num_labels=None,
    dense=["norm.weight"],
    weights={"a": ("bfloat16", 64)},
    versions={"torch": "2"},
    device="cpu",
    num_threads=1,
)
FILES = {"config.json": b'{"model_type": "qwen2"}', "generation_config.json": b"{}"}


def some_layouts(num_layers: int = 3) -> list[BlockLayout]:
    return [
        BlockLayout.pack(
            [
                (f"layers.{index}.weight", torch.empty(40_000 + index, 1, dtype=torch.uint8)),
                (f"layers.{index}.absmax", torch.empty(77)),
                (f"layers.{index}.norm", torch.empty(64, dtype=torch.bfloat16)),
                (f"layers.{index}.empty", torch.empty(0, 3)),
            ]
        )
        for index in range(num_layers)
    ]


def some_rest() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.rand(50, 8, generator=generator).bfloat16(),
        "norm.weight": torch.rand(8, generator=generator),
        "offset": torch.tensor(0.25),
        "empty": torch.empty(0, 2),
        "flags": torch.tensor([True, False]),
        "transposed": torch.rand(4, 6, generator=generator).T,
    }


def fill(host: HostStore, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slab in host.slabs:
        for spec in slab.layout.tensors:
            flat = view(slab.bytes, spec).reshape(-1).view(torch.uint8)
            flat.copy_(torch.randint(256, flat.shape, dtype=torch.uint8, generator=generator))


def filled(num_layers: int = 3, seed: int = 0) -> HostStore:
    host = HostStore.allocate(some_layouts(num_layers))
    fill(host, seed)
    return host


def write_store(
    directory: Path, host: HostStore, rest: Mapping[str, torch.Tensor], files: Mapping[str, bytes]
) -> Path:
    with StoreWriter(directory, [slab.layout for slab in host.slabs]) as writer:
        for slab, source in zip(writer.host.slabs, host.slabs, strict=True):
            slab.bytes.copy_(source.bytes)
        return writer.commit(rest, ABOUT, files)


def write(directory: Path, num_layers: int = 3, seed: int = 0) -> Path:
    return write_store(directory, filled(num_layers, seed), some_rest(), FILES)


def read(opened: OpenStore) -> HostStore:
    host = HostStore.allocate(some_layouts(len(opened.manifest.slabs)))
    opened.read_into(host)
    return host


def assert_same_store(left: HostStore, right: HostStore) -> None:
    for one, other in zip(left.slabs, right.slabs, strict=True):
        assert one.layout == other.layout and same_bits(one.bytes, other.bytes)


def as_hub_cache(source: Path, cache: Path) -> Path:
    """The snapshot folder of a hub cache: links into a folder of blobs."""
    repository = cache / "models--org--name"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot
