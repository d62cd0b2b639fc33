"""The file behind the disk tier is written to or cut off: refused, and adapters survive."""

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

import poros
from poros.errors import CheckpointFormatError, ParityError
from poros.gates import tiny
from poros.host import disk, mapped
from poros.host.disk import DiskStore
from poros.host.layout import PAGE_NUM_BYTES, slab_offsets
from poros.host.limits import MemoryLimit
from poros.host.store import attached_store
from poros.loaders.load import load
from poros.loaders.manifest import SLABS
from poros.loaders.store import open_store
from poros.model import saving
from tests.children import run_forked
from tests.loading.loaded import Kinds, budget_for, differences
from tests.support import prepare_plain

BATCH = tiny.make_batches(1)[0]


@pytest.fixture
def store(kinds: Kinds, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kinds.store(), tmp_path / "store"))


def half(store: Path, num_layers: int = 2) -> Any:
    """The first layers in memory, the others on the disk."""
    model = load(store, host_budget=budget_for(store, num_layers))
    assert isinstance(attached_store(model), DiskStore)
    return model


def prepared(base: Any, **options: Any) -> Any:
    model = tiny.attach_lora(tiny.without_repacking(base))
    return prepare_plain(model, device="cpu", **options)


def step(model: Any) -> None:
    model.train()
    model(**BATCH).loss.backward()


def flip(store: Path, first: int = 2) -> None:
    """A bit of every layer from ``first`` on; the time of modification is set back."""
    file = store / SLABS
    before = file.stat()
    with open_store(store) as opened:
        places = [opened.data_offset + at + 300 for at in slab_offsets(opened.layouts)[first:]]
    with file.open("r+b") as stream:
        for place in places:
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(store: Path) -> None:
    os.truncate(store / SLABS, PAGE_NUM_BYTES)


def rewrite(store: Path) -> None:
    """The same bytes, later."""
    text = (store / SLABS).read_bytes()
    with (store / SLABS).open("r+b") as stream:
        stream.write(text)
    os.utime(store / SLABS, ns=(0, 0))


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def look(model: Any, _: Path) -> None:
    found = model.state_dict()
    found[next(name for name in found if "layers.3.mlp.down_proj" in name)].sum()


BULK: dict[str, Callable[[Any, Path], object]] = {
    "prepare": lambda base, _: prepared(base),
    "prepare with copies": lambda base, _: prepared(base, block_size=4),
    "save": save,
    "state_dict": look,
    "state_dict to a file": lambda base, folder: torch.save(base.state_dict(), folder / "x"),
    "deepcopy": lambda base, _: copy.deepcopy(base),
    "pickle": lambda base, _: pickle.dumps(base),
}


@pytest.mark.parametrize(
    ("use", "damage"),
    [
        *((use, flip) for use in BULK),
        *((use, cut) for use in ("prepare", "save", "state_dict")),
        ("state_dict", rewrite),
    ],
)
def test_between_load_and_prepare(
    store: Path, tmp_path: Path, use: str, damage: Callable[[Path], None]
) -> None:
    base = half(store)
    damage(store)
    with pytest.raises(CheckpointFormatError, match=SLABS):
        BULK[use](base, tmp_path)


@pytest.mark.parametrize("use", BULK)
def test_control_an_intact_file(store: Path, tmp_path: Path, use: str) -> None:
    """Linked and renamed, which moves its time of change, it is intact all the same."""
    base = half(store)
    BULK[use](base, tmp_path)
    os.link(store / SLABS, tmp_path / "link")
    (tmp_path / "link").chmod(0o600)
    BULK[use](half(store) if use.startswith("prepare") else base, tmp_path)


@pytest.mark.parametrize(
    ("first", "policy"),
    [
        (2, {}),
        (3, {"self_check": "off"}),
        (3, {"self_check": "off", "block_size": 2}),  # the second layer of a block
        (3, {"self_check": "off", "keep_last": 1}),
    ],
)
def test_a_bit_flipped_before_it_was_opened(
    store: Path, tmp_path: Path, first: int, policy: dict[str, Any]
) -> None:
    """Layers beyond the budget are hashed when they are read, by whatever reads them."""
    flip(store, first)
    base = half(store)
    for use in (lambda: save(base, tmp_path / "saved"), lambda: step(prepared(base, **policy))):
        with pytest.raises(CheckpointFormatError, match=rf"{SLABS}.*bytes changed"):
            use()


def test_control_without_hashing_it_would_train(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(store, 3)
    for module in (disk, mapped):
        monkeypatch.setattr(module, "require_digests", lambda *_: None)
    step(prepared(half(store), self_check="off"))
    with pytest.raises(ParityError, match="expected digest"):  # it knows what was written
        prepared(half(store))


@pytest.mark.parametrize("damage", [partial(flip, first=0), cut, rewrite])
def test_while_it_trains(store: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Nothing goes on with other bytes, and what was trained can be saved."""
    model = prepared(half(store, 0))  # more than the buffers of the reader hold
    step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    expected = {name: part.clone() for name, part in get_peft_model_state_dict(model).items()}
    damage(store)
    base = model.get_base_model()
    uses: dict[str, Callable[[], object]] = {
        "training": lambda: step(model),
        "restore": lambda: poros.restore(model),
        "saving the base": lambda: save(base, tmp_path / "base"),
        "a tensor of it": lambda: look(base, tmp_path),
    }
    for name, use in uses.items():
        with pytest.raises(CheckpointFormatError, match=SLABS):
            use()
        assert poros.runtime(model) is not None, name
    model.save_pretrained(tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and len(found) > 8
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_goes_on_when_a_link_was_made(store: Path, tmp_path: Path) -> None:
    model, expected = prepared(half(store)), prepared(load(store))
    for one in (model, expected):
        step(one)
        if one is model:
            os.link(store / SLABS, tmp_path / "link")
        step(one)
    gradients = [
        [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
        for one in (model, expected)
    ]
    assert len(gradients[0]) > 8
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    poros.restore(model)


def test_copies_have_nothing_to_do_with_the_file(store: Path, tmp_path: Path) -> None:
    base = half(store)
    twins = [copy.deepcopy(base), pickle.loads(pickle.dumps(base))]
    cut(store)
    for index, twin in enumerate(twins):
        look(twin, tmp_path)
        twin.save_pretrained(tmp_path / str(index))
    left, right = (load_file(tmp_path / f"{index}/model.safetensors") for index in "01")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_where_memory_is_short_it_is_saved_out_of_the_file(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = half(store)
    save(base, tmp_path / "read")
    monkeypatch.setattr(
        saving, "host_memory_left", lambda: MemoryLimit(2**30 + 10, "a small machine")
    )
    save(base, tmp_path / "mapped")
    files = [tmp_path / name / "model.safetensors" for name in ("read", "mapped")]
    assert files[0].read_bytes() == files[1].read_bytes()
    flip(store)
    with pytest.raises(CheckpointFormatError, match=SLABS):
        save(base, tmp_path / "again")
    found = differences(load(tmp_path / "read"), load(tmp_path / "mapped"))
    assert found == ["config", "name_or_path"]


CUT_MEANWHILE = """
import os, shutil, sys
from pathlib import Path
import torch
import poros
from poros.errors import PorosError
from poros.gates import tiny
from poros.loaders.load import load
torch.set_num_threads(1)
original = os.preadv
for use in ("save", "prepare", "restore"):
    for at in (1, 3, 99):
        store = Path(shutil.copytree(sys.argv[1], Path(sys.argv[2]) / f"{use}{at}"))
        base = load(store, host_budget=0)
        if use == "restore":
            model = poros.prepare(tiny.attach_lora(base), device="cpu")
        calls = 0
        def preadv(*args):
            global calls
            calls += 1
            if calls == at:
                os.truncate(store / "slabs.safetensors", 65536)
            return original(*args)
        os.preadv = preadv
        try:
            if use == "prepare":
                poros.prepare(tiny.attach_lora(base), device="cpu")
            else:
                if use == "restore":
                    poros.restore(model)
                base.save_pretrained(store / "saved")
            print(use, at, calls)
        except PorosError as error:
            print(use, at, type(error).__name__)
        finally:
            os.preadv = original
"""


def test_a_file_cut_off_at_a_read_is_an_error_not_a_signal(kinds: Kinds, tmp_path: Path) -> None:
    """At the first layer, at the third, and, as a control, not at all."""
    ran = run_forked(CUT_MEANWHILE, str(kinds.store()), str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        _, at, found = line.split()
        assert found == ("4" if at == "99" else "CheckpointFormatError"), ran.stdout
    assert len(ran.stdout.splitlines()) == 9
