"""Blocks on a disk: the right bytes, read ahead of the walk, never a hang.

First without a model, then with one whose file is written to or cut off: it is refused, and
adapters survive.
"""

import copy
import fcntl
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

import poros
from poros.eager_streams import EagerStreams
from poros.errors import CheckpointFormatError
from poros.gates import tiny
from poros.host import disk
from poros.host.disk import NUM_STAGING, DiskStore
from poros.host.layout import PAGE_NUM_BYTES
from poros.host.store import HostStore, attached_store
from poros.loaders.load import load
from poros.loaders.store import SLABS, OpenStore, open_store
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.slots.schedule import Phase
from poros.streams import StreamContext
from tests.journal import training_visits
from tests.loading.checkpoints import write_store
from tests.loading.loaded import Kinds, budget_for
from tests.slots import Slots, random_store
from tests.support import prepare_plain
from tests.unit.driver import FakeDriver, install
from tools.adversary import AdversarialStreams, SlotHazard

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch
EAGER = EagerStreams(CPU)


@pytest.fixture(autouse=True)
def no_reader_is_left(request: pytest.FixtureRequest) -> None:
    """Models that are not restored leave theirs to the collector."""
    if "store" not in request.fixturenames:
        request.getfixturevalue("readers")


class DiskSlots(Slots):
    """Slots whose blocks are read from a file."""

    host: DiskStore

    def __init__(
        self, folder: Path, num_blocks: int, num_slots: int, streams: StreamContext, first: int = 0
    ) -> None:
        self.num_blocks, self.num_slots, self.streams = num_blocks, num_slots, streams
        source = random_store([256 * (1 + block % 3) for block in range(num_blocks)])
        for block, slab in enumerate(source.slabs):
            (spec,) = slab.layout.tensors
            slab.layout = replace(slab.layout, tensors=(replace(spec, name=f"{block}"),))
        layouts = [slab.layout for slab in source.slabs]
        write_store(folder / "store", source, {}, {})
        # As a loader opens it: the first layers in memory, the others on the disk.
        with open_store(folder / "store") as opened:
            resident = HostStore.allocate(layouts[:first])
            opened.read_into(resident)
            made = DiskStore.over_file(resident, opened.slabs, layouts, opened.identity)
        assert isinstance(made, DiskStore)
        self.host = made
        self.ring = DeviceRing(layouts, num_slots, streams)
        self.manager = BlockManager(self.host, self.ring, streams)


@pytest.mark.parametrize("num_slots", [2, 3, 5])
@pytest.mark.parametrize("first", [0, 3])
def test_every_visit_sees_its_block(num_slots: int, first: int, tmp_path: Path) -> None:
    streams = AdversarialStreams()
    with streams.watch():
        slots = DiskSlots(tmp_path, 9, num_slots, streams, first)
        slots.train(3)
        slots.infer()
        for block in (8, 0, 4, 4, 7, 2):  # nobody predicts this
            slots.visit(block, Phase.FORWARD)
        slots.train(2)


def test_control_without_waiting_for_copies_the_adversary_sees_other_bytes(tmp_path: Path) -> None:
    """Staging that is overwritten before its copy has passed."""

    class Impatient(AdversarialStreams):
        def has_passed(self, event: Any) -> bool:
            return True

        def synchronize(self, event: Any) -> None:
            pass

        def wait(self, event: Any) -> None:
            while self._queue and self._queue[0][0] <= event.number:
                _, target, source = self._queue.popleft()
                with self._copying():
                    target.get().copy_(source.get())
            super().wait(event)

    with pytest.raises((AssertionError, SlotHazard)):
        DiskSlots(tmp_path, 12, 6, Impatient()).train(2)


def test_the_reader_is_ahead_of_the_walk(tmp_path: Path, monkeypatch: Patch) -> None:
    """While one block computes, the next ones are read: nothing is left to wait for."""
    slots = DiskSlots(tmp_path, 8, 2, EAGER)
    slots.train(1)
    read = disk._Reader._read

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        read(*arguments)

    monkeypatch.setattr(disk._Reader, "_read", slow)
    num_loads = slots.manager.num_loads

    def visit(pause: float) -> float:
        begin = slots.host.disk_stall_ms
        for block, phase in training_visits(8, 2):
            slots.visit(block, phase)
            time.sleep(pause)
        return slots.host.disk_stall_ms - begin

    # Computing takes twice as long as reading, or no time at all.
    hidden, bare = visit(0.04), visit(0.0)
    num_loads = (slots.manager.num_loads - num_loads) // 2
    assert bare > 0.5 * num_loads * 20 and hidden < 0.3 * bare, (hidden, bare, num_loads)


def test_staging_is_page_locked_first(
    tmp_path: Path, readers: Callable[[], list[threading.Thread]], monkeypatch: Patch
) -> None:
    driver = install(FakeDriver(refuse_at=NUM_STAGING + 1), monkeypatch)
    slots = DiskSlots(tmp_path, 8, 2, EAGER, first=4)
    slots.host.pin(CPU)
    staged = {slab.bytes.data_ptr() for slab in slots.host._staging}
    assert staged < driver.locked.keys() and len(driver.locked) == NUM_STAGING + 1
    assert slots.host.slabs[0].is_pinned and not slots.host.slabs[1].is_pinned
    assert slots.host.pinned_num_bytes == sum(driver.locked.values())
    assert len(slots.host.fallbacks) == 1
    slots.train(1)
    slots.host.unpin()
    assert driver.locked == {} and readers() == []


def test_closing_waits_for_the_read_that_has_begun_alone(
    tmp_path: Path, readers: Callable[[], list[threading.Thread]], monkeypatch: Patch
) -> None:
    """Those that are queued behind it are not begun any more."""
    begun, go_on = threading.Event(), threading.Event()
    preadv, places = os.preadv, list[int]()

    def held(*arguments: Any) -> int:
        begun.set()
        go_on.wait()
        places.append(arguments[2])
        return preadv(*arguments)

    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    monkeypatch.setattr(os, "preadv", held)
    slots.host.read_ahead(range(6))
    begun.wait()
    threading.Timer(0.1, go_on.set).start()
    slots.host.unpin()
    assert len(set(places)) == 1 and slots.host._staging == [] and readers() == []


# Reads that fail, or are odd.


def reading(monkeypatch: Patch, how: Callable[[int, Any, int], tuple[Any, ...]]) -> None:
    """Every read takes the arguments that ``how`` makes of its own, or raises what it raises."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: preadv(*how(*arguments)))


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_read_error_reaches_the_training_thread(
    at: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    slots, calls = DiskSlots(tmp_path, 6, 2, AdversarialStreams()), list[int]()

    def fail(*arguments: Any) -> tuple[Any, ...]:
        calls.append(0)
        if len(calls) >= at:
            raise OSError(5, "Input/output error")
        return arguments

    with monkeypatch.context() as patch:
        reading(patch, fail)
        with pytest.raises(CheckpointFormatError, match=r"slabs.bin.*Input/output error"):
            slots.train(3)
    slots.train(2)  # the disk is back


@pytest.mark.parametrize("num_direct", [0, 3])
def test_where_direct_reads_are_refused_the_page_cache_serves(
    num_direct: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """From the first read on, or after some."""
    direct = list[int]()

    def no_direct(file: int, *arguments: Any) -> tuple[Any, ...]:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(file)
            if len(direct) > num_direct:
                raise OSError(22, "Invalid argument")
        return file, *arguments

    reading(monkeypatch, no_direct)
    DiskSlots(tmp_path, 6, 2, AdversarialStreams()).train(2)
    assert len(direct) == num_direct + 1


def test_a_file_that_was_cut_off_is_not_opened(tmp_path: Path) -> None:
    host = DiskSlots(tmp_path, 6, 2, EAGER).host
    os.truncate(host.behind.path, host.behind.offset + PAGE_NUM_BYTES)
    layouts, identity = [slab.layout for slab in host.slabs], host.behind._identity
    with pytest.raises(CheckpointFormatError, match="another file"):
        DiskStore.over_file(HostStore([]), host.behind.path, layouts, identity)


def test_a_file_that_was_replaced_is_read_on(tmp_path: Path) -> None:
    """It is open."""
    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    file = slots.host.behind.path
    (tmp_path / "other").write_bytes(file.read_bytes()[:-1] + b"x")
    os.replace(tmp_path / "other", file)
    slots.train(2)


# With a model.

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
    model = tiny.attach(tiny.without_repacking(base))
    return prepare_plain(model, device="cpu", **options)


def step(model: Any) -> None:
    model.train()
    model(**BATCH).loss.backward()


def flip(store: Path, first: int = 2) -> None:
    """A bit of every layer from ``first`` on."""
    file = store / SLABS
    with open_store(store) as opened:
        places = [at + 300 for at in opened.starts[first:-1]]
    with file.open("r+b") as stream:
        for place in places:
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ 1]))


def cut(store: Path) -> None:
    os.truncate(store / SLABS, PAGE_NUM_BYTES)


def rewrite(store: Path) -> None:
    """The same bytes, later."""
    text = (store / SLABS).read_bytes()
    with (store / SLABS).open("r+b") as stream:
        stream.write(text)
    os.utime(store / SLABS, ns=(0, 0))


def look(model: Any, _: Path) -> None:
    found = model.state_dict()
    found[next(name for name in found if "layers.3.mlp.down_proj" in name)].sum()


BULK: dict[str, Callable[[Any, Path], object]] = {
    "prepare": lambda base, _: prepared(base),
    "prepare with copies": lambda base, _: prepared(base, block_size=4),
    "save": lambda base, folder: base.save_pretrained(folder),
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


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_bit_flipped_before_it_was_opened(store: Path, first: int) -> None:
    """Layers beyond the budget are hashed too."""
    flip(store, first)
    with pytest.raises(CheckpointFormatError, match=rf"{SLABS}.*bytes changed"):
        half(store)


def test_control_without_hashing_it_would_train(store: Path, monkeypatch: Patch) -> None:
    flip(store, 3)
    monkeypatch.setattr(OpenStore, "verify_slabs", lambda *_: None)
    step(prepared(half(store), self_check="off"))


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
        "saving the base": lambda: base.save_pretrained(tmp_path / "base"),
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


def test_copies_have_nothing_to_do_with_the_file(store: Path, tmp_path: Path) -> None:
    base = half(store)
    twins = [copy.deepcopy(base), pickle.loads(pickle.dumps(base))]
    cut(store)
    for index, twin in enumerate(twins):
        look(twin, tmp_path)
        twin.save_pretrained(tmp_path / str(index))
    left, right = (load_file(tmp_path / f"{index}/model.safetensors") for index in "01")
    assert all(torch.equal(left[name], right[name]) for name in left)
