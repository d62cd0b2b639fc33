"""Loading and preparing that goes wrong leaves nothing behind, and what it gives is independent."""

import copy
import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import batches, build
from support import num_memory_files, same_bits
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import poros
import poros.loaders.load
import poros.self_check.check
from poros.errors import CheckpointFormatError, UnsupportedModelError
from poros.gates import tiny
from poros.host.store import left_store
from poros.loaders.load import load
from poros.loaders.slab_writer import SlabWriter


def checkpoint(folder: Path, **damage: Any) -> Path:
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=64, dropout=0.0)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    return folder


def packed_as(folder: Path, storage: torch.dtype) -> Path:
    """A checkpoint that bitsandbytes has quantized already."""
    source = checkpoint(folder / "source")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=storage,
        ),
    )
    model.save_pretrained(folder / "packed")
    return folder / "packed"


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_packed_bytes_are_taken_whatever_they_are_stored_as(
    tmp_path: Path, storage: torch.dtype
) -> None:
    path = packed_as(tmp_path, storage)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = load(path)
    for (name, mine), (_, its) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert mine.dtype == its.dtype and same_bits(mine.data, its.data), name


def test_a_quantized_checkpoint_leaves_no_slab_writer_on_the_model(tmp_path: Path) -> None:
    model = load(packed_as(tmp_path, torch.uint8))
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, SlabWriter)]
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    row = {"input_ids": batches()[0]["input_ids"]}
    with torch.no_grad():
        logits = [tiny.without_repacking(each)(**row).logits for each in (model, *twins)]
    assert same_bits(logits[0], logits[1]) and same_bits(logits[0], logits[2])


def test_an_interrupted_check_leaves_the_model_unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    model, twin = build(), build()
    kinds = [type(each) for each in model.modules()]
    monkeypatch.setattr(poros.self_check.check, "_digests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        poros.prepare(model)
    assert [type(each) for each in model.modules()] == kinds
    monkeypatch.undo()
    loss = poros.prepare(model).train()(**batches()[0]).loss
    torch.manual_seed(0)
    assert torch.isfinite(loss) and torch.isfinite(twin.train()(**batches()[0]).loss)
    poros.restore(model)


def test_a_failed_load_keeps_no_memory(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        state.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    state.save_pretrained(path)
    gc.collect()
    before = num_memory_files()
    with pytest.raises(CheckpointFormatError, match=r"layers\.1\.mlp\.up_proj"):
        load(path)
    gc.collect()
    assert num_memory_files() == before


def test_a_store_is_readable_for_others_and_may_lie_behind_a_link(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "source")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    model = load(path, store=tmp_path / "link")
    assert (tmp_path / "disk" / "manifest.json").is_file() and left_store(model) is not None
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o777 & ~mask


def test_every_dropped_cache_is_refused_afterwards() -> None:
    from transformers import DynamicCache

    model = poros.prepare(build()).train()
    caches = [DynamicCache(), DynamicCache()]
    row = {"input_ids": batches()[0]["input_ids"]}
    for cache in caches:
        model(**row, past_key_values=cache, use_cache=True)
    with torch.no_grad():
        for cache in caches:
            with pytest.raises(UnsupportedModelError, match="left empty"):
                model(**row, past_key_values=cache, use_cache=True)
    references = [weakref.ref(cache) for cache in caches]
    del caches, cache
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_model_loaded_under_inference_mode_can_be_trained(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    with torch.inference_mode():
        model = load(path)
    assert not any(each.is_inference() for each in (*model.parameters(), *model.buffers()))
    adapted = poros.prepare(tiny.attach_lora(model, rank=2), device="cpu").train()
    adapted(**batches()[0]).loss.backward()


def test_another_process_that_was_faster_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "source")
    load(path, store=tmp_path / "store")
    # What this process saw before the other one was done.
    is_store, first = poros.loaders.load.is_store, iter([False])
    monkeypatch.setattr(
        poros.loaders.load,
        "is_store",
        lambda folder: (
            next(first, True) and is_store(folder) if folder == tmp_path / "store" else False
        ),
    )
    model = load(path, store=tmp_path / "store")
    assert left_store(model) is not None
