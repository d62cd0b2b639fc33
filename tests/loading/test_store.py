"""Stores on disk: the bytes come back, and what is not as it was written does not open.

Writers that are out of room, killed, or one of several, leave nothing half-written that opens.
``poros.load`` makes stores, opens them again, and refuses those of another checkpoint. Whole files
that are damaged stand in test_damage.py, manifests that are made up in test_fuzz.py.
"""

import errno
import gc
import json
import os
import random
import shutil
import signal
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import poros.loaders.load
from poros.errors import CheckpointFormatError, StoreWriteError
from poros.host.layout import PAGE_NUM_BYTES
from poros.host.store import attached_store
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.load import load
from poros.loaders.store import REST, SLABS, is_store, open_store
from poros.loaders.store_writer import StoreWriter
from tests.children import run_forked
from tests.comparing import compare_mappings
from tests.loading.checkpoints import (
    ABOUT,
    FILES,
    assert_same_store,
    fill,
    filled,
    read,
    some_layouts,
    some_rest,
    write,
)
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
from tests.replaced import noted
from tests.support import same_bits

Patch = pytest.MonkeyPatch


def test_everything_comes_back(tmp_path: Path) -> None:
    directory, expected = tmp_path / "store", filled()
    with StoreWriter(directory, some_layouts()) as writer:
        fill(writer.host)
        assert not directory.exists()
        assert writer.commit(some_rest(), ABOUT, FILES) == directory
    assert is_store(directory) and os.listdir(tmp_path) == ["store"]
    with open_store(directory) as opened:
        opened.verify()
        assert_same_store(expected, read(opened))
        found, rest = opened.rest(), some_rest()
        assert compare_mappings(rest, found) == []
        assert opened.about == ABOUT
        assert {name: opened.text(name) for name in FILES} == FILES
        # The data are the bytes of the arena: any part of them is mapped or read as it is.
        assert all(start % PAGE_NUM_BYTES == 0 for start in opened.starts)
        text = opened.slabs.read_bytes()
        for slab in expected.slabs:
            data = text[slab.offset : slab.offset + slab.layout.num_bytes]
            assert data == slab.bytes.numpy().tobytes()
    assert same_bits(found["norm.weight"], rest["norm.weight"])  # it outlives the store


# Bits that flip.


@pytest.mark.parametrize("name", [SLABS, REST, "config.json"])
def test_one_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    """In every kind of byte: length and header, tensors, padding; at both ends and anywhere."""
    store = write(tmp_path / "store")
    sound, generator = (store / name).read_bytes(), random.Random(name)
    places = [0, 9, len(sound) - 1, *(generator.randrange(len(sound)) for _ in range(19))]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        (store / name).write_bytes(damaged)
        with pytest.raises(CheckpointFormatError, match=name), open_store(store) as opened:
            opened.verify()
        if name == SLABS:
            changed = pytest.raises(CheckpointFormatError, match=rf"{name}.*bytes changed")
            with open_store(store) as opened, changed:
                read(opened)
    (store / name).write_bytes(sound)
    with open_store(store) as opened:
        opened.verify()


def assert_one_good_store(folder: Path) -> None:
    assert os.listdir(folder) == ["store"]
    with open_store(folder / "store") as opened:
        opened.verify()


def test_a_full_disk_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreWriteError, match=r"No space left on device.*make room"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path) == []


def test_of_two_writers_the_second_takes_the_place_of_one_that_fails(tmp_path: Path) -> None:
    """And waits until then. Where the first does not fail: tests/merging, of the same folders."""
    first = StoreWriter(tmp_path / "store", some_layouts())
    second = threading.Thread(target=write, args=(tmp_path / "store",), kwargs={"seed": 2})
    second.start()
    second.join(0.5)
    assert second.is_alive()
    first.close()
    second.join()
    assert_one_good_store(tmp_path)
    with open_store(tmp_path / "store") as opened:
        assert_same_store(filled(seed=2), read(opened))


def test_another_writer_removes_its_folder_as_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, removed = os.open, list[Path]()

    def removing(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".partial") and not removed:
            removed.append(path)
            os.rmdir(path)
        return genuine(path, *args, **options)

    monkeypatch.setattr(os, "open", removing)
    write(tmp_path / "store")
    assert removed
    assert_one_good_store(tmp_path)


# What is cleaned up.

NAME = ".store.poros.partial"
OURS = {SLABS: b"half"}


def lay(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "files", "is_left"),
    [
        (NAME, OURS, False),
        (NAME, {}, False),  # killed before it had written anything
        (NAME, {**OURS, "additional_chat_templates/a.jinja": b"x"}, False),
        (".store.mine.partial", OURS, True),
        (".other.poros.partial", OURS, True),
    ],
)
def test_what_is_cleaned_up_is_ours(
    tmp_path: Path, name: str, files: dict[str, bytes], is_left: bool
) -> None:
    lay(tmp_path / name, files)
    write(tmp_path / "store")
    assert set(os.listdir(tmp_path)) == {"store", *([name] if is_left else [])}
    with open_store(tmp_path / "store") as opened:
        assert {*os.listdir(tmp_path / "store")} == {REST, SLABS, *opened.manifest.files}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    lay(tmp_path / "elsewhere", OURS)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreWriteError):
        write(tmp_path / "store")
    assert os.listdir(tmp_path / "elsewhere") == [*OURS]


def test_without_locks_the_folder_of_another_is_left(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "store")
    lay(tmp_path / NAME, OURS)
    with pytest.raises(StoreWriteError, match="No locks available"):
        StoreWriter(tmp_path / "store", some_layouts())
    assert os.listdir(tmp_path / NAME) == [*OURS]


# Of models: made by ``poros.load``, opened again, refused where it is another's.

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
        about = opened.about
    assert about.versions["torch"] == version("torch")  # of the package, without its build
    assert about.device == "cpu" and about.num_threads == torch.get_num_threads()
    assert about.quantization == quantization().to_dict() and about.dtype == "bfloat16"
    assert str(about.origin.fingerprint).startswith("xxh3:")
    assert (about.origin.source, about.origin.revision) == (str(kinds.dense()), None)


def test_options_of_a_reopened_model(kinds: Kinds) -> None:
    """Those of the configuration; others than its layers are refused, as of other transformers."""
    assert load(kinds.store(), attn_implementation="eager").config._attn_implementation == "eager"
    kept, given = (
        json.loads((at / "config.json").read_text()) for at in (kinds.store(), kinds.dense())
    )
    assert kept == given
    with pytest.raises(CheckpointFormatError, match=r"as this configuration.* layer 0"):
        load(kinds.store(), intermediate_size=96)
    with pytest.raises(CheckpointFormatError, match="3 layers, found 4"):
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
    store = tmp_path / "store"
    load(source, store=store)
    hashed = noted(monkeypatch, Checkpoint, "fingerprint")
    load(source, store=store)
    assert hashed == []
    os.utime(source / "model.safetensors")
    load(source, store=store)
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint"):
        load(source, store=store)
    assert [each.path for (each,) in hashed] == [source, source]


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
