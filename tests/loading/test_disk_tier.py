"""Blocks on a disk, without a model: the right bytes, read ahead of the walk, never a hang."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import CheckpointFormatError
from poros.host import disk
from poros.host.disk import NUM_STAGING, DiskStore
from poros.host.layout import PAGE_NUM_BYTES
from poros.host.store import HostStore
from poros.loaders.store import open_store
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.slots.schedule import Phase, loads, training_visits, walk
from poros.streams import EagerStreams, StreamContext
from tests.loading.stores import write_store
from tests.slots import Slots, random_store
from tests.unit.driver import FakeDriver, install
from tools.adversary import AdversarialStreams, SlotHazard

pytestmark = pytest.mark.usefixtures("readers")

CPU = torch.device("cpu")
EAGER = EagerStreams(CPU)


class DiskSlots(Slots):
    """Slots whose blocks are read from a file."""

    host: DiskStore

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
        # As a loader opens it: the first layers in memory, the others on the disk.
        with open_store(folder / "store") as opened:
            resident = HostStore.allocate(opened.layouts[:first])
            opened.read_into(resident)
            file, digests = opened.slabs, opened.manifest.slab_digests
            self.host = DiskStore.over_file(
                resident, file, opened.data_offset, opened.layouts, digests, opened.identity
            )
        layouts = [slab.layout for slab in self.host.slabs]
        self.ring = DeviceRing(layouts, num_slots, streams)
        self.manager = BlockManager(self.host, self.ring, streams, self.journal)


def test_a_buffer_that_a_dead_reader_holds_is_not_waited_for(tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 9, 2, EAGER)
    slots.train(1)
    jobs, reader = slots.host._jobs, slots.host._reader
    assert jobs is not None and reader is not None
    jobs.put(None)  # it ends, and what is given to it from now on is never read
    reader.join()
    for staging in slots.host._staging:
        staging.block, staging.is_lent = 99, False
        staging.is_read.clear()
    with pytest.raises(CheckpointFormatError, match="has died"):
        slots.host.borrow(5)


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


def test_the_reader_is_ahead_of_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one block computes, the next ones are read: nothing is left to wait for."""
    slots = DiskSlots(tmp_path, 8, 2, EAGER)
    slots.train(1)
    fill = disk._fill

    def slow(descriptor: int, job: Any) -> None:
        time.sleep(0.02)
        fill(descriptor, job)

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
    assert bare > 0.5 * num_loads * 20 and hidden < 0.3 * bare, (hidden, bare, num_loads)


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_loads_are_what_the_walk_prefetches(num_slots: int) -> None:
    contents: list[int | None] = [None] * num_slots
    actions = walk(training_visits(6, 3), 6, num_slots)
    expected = [action.block for action in actions if action.kind == "prefetch"]
    visits = [block for block, _ in training_visits(6, 3)]
    assert sorted(loads(contents, visits)) == sorted(expected)


def test_staging_is_page_locked_first(
    tmp_path: Path, readers: Callable[[], list[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = install(FakeDriver(refuse_at=NUM_STAGING + 1), monkeypatch)
    slots = DiskSlots(tmp_path, 8, 2, EAGER, first=4)
    slots.host.pin(CPU)
    staged = {staging.slab.bytes.data_ptr() for staging in slots.host._staging}
    assert staged < driver.locked.keys() and len(driver.locked) == NUM_STAGING + 1
    assert slots.host.slabs[0].is_pinned and not slots.host.slabs[1].is_pinned
    assert slots.host.pinned_num_bytes == sum(driver.locked.values())
    assert len(slots.host.fallbacks) == 1
    slots.train(1)
    slots.host.unpin()
    assert driver.locked == {} and readers() == []


# Reads that fail, or are odd.


def reading(
    monkeypatch: pytest.MonkeyPatch, how: Callable[[int, Any, int], tuple[Any, ...]]
) -> None:
    """Every read takes the arguments that ``how`` makes of its own, or raises what it raises."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: preadv(*how(*arguments)))


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_read_error_reaches_the_training_thread(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, calls = DiskSlots(tmp_path, 6, 2, AdversarialStreams()), list[int]()

    def fail(*arguments: Any) -> tuple[Any, ...]:
        calls.append(0)
        if len(calls) >= at:
            raise OSError(5, "Input/output error")
        return arguments

    with monkeypatch.context() as patch:
        reading(patch, fail)
        with pytest.raises(CheckpointFormatError, match=r"slabs.safetensors.*Input/output error"):
            slots.train(3)
    slots.train(2)  # the disk is back


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    reading(monkeypatch, lambda file, buffers, offset: (file, [buffers[0][:4096]], offset))
    slots.train(2)


def test_where_direct_reads_are_refused_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[int]()

    def no_direct(file: int, *arguments: Any) -> tuple[Any, ...]:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(22, "Invalid argument")
        return file, *arguments

    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    reading(monkeypatch, no_direct)
    slots.train(2)
    assert len(refused) == 1


def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 6, 2, EAGER)
    data_offset = slots.host.behind.offset
    os.truncate(slots.host.file, data_offset + PAGE_NUM_BYTES)
    with pytest.raises(CheckpointFormatError, match="another file"):
        for block in range(6):
            with slots.visiting(block, Phase.FORWARD):
                pass
    layouts = [slab.layout for slab in slots.host.slabs]
    with pytest.raises(CheckpointFormatError, match=r"expected \d+ bytes, found"):
        DiskStore.over_file(HostStore([]), slots.host.file, data_offset, layouts, [""] * 6)


@pytest.mark.parametrize("when", ["before the first read", "in the middle"])
@pytest.mark.parametrize("how", ["replaced", "written"])
def test_a_file_that_changed_is_not_read(when: str, how: str, tmp_path: Path) -> None:
    slots = DiskSlots(tmp_path, 6, 2, AdversarialStreams())
    if when == "in the middle":
        slots.train(2)
    file = slots.host.file
    text = file.read_bytes()[:-1] + b"x"
    if how == "written":
        with file.open("r+b") as stream:
            stream.write(text)
    else:
        (tmp_path / "other").write_bytes(text)
        os.replace(tmp_path / "other", file)
        if when == "in the middle":
            slots.train(1)  # the reader has the file of before
            return
    with pytest.raises(CheckpointFormatError, match="another file"):
        slots.train(2)
