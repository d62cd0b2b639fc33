"""A store that was damaged after it was written: an error before there is a model, or its bytes.

Damage is done to the bytes that the tensors lie in, so that every fast check passes.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import CheckpointFormatError, PolicyError
from poros.gates import tiny
from poros.layout import slab_offsets
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import open_regular, read_header
from poros.loaders.load import load
from poros.loaders.manifest import REST, SLABS
from poros.loaders.store import open_store
from tests.loaded import EMBED, copy_of, differences, tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    config = tiny.small_config("qwen2", num_layers=4, hidden_size=64)
    tiny.write_checkpoint(config, path, dtype=torch.bfloat16)
    return path


def patch(file: Path, offset: int, change: Callable[[bytes], bytes], num_bytes: int = 1) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        before = stream.read(num_bytes)
        stream.seek(offset)
        stream.write(change(before))


def flip(text: bytes) -> bytes:
    return bytes([text[0] ^ 16])


def place_of(store: Path, name: str) -> tuple[Path, int]:
    """Where the first byte of a tensor lies."""
    with open_store(store) as opened:
        for start, layout in zip(slab_offsets(opened.layouts), opened.layouts, strict=True):
            for spec in layout.tensors:
                if spec.name == name:
                    return store / SLABS, opened.data_offset + start + spec.offset
    descriptor, _ = open_regular(store / REST)
    try:
        return store / REST, read_header(descriptor, store / REST).tensors[name].offset
    finally:
        os.close(descriptor)


PACKED = "model.layers.2.mlp.down_proj.weight"
NAN = b"\xc0\x7f"

DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], int]] = {
    "a packed weight": (PACKED, flip, 1),
    "a scale": (f"{PACKED}.absmax", flip, 1),
    "a scale of scales": (f"{PACKED}.nested_absmax", flip, 1),
    "a norm": ("model.layers.1.input_layernorm.weight", flip, 1),
    "a bias": ("model.layers.0.self_attn.q_proj.bias", flip, 1),
    "a code book": (f"{PACKED}.code", flip, 1),
    "an offset": (f"{PACKED}.offset", flip, 1),
    "the embedding": (EMBED, flip, 1),
    "NaN in the embedding": (EMBED, lambda _: NAN, 2),
    "NaN in the last norm": ("model.norm.weight", lambda _: NAN, 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("by", ["its own name", "the checkpoint"])
def test_one_changed_value_is_an_error_of_load(
    checkpoint: Path, tmp_path: Path, damage: str, by: str
) -> None:
    name, change, num_bytes = DAMAGE[damage]
    store = tmp_path / "store"
    load(checkpoint, store=store)
    file, offset = place_of(store, name)
    patch(file, offset, change, num_bytes)
    options: dict[str, Any] = {} if by == "its own name" else {"store": store}
    with pytest.raises(CheckpointFormatError, match=rf"{file.name}.*bytes changed"):
        load(store if by == "its own name" else checkpoint, **options)


def test_a_file_that_the_manifest_does_not_name_is_not_looked_at(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Its own configuration of generation would change what is generated."""
    source = copy_of(checkpoint, tmp_path)
    assert not (source / "generation_config.json").exists()
    load(source, store=tmp_path / "store")
    (tmp_path / "store" / "generation_config.json").write_text('{"max_length": 7, "top_k": 3}')
    assert differences(load(source, store=tmp_path / "store"), load(source)) == []
    # The control: beside the checkpoint it counts.
    (source / "generation_config.json").write_text('{"max_length": 7, "top_k": 3}')
    assert load(source).generation_config.top_k == 3


@pytest.mark.parametrize("is_nan", [False, True])
def test_what_was_allowed_is_on_record(checkpoint: Path, tmp_path: Path, is_nan: bool) -> None:
    def spoil(found: dict[str, Any]) -> None:
        if is_nan:
            found["model.norm.weight"][3] = float("nan")

    (tmp_path / "source").mkdir()
    source, store = copy_of(checkpoint, tmp_path / "source", spoil), tmp_path / "store"
    load(source, store=store, allow_nonfinite=True)
    for path, options in ((store, {}), (source, {"store": store})):
        with pytest.raises(PolicyError, match="allow_nonfinite: expected a store of finite"):
            load(path, **options)
        model = load(path, allow_nonfinite=True, **options)
        assert bool(model.model.norm.weight.isnan().any()) == is_nan
    strict = tmp_path / "strict"
    if not is_nan:
        load(source, store=strict)
        assert differences(load(source, store=strict, allow_nonfinite=True), load(source)) == []


def test_tensors_of_a_reopened_model_are_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """No file of the store is mapped, and no tensor shares memory with another outside layers."""
    load(checkpoint, store=tmp_path / "store")
    gc.collect()  # the model that was written
    model = load(tmp_path / "store")
    assert str(tmp_path / "store") not in Path("/proc/self/maps").read_text()
    outside = [each for name, each in tensors(model).items() if ".layers." not in name]
    storages = {each.untyped_storage().data_ptr() for each in outside}
    assert len(storages) == len(outside) > 1


def edit(source: Path, *, is_time_kept: bool) -> None:
    """One bit in the middle of the weights of a layer."""
    file = source / "model.safetensors"
    before = file.stat()
    descriptor, _ = open_regular(file)
    try:
        entry = read_header(descriptor, file).tensors[PACKED]
    finally:
        os.close(descriptor)
    patch(file, entry.offset + entry.num_bytes // 2, flip)
    if is_time_kept:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("is_time_kept", [False, True])
def test_one_bit_of_the_checkpoint_makes_it_another(
    checkpoint: Path, tmp_path: Path, is_time_kept: bool
) -> None:
    (tmp_path / "source").mkdir()
    source, store = copy_of(checkpoint, tmp_path / "source"), tmp_path / "store"
    load(source, store=store)
    edit(source, is_time_kept=is_time_kept)
    with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint xxh3"):
        load(source, store=store)


def test_files_that_nobody_has_touched_are_not_hashed_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    source, store = copy_of(checkpoint, tmp_path / "source"), tmp_path / "store"
    load(source, store=store)
    hashed = []
    fingerprint = Checkpoint.fingerprint

    def note(self: Checkpoint) -> str:
        hashed.append(self.path)
        return fingerprint(self)

    monkeypatch.setattr(Checkpoint, "fingerprint", note)
    load(source, store=store)
    assert hashed == []
    os.utime(source / "model.safetensors")
    load(source, store=store)
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint"):
        load(source, store=store)
    assert hashed == [source, source]
