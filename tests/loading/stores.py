"""Stores for tests, of three slabs whose bytes are no model's, for what needs no model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from poros.host.store import HostStore
from poros.layout import BlockLayout, view
from poros.loaders.store import OpenStore
from poros.loaders.store_writer import StoreWriter
from tests.support import same_bits

ABOUT = {"source": "a1b2", "quantization": {"quant_type": "nf4"}, "num_threads": 1}
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
    directory: Path,
    host: HostStore,
    rest: Mapping[str, torch.Tensor],
    about: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """A store of slabs that are in memory."""
    with StoreWriter(directory, [slab.layout for slab in host.slabs]) as writer:
        for slab, source in zip(writer.host.slabs, host.slabs, strict=True):
            slab.bytes.copy_(source.bytes)
        return writer.commit(rest, about, files)


def write(directory: Path, num_layers: int = 3, seed: int = 0) -> Path:
    """A whole store of these."""
    return write_store(directory, filled(num_layers, seed), some_rest(), ABOUT, FILES)


def read(opened: OpenStore) -> HostStore:
    host = HostStore.allocate(opened.layouts)
    opened.read_into(host)
    return host


def assert_same_store(left: HostStore, right: HostStore) -> None:
    for one, other in zip(left.slabs, right.slabs, strict=True):
        assert one.layout == other.layout and same_bits(one.bytes, other.bytes)
