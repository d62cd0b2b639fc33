"""``poros.load`` with a store on disk: made, opened again, refused where it is another's.

What is wrong with the files of a store is in test_damage.py.
"""

import gc
import json
import os
import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import poros.loaders.load
from poros.errors import CheckpointFormatError
from poros.host.store import attached_store
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.load import load
from poros.loaders.store import open_store
from tests.children import run_forked
from tests.loading.loaded import (
    Kinds,
    copy_of,
    differences,
    quantization,
    standard,
    tensors,
    unplaced,
    wanted,
)

BOTH = (True, False)


@pytest.fixture
def source(kinds: Kinds, tmp_path: Path) -> Path:
    """A checkpoint that a test may write to."""
    return copy_of(kinds.dense(), tmp_path / "source")


@pytest.mark.cover("values")
@pytest.mark.parametrize("architecture", ["qwen2", "gemma4_shared_kv", "mixtral", "phi3"])
@pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
def test_a_reopened_store_is_the_model(
    kinds: Kinds, tmp_path: Path, architecture: str, is_quantized: bool
) -> None:
    """Made on the way, opened by the checkpoint's name, and by its own."""
    path, store = kinds.dense(architecture), tmp_path / "store"
    ours, theirs = wanted(is_quantized)
    expected = kinds.expected(path, theirs)
    for model in (load(path, quantization=ours, store=store) for _ in range(2)):
        assert differences(model, expected) == [] and unplaced(model) == []
    model = load(store)
    assert model.name_or_path == str(path) and model.config.name_or_path == str(store)
    assert differences(model, expected) == ["config"]  # where its tokenizer lies
    model.config.name_or_path = str(path)
    assert differences(model, expected) == [] and unplaced(model) == []
    gc.collect()
    assert str(store) not in Path("/proc/self/maps").read_text()
    shutil.rmtree(store)  # in memory is all of it
    assert sum(tensor.float().sum().item() for tensor in tensors(model).values()) != 0
    outside = [tensor for name, tensor in tensors(model).items() if ".layers." not in name]
    storages = {tensor.untyped_storage().data_ptr() for tensor in outside}
    assert len(storages) == len(outside) > 1


@pytest.mark.parametrize(
    ("architecture", "is_quantized"), [("qwen2", True), ("qwen2", False), ("mixtral", False)]
)
def test_saving_a_loaded_model(
    kinds: Kinds, tmp_path: Path, architecture: str, is_quantized: bool
) -> None:
    """Conversions are undone as after from_pretrained; wherever the layers lie."""
    path, (ours, theirs) = kinds.dense(architecture), wanted(is_quantized)
    store = kinds.store(path, quantization=ours)
    for name, model in {
        "standard": standard(path, theirs),
        "loaded": load(path, quantization=ours),
        "reopened": load(path, quantization=ours, store=store),
        "on the disk": load(path, quantization=ours, store=store, host_budget=0),
    }.items():
        model.save_pretrained(tmp_path / name)
        found = (tmp_path / name / "model.safetensors").read_bytes()
        assert found == (tmp_path / "standard" / "model.safetensors").read_bytes(), name


def test_what_a_store_remembers(kinds: Kinds) -> None:
    """Who made it, of what, and how."""
    with open_store(kinds.store()) as opened:
        opened.verify()
        about = opened.manifest.about
    assert about["versions"]["torch"] == version("torch")  # of the package, without its build
    assert about["device"] == "cpu" and about["num_threads"] == torch.get_num_threads()
    assert about["quantization"] == quantization().to_dict() and about["dtype"] == "bfloat16"
    assert about["source"].startswith("xxh3:")
    assert about["source_place"] == {"source": str(kinds.dense()), "revision": None}


def test_options_of_a_reopened_model(kinds: Kinds) -> None:
    """Those of the configuration; others than its layers are refused, as of other transformers."""
    assert load(kinds.store(), attn_implementation="eager").config._attn_implementation == "eager"
    kept, given = (
        json.loads((at / "config.json").read_text()) for at in (kinds.store(), kinds.dense())
    )
    assert kept == given
    with pytest.raises(CheckpointFormatError, match="expected layer 0 as this configuration"):
        load(kinds.store(), intermediate_size=96)
    with pytest.raises(CheckpointFormatError, match="expected 3 layers, found 4"):
        load(kinds.store(), num_hidden_layers=3, layer_types=["full_attention"] * 3)


def test_a_store_of_a_checkpoint_that_is_4bit_already(kinds: Kinds, tmp_path: Path) -> None:
    """Whatever is asked for."""
    path = kinds.packed(bnb_4bit_use_double_quant=False, bnb_4bit_quant_type="fp4")
    for _ in range(2):
        assert differences(load(path, store=tmp_path / "store"), kinds.expected(path)) == []


# A store of another checkpoint, or of another state of it.


def test_files_that_nobody_has_touched_are_not_hashed_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, hashed = tmp_path / "store", list[Path]()
    load(source, store=store)
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


def test_another_process_that_was_faster_is_no_error(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not seen the store before the other one was done."""
    path, store = kinds.dense(), kinds.store()
    is_store, first = poros.loaders.load.is_store, iter([False])
    monkeypatch.setattr(
        poros.loaders.load,
        "is_store",
        lambda folder: next(first, True) and is_store(folder) if folder == store else False,
    )
    assert attached_store(load(path, store=store)) is not None


# A checkpoint that changes while it is read.


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("fault", ["touched", "replaced", "unreadable"])
def test_a_checkpoint_that_changes_while_it_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, is_stored: bool
) -> None:
    """Ends in an error that names the file; the model is nowhere."""
    file = source / "model.safetensors"
    fetch, names = Checkpoint.fetch, list[str]()

    def fetch_and_spoil(self: Checkpoint, name: str) -> torch.Tensor:
        names.append(name)
        if len(names) == 20:
            if fault == "touched":
                os.utime(file)
            elif fault == "replaced":
                shutil.copy(file, tmp_path / "copy")
                os.replace(tmp_path / "copy", file)
            else:
                raise defect(file, "expected to read it, found: Input/output error", tensor=name)
        return fetch(self, name)

    monkeypatch.setattr(Checkpoint, "fetch", fetch_and_spoil)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
        load(source, store=tmp_path / "store" if is_stored else None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.undo()
    assert differences(load(source), standard(source, quantization())) == []


# A process that is killed.

KILLED = """
import os, signal, sys
import pytest
from poros.loaders.load import load
killed = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(f"poros.loaders.{sys.argv[3]}", killed)
    load(sys.argv[1], store=sys.argv[2])
"""


@pytest.mark.parametrize(
    "where", ["quantize.Quantizer.quantize_into", "store_writer.StoreWriter.commit"]
)
def test_a_writer_that_is_killed_leaves_nothing_that_opens(
    kinds: Kinds, tmp_path: Path, where: str
) -> None:
    """While it writes layers, and behind the last; the next one takes the place of what is left."""
    store = tmp_path / "store"
    assert run_forked(KILLED, str(kinds.dense()), str(store), where).returncode == -signal.SIGKILL
    (part,) = tmp_path.iterdir()
    with pytest.raises(CheckpointFormatError), open_store(part):
        pass
    expected = kinds.expected(kinds.dense(), quantization())
    assert differences(load(kinds.dense(), store=store), expected) == []
    with open_store(store) as opened:
        opened.verify()
    assert list(tmp_path.iterdir()) == [store]
