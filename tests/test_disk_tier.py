"""Blocks on a disk: exact under the worst streams, read ahead of the walk, and never a hang."""

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from slots import Slots, random_store
from snapshots import assert_same_run, bits_of, build, changes, run
from stores import lay_down, parts_by_layer
from support import AdversarialPrepare
from test_host import FakeDriver, install

import poros
from poros.errors import CheckpointFormatError
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams, SlotHazard
from poros.host import disk
from poros.host.disk import NUM_STAGING, DiskStore
from poros.host.store import HostStore, leave_store, left_store
from poros.layout import PAGE_NUM_BYTES
from poros.loaders.store import open_store
from poros.loaders.writer import write_store
from poros.model.attach import Takeover
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.slots.schedule import Phase, count, loads, training_visits, walk
from poros.streams import EagerStreams, StreamContext

NUM_LAYERS = 7
CPU = torch.device("cpu")


def reopened(store: Path, num_layers: int) -> DiskStore:
    """As a loader opens it: the first layers in memory, the others on the disk."""
    with open_store(store) as opened:
        resident = HostStore.allocate(opened.layouts[:num_layers])
        opened.read_into(resident)
        return DiskStore.over_file(
            resident,
            opened.slabs,
            opened.data_offset,
            opened.layouts,
            opened.manifest.slab_digests,
            opened.identity,
        )


def base_model(**options: Any) -> Any:
    settings = {"num_layers": NUM_LAYERS, "hidden_size": 64, **options}
    return build(settings.pop("architecture", "qwen2"), **settings).unload()


def loaded(store: Path, num_resident: int = 2, **options: Any) -> Any:
    """A model whose layers lie in a store on the disk, the first ones in memory too."""
    model = base_model(**options)
    if not store.exists():
        write_store(store, lay_down(model), {}, {})
    tier = reopened(store, num_resident)
    for parts, slab in zip(parts_by_layer(model), tier.slabs, strict=True):
        for part, spec in zip(parts, slab.layout.tensors, strict=True):
            part.put(slab.tensor(spec))
    model.requires_grad_(False)
    leave_store(model, tier)
    return model


def adapted(base: Any) -> Any:
    return tiny.attach_lora(base, rank=8, dropout=0.05, seed=1)


def host_of(model: Any) -> DiskStore:
    host = poros.runtime(model)._takeover.host
    assert isinstance(host, DiskStore)
    return host


EARLIER: set[threading.Thread] = set()
"""Readers of models that other tests of this process have left to the garbage collector."""


def readers() -> list[threading.Thread]:
    found = [each for each in threading.enumerate() if each.name == "poros-reader"]
    return [each for each in found if each not in EARLIER]


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    EARLIER.clear()
    EARLIER.update(readers())
    yield
    gc.collect()
    end = time.monotonic() + 5
    while readers() and time.monotonic() < end:
        time.sleep(0.01)
    assert readers() == []


# Whole models.


@pytest.mark.parametrize(
    ("architecture", "quantize", "num_layers", "block_size"),
    [
        *((each, quantize, 2, 1) for each in ("qwen2", "mixtral") for quantize in (True, False)),
        ("gemma3", True, 2, 1),
        # All on the disk; blocks of two; a block in memory and on the disk; nothing on the disk.
        *(("qwen2", True, *each) for each in ((0, 1), (4, 2), (3, 2), (7, 1))),
    ],
)
def test_training_from_the_disk_is_exact(
    architecture: str, quantize: bool, num_layers: int, block_size: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"architecture": architecture, "quantize": quantize}
    expected = run(adapted(base_model(**options)))
    model = adapted(loaded(tmp_path / "store", num_layers, **options))
    bits = bits_of(model)
    prepare = AdversarialPrepare()
    with prepare.watching():
        prepare(model, block_size=block_size)
        assert poros.runtime(model)._takeover.is_adopted
        assert changes(bits, bits_of(model)) == {}
        found = run(model)
    assert_same_run(expected, found)
    runtime = poros.runtime(model)
    num_blocks = -(-NUM_LAYERS // block_size)
    on_disk = num_blocks - -(-num_layers // block_size)
    if on_disk > 0:
        stats = runtime.stats()
        last = range(num_blocks - on_disk, num_blocks)
        assert stats["disk_num_bytes"] == sum(runtime.host_slab(k).numel() for k in last)
        assert stats["disk_stall_ms"] > 0
        assert len(readers()) == 1
    # What moved is what the plan says, wherever it came from.
    visits = training_visits(num_blocks, 2)
    assert runtime.stats()["num_loads"] == count(walk(visits, num_blocks, 2), "prefetch")
    trained = bits_of(model)
    poros.restore(model)
    assert changes(trained, bits_of(model)) == {} and readers() == []


def test_memory_is_the_budget_and_the_staging(tmp_path: Path) -> None:
    model = adapted(loaded(tmp_path / "store"))
    tier = left_store(model.get_base_model())
    assert tier is not None
    sizes = [slab.layout.num_bytes for slab in tier.slabs]
    poros.prepare(model)
    stats = poros.runtime(model).stats()
    staging = NUM_STAGING * -(-max(sizes) // PAGE_NUM_BYTES) * PAGE_NUM_BYTES
    assert stats["host_num_bytes"] == sum(sizes[:2]) + staging
    assert stats["disk_num_bytes"] == sum(sizes[2:])
    poros.restore(model)


def test_norms_cast_for_training_leave_the_file_as_it_is(tmp_path: Path) -> None:
    def cast(base: Any) -> Any:
        return adapted(prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))

    expected = run(cast(base_model()))
    model = cast(loaded(tmp_path / "store"))
    for block_size in (2, 1):
        poros.prepare(model, block_size=block_size)
        stats = poros.runtime(model).stats()
        assert stats["fallbacks"] == [] and stats["disk_num_bytes"] > 0
        if block_size == 1:
            assert_same_run(expected, run(model))
        poros.restore(model)


def test_a_weight_written_in_place_is_not_taken_from_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(base: Any) -> Any:
        with torch.no_grad():
            base.model.layers[4].mlp.up_proj.weight.data.mul_(2)
        return adapted(base)

    model = make(loaded(tmp_path / "store", quantize=False))
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(model)
    assert poros.runtime(model).stats()["fallbacks"] == ["blocks [4] copied to new host memory"]
    assert_same_run(run(make(base_model(quantize=False))), run(model))


def test_saved_weights_come_from_the_file(tmp_path: Path) -> None:
    base, plain = loaded(tmp_path / "store"), base_model()
    for index, each in enumerate((base, plain)):
        each.save_pretrained(tmp_path / str(index))
    left, right = ((tmp_path / f"{index}/model.safetensors").read_bytes() for index in (0, 1))
    assert left == right


def test_evaluation_and_generation_in_between(tmp_path: Path) -> None:
    expected, model = adapted(base_model()), poros.prepare(adapted(loaded(tmp_path / "store")))
    prompt = torch.tensor([[5, 6, 7]])
    for each in (expected, model):
        each.eval()
    tokens = [
        each.generate(prompt, max_new_tokens=3, do_sample=False) for each in (expected, model)
    ]
    assert torch.equal(*tokens)
    assert_same_run(run(expected), run(model))


def test_a_forgotten_model_ends_its_reader(tmp_path: Path) -> None:
    model = poros.prepare(adapted(loaded(tmp_path / "store")))
    run(model, num_steps=1)
    assert len(readers()) == 1
    reference = weakref.ref(host_of(model))
    del model
    gc.collect()
    assert reference() is None  # and the fixture waits for the thread


# Bytes, without a model.


class DiskSlots(Slots):
    """Slots whose blocks are read from a file."""

    def __init__(
        self, folder: Path, num_blocks: int, num_slots: int, streams: StreamContext, first: int = 0
    ) -> None:
        self.num_blocks, self.num_slots, self.streams = num_blocks, num_slots, streams
        self.journal = []
        source = random_store([256 * (1 + block % 3) for block in range(num_blocks)])
        for block, slab in enumerate(source.slabs):
            (spec,) = slab.layout.tensors
            slab.layout = replace(slab.layout, tensors=(replace(spec, name=f"{block}"),))
        write_store(folder / "store", source, {}, {})
        self.host = reopened(folder / "store", first)
        layouts = [slab.layout for slab in self.host.slabs]
        self.ring = DeviceRing(layouts, num_slots, streams)
        self.manager = BlockManager(self.host, self.ring, streams, self.journal)


def test_a_buffer_that_a_dead_reader_holds_is_not_waited_for(tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 9, 2, EagerStreams(torch.device("cpu")))
    slots.train(1)
    assert isinstance(slots.host, DiskStore)
    jobs, reader = slots.host._jobs, slots.host._reader
    assert jobs is not None and reader is not None
    jobs.put(None)  # it ends, and what is given to it from now on is never read
    reader.join()
    for staging in slots.host._staging:
        staging.block, staging.is_lent = 99, False
        staging.is_read.clear()
    with pytest.raises(CheckpointFormatError, match="has died"):
        slots.host.lend(5)


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


def test_without_waiting_for_copies_the_adversary_sees_other_bytes(tmp_path: Path) -> None:
    """The control: staging that is overwritten before its copy has passed."""

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

    slots = DiskSlots(tmp_path, 12, 6, Impatient())
    with pytest.raises((AssertionError, SlotHazard)):
        slots.train(2)


def test_the_reader_is_ahead_of_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one block computes, the next ones are read: nothing is left to wait for."""
    slots = DiskSlots(tmp_path, 8, 2, EagerStreams(CPU))
    slots.train(1)
    before = slots.host.disk_stall_ms
    original = disk._fill

    def slow(descriptor: int, job: Any) -> None:
        time.sleep(0.02)
        original(descriptor, job)

    monkeypatch.setattr(disk, "_fill", slow)
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
    assert bare > 0.5 * num_loads * 20 and hidden < 0.3 * bare, (before, hidden, bare, num_loads)


def test_loads_are_what_the_walk_prefetches() -> None:
    for num_slots in (2, 3, 4):
        contents: list[int | None] = [None] * num_slots
        visits = [block for block, _ in training_visits(6, 3)]
        expected = [
            each.block
            for each in walk(training_visits(6, 3), 6, num_slots)
            if each.kind == "prefetch"
        ]
        assert sorted(loads(contents, visits)) == sorted(expected)


# Faults.


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], int | None], at: int
) -> Iterator[None]:
    calls = 0
    original = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= at:
            found = error()
            if found is not None:
                return found
        return original(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield


def io_error() -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_read_error_reaches_the_training_thread(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    with (
        failing(monkeypatch, io_error, at),
        pytest.raises(CheckpointFormatError, match=r"slabs.safetensors.*Input/output error"),
    ):
        slots.train(3)
    # The disk is back: training goes on.
    slots.train(2)


def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 6, 2, EagerStreams(CPU))
    data_offset = slots.host.behind.offset
    os.truncate(slots.host.file, data_offset + PAGE_NUM_BYTES)
    with pytest.raises(CheckpointFormatError, match="another file"):
        for block in range(6):
            with slots.visiting(block, Phase.FORWARD):
                pass
    with pytest.raises(CheckpointFormatError, match=r"expected \d+ bytes, found"):
        DiskStore.over_file(
            HostStore([]),
            slots.host.file,
            data_offset,
            [slab.layout for slab in slots.host.slabs],
            [""] * len(slots.host.slabs),
        )


@pytest.mark.parametrize("when", ["before the first read", "in the middle"])
@pytest.mark.parametrize("how", ["replaced", "written"])
def test_a_file_that_changed_is_not_read(when: str, how: str, tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    if when == "in the middle":
        slots.train(2)
    file = slots.host.file
    if how == "replaced":
        (tmp_path / "other").write_bytes(file.read_bytes()[:-1] + b"x")
        os.replace(tmp_path / "other", file)
        if when == "in the middle":
            slots.train(1)  # the reader has the file of before
            return
    else:
        with file.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")
    with pytest.raises(CheckpointFormatError, match="another file"):
        slots.train(2)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return original(descriptor, [buffers[0][:4096]], offset)

    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", short)
        slots.train(2)


def test_where_direct_reads_are_refused_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    original = os.preadv

    def no_direct(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal refused
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused += 1
            raise OSError(22, "Invalid argument")
        return original(descriptor, buffers, offset)

    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", no_direct)
        slots.train(2)
    assert refused == 1


def test_staging_is_page_locked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(FakeDriver(refuse_at=NUM_STAGING + 1), monkeypatch)
    slots = DiskSlots(tmp_path, 8, 2, EagerStreams(CPU), first=4)
    slots.host.pin(CPU)
    staged = {each.slab.bytes.data_ptr() for each in slots.host._staging}
    assert staged < driver.locked.keys() and len(driver.locked) == NUM_STAGING + 1
    assert slots.host.slabs[0].is_pinned and not slots.host.slabs[1].is_pinned
    assert slots.host.pinned_num_bytes == sum(driver.locked.values())
    assert len(slots.host.fallbacks) == 1
    slots.train(1)
    slots.host.unpin()
    assert driver.locked == {} and readers() == []


@pytest.mark.parametrize("keep_last", [2, NUM_LAYERS])
@pytest.mark.parametrize("is_lent_early", [False, True])
def test_kept_layers_come_from_the_disk(
    tmp_path: Path, keep_last: int, is_lent_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are lent once, before any other: the reader has to wait for those copies too."""
    expected = run(adapted(base_model()))
    if is_lent_early:  # as on a GPU, where page-locking makes the staging buffers first
        make_room = Takeover._make_room

        def make(self: Takeover, *args: Any) -> None:
            host_of_takeover: Any = self.host
            host_of_takeover._make_staging()
            make_room(self, *args)

        monkeypatch.setattr(Takeover, "_make_room", make)
    model = AdversarialPrepare()(adapted(loaded(tmp_path / "store", 0)), keep_last=keep_last)
    assert_same_run(expected, run(model))
