"""Tensors come out of a checkpoint as the library gives them; nothing is left open.

What is refused stands in test_damage.py, files that change in test_checkpoint_faults.py.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from poros.errors import CheckpointFormatError
from poros.loaders import checkpoint as checkpoint_module
from poros.loaders.checkpoint import NUM_READERS, Checkpoint
from poros.loaders.header import TensorEntry
from poros.loaders.shard import Shard
from poros.loaders.source import Place
from tests.loading.checkpoints import (
    CONFIG,
    MIB,
    SECOND,
    SINGLE,
    big_checkpoint,
    entry,
    file_bytes,
    good_tensors,
    mappings,
    open_files,
    write_sharded,
    write_single,
)
from tests.loading.loaded import Kinds

LAST = "layers.3.weight"


def assert_good(checkpoint: Checkpoint) -> None:
    """Every tensor, by every way of getting it, is the one that was written."""
    good = good_tensors()
    assert set(checkpoint.names) == set(good)
    slices = checkpoint.slices()
    for name, expected in good.items():
        for found in (checkpoint.fetch(name), slices[name][...]):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


# Where a checkpoint may lie.


def test_a_folder_of_shards_and_a_single_file(tmp_path: Path) -> None:
    with Checkpoint.open(write_sharded(tmp_path / "a")) as checkpoint:
        assert_good(checkpoint)
        assert checkpoint.path == tmp_path / "a" and checkpoint.config == {"model_type": "toy"}
        assert checkpoint.entry(LAST).file == tmp_path / "a" / SECOND
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in good_tensors().values())
    with Checkpoint.open(str(write_single(tmp_path / "b"))) as checkpoint:
        assert_good(checkpoint)


def test_one_file_with_its_configuration_beside_it(tmp_path: Path) -> None:
    """Named outright, another name than transformers' will do."""
    file = write_single(tmp_path) / SINGLE
    with Checkpoint.open(file.replace(tmp_path / "mine.safetensors")) as checkpoint:
        assert_good(checkpoint)
        assert checkpoint.path == tmp_path and checkpoint.config == {"model_type": "toy"}


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_single(tmp_path, {"only": torch.ones(2)})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == ("only",)


def test_the_configuration_may_name_the_weights(tmp_path: Path) -> None:
    write_single(tmp_path, {"other": torch.ones(2)})
    save_file(good_tensors(), tmp_path / "mine.safetensors")
    (tmp_path / CONFIG).write_text('{"transformers_weights": "mine.safetensors"}')
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_good(checkpoint)


def test_what_transformers_takes_in_a_configuration_is_taken_here(tmp_path: Path) -> None:
    write_single(tmp_path)
    (tmp_path / CONFIG).write_text('{"limit": [0.0, Infinity], "a": 1, "a": 2}')
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.config == {"limit": [0.0, float("inf")], "a": 2}


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"not looked at")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_good(checkpoint)


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


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_a_hub_cache_by_its_folder_and_by_the_name_of_the_repository(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    snapshot = as_hub_cache(write(tmp_path / "source"), tmp_path / "cache")
    hub = Place(hub={"cache_dir": tmp_path / "cache", "local_files_only": True})
    for found in (Checkpoint.open(snapshot), Checkpoint.open("org/name", hub)):
        with found as checkpoint:
            assert_good(checkpoint)
            assert checkpoint.path == snapshot
    with pytest.raises(CheckpointFormatError, match=r"'org/other': .*LocalEntryNotFoundError"):
        Checkpoint.open("org/other", hub)


# What is handed out.


def test_odd_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    bits = torch.arange(16, dtype=torch.uint8)
    odd = {
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 7),
        "fp8": bits.clone().view(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "uint16": bits.view(torch.uint16),
        "complex": torch.randn(4, dtype=torch.complex64),
    }
    write_single(tmp_path, odd)
    with Checkpoint.open(tmp_path) as ours, safe_open(tmp_path / SINGLE, "pt") as file:
        for name in ours.names:
            found, expected = ours.fetch(name), file.get_tensor(name)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            raw = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected)]
            assert torch.equal(*raw)
            described, reference = ours.slices()[name], file.get_slice(name)
            assert described.get_shape() == reference.get_shape()
            assert described.get_dtype() == reference.get_dtype()
            assert described.is_floating_point() == expected.is_floating_point()
            assert described.ndim == expected.ndim


def test_bytes_that_do_not_align_with_their_dtype_are_read(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [2], [1, 9])}
    data = torch.tensor([1.5, -2.0])
    content = file_bytes(header, b"\x07" + bytes(data.view(torch.uint8).tolist()))
    (write_single(tmp_path) / SINGLE).write_bytes(content)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.fetch("b"), data)
        assert checkpoint.fetch("a").tolist() == [7]


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    file = big_checkpoint(tmp_path) / SINGLE
    content = file.read_bytes()
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.fetch("layers.0").zero_()
        assert file.read_bytes() == content
        assert int(checkpoint.fetch("layers.0").sum()) == MIB


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with Checkpoint.open(write_single(tmp_path)) as checkpoint:
        for ask in (checkpoint.entry, checkpoint.fetch, checkpoint.prefetch):
            with pytest.raises(CheckpointFormatError, match=r"tensor 'layers.9', found 4 others"):
                ask("layers.9")


# Reading ahead.


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_while_one_tensor_is_used_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In natural order, each once, as far as asked, by threads of their own."""
    noted: list[tuple[str, bool]] = []
    read = Shard.read

    def note(shard: Shard, name: str, entry: TensorEntry) -> torch.Tensor:
        noted.append((name, is_main()))
        return read(shard, name, entry)

    monkeypatch.setattr(checkpoint_module, "NUM_READERS", 1)
    monkeypatch.setattr(Shard, "read", note)
    with Checkpoint.open(big_checkpoint(tmp_path, num_mib=1, num_tensors=12)) as checkpoint:
        slices = checkpoint.slices(ahead_num_bytes=2 * MIB)
        for index in range(12):
            assert int(slices[f"layers.{index}"][...][0]) == index + 1
        assert slices["layers.2"][1:3].tolist() == [3, 3]
    assert [name for name, main in noted if not main] == [f"layers.{i}" for i in range(1, 12)]
    # Whoever takes them waits; layer 2, taken twice, is read again.
    assert [name for name, main in noted if main] == ["layers.0", "layers.2"]


def test_a_failed_read_ahead_is_reported_where_the_tensor_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Shard.read

    def fail(shard: Shard, name: str, entry: TensorEntry) -> torch.Tensor:
        if name == "layers.1" and not is_main():
            raise CheckpointFormatError("the disk fails")
        return read(shard, name, entry)

    monkeypatch.setattr(Shard, "read", fail)
    with Checkpoint.open(big_checkpoint(tmp_path, num_tensors=3)) as checkpoint:
        slices = checkpoint.slices()
        assert int(slices["layers.0"][0]) == 1
        with pytest.raises(CheckpointFormatError, match="the disk fails"):
            slices["layers.1"][...]


def test_slices_may_be_taken_in_several_threads(tmp_path: Path) -> None:
    """As transformers does with a checkpoint that is quantized already; two threads read ahead."""
    before = threading.active_count()
    with Checkpoint.open(big_checkpoint(tmp_path, num_mib=1, num_tensors=40)) as checkpoint:
        slices = checkpoint.slices(ahead_num_bytes=4 * MIB)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda index: slices[f"layers.{index}"][...].sum(), range(40)))
        assert [int(total) for total in found] == [MIB // 8 * (index + 1) for index in range(40)]
        assert threading.active_count() == before + NUM_READERS


def test_closing_ends_the_reading_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    checkpoint = Checkpoint.open(big_checkpoint(tmp_path, num_tensors=3))
    for name in checkpoint.names:
        checkpoint.prefetch(name)
        checkpoint.prefetch(name)
    assert threading.active_count() == before + NUM_READERS
    checkpoint.close()
    checkpoint.close()
    assert threading.active_count() == before


# Closing.


def test_nothing_is_open_and_a_tensor_outlives_the_checkpoint(tmp_path: Path) -> None:
    before = open_files()
    checkpoint = Checkpoint.open(write_sharded(tmp_path))
    kept, slices = checkpoint.fetch(LAST), checkpoint.slices()
    assert mappings(tmp_path) == [] and open_files() == before
    checkpoint.close()
    assert torch.equal(kept, good_tensors()[LAST])
    assert checkpoint.entry(LAST).num_bytes == 60
    uses = [checkpoint.fetch, checkpoint.prefetch]
    uses += [lambda name: slices[name][...]]
    uses += [lambda _: checkpoint.fingerprint(), lambda _: checkpoint.check_unchanged()]
    for use in uses:
        with pytest.raises(ValueError, match=r"open checkpoint, found .* closed"):
            use(LAST)


def test_an_error_within_the_context_closes_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        checkpoint.fetch("layers.0.weight")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="open checkpoint"):
        checkpoint.fetch("layers.0.weight")


def test_two_checkpoints_at_once_do_not_meet(tmp_path: Path) -> None:
    with (
        Checkpoint.open(write_sharded(tmp_path / "a")) as first,
        Checkpoint.open(write_single(tmp_path / "b", {"x": torch.ones(1)})) as second,
    ):
        assert_good(first)
        assert second.names == ("x",)
        assert second.fetch("x").tolist() == [1.0]


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_transformers_loads_the_slices_as_it_loads_the_files(kinds: Kinds, family: str) -> None:
    """Mixtral's experts are merged on the way, from tensors that are far apart in the order."""
    path = kinds.dense(family, num_layers=2)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    before = mappings(path)  # those of the reference
    with Checkpoint.open(path) as checkpoint:
        model = type(reference).from_pretrained(
            None,
            config=AutoConfig.from_pretrained(path),
            state_dict=checkpoint.slices(),
            dtype=torch.bfloat16,
        )
        assert mappings(path) == before
        checkpoint.check_unchanged()
    expected = reference.state_dict()
    for name, found in model.state_dict().items():
        assert torch.equal(found.view(torch.int16), expected[name].view(torch.int16)), name
