"""Host slabs: where tensors lie in them, their arenas, and page locks that the driver refuses."""

import gc
import logging
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.errors import HostMemoryError, PorosError
from poros.host.layout import ALIGNMENT, PAGE_NUM_BYTES, BlockLayout, slot_sizes, view
from poros.host.slab import Arena, HostSlab
from poros.host.store import HostStore
from tests.support import num_arenas, random_bytes, same_bits
from tests.unit.driver import FakeDriver, install

CPU = torch.device("cpu")
LAYOUT = BlockLayout.pack([("packed", torch.empty(300, 1)), ("absmax", torch.empty(5))])


def three_slabs() -> HostStore:
    return HostStore.allocate([LAYOUT] * 3)


# Layouts.

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
DTYPES = (torch.uint8, torch.int8, torch.bool, torch.int64, *FLOATS)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (3, 0, 2), (3, 5), (1, 1, 1), (64, 3))
SHAPES += ((1,), (7,), (255,), (256,), (257,))

forms = st.tuples(
    st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
)


def named(forms: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"tensor {index}", random_bytes(dtype, shape, seed=index))
        for index, (shape, dtype) in enumerate(forms)
    ]


@settings(deadline=None)
@given(st.lists(forms, max_size=8))
def test_tensors_are_aligned_apart_and_inside_and_their_bytes_come_back_from_one_copy(
    forms: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    """Written one by one into a slab, copied as a whole into a slot, read back one by one."""
    tensors = named(forms)
    layout = BlockLayout.pack(iter(tensors))
    expected = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    assert [(spec.name, spec.shape, spec.dtype) for spec in layout.tensors] == expected
    slab = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for spec, (_, tensor) in zip(layout.tensors, tensors, strict=True):
        assert spec.offset % ALIGNMENT == 0 and spec.num_bytes == tensor.nbytes
        assert spec.offset + spec.num_bytes <= layout.num_bytes
        view(slab, spec).copy_(tensor)
    for left, right in pairwise(layout.tensors):
        assert left.offset + left.num_bytes <= right.offset
    used = sum(spec.num_bytes for spec in layout.tensors)
    assert used <= layout.num_bytes < used + ALIGNMENT * max(len(tensors), 1)
    assert layout.num_bytes % ALIGNMENT == 0
    slot = torch.full((layout.num_bytes + 512,), 0xFF, dtype=torch.uint8)
    slot[: layout.num_bytes] = slab
    for spec, (_, tensor) in zip(layout.tensors, tensors, strict=True):
        found = view(slot, spec)
        assert found.shape == tensor.shape and found.dtype == tensor.dtype
        assert found.is_contiguous() and same_bits(found, tensor)


# A slot is as large as the largest block of its residue class.


def layouts(sizes: list[int]) -> list[BlockLayout]:
    return [BlockLayout((), num_bytes=size * ALIGNMENT) for size in sizes]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.data())
def test_every_block_fits_its_slot_and_no_slot_is_larger_than_needed(
    sizes: list[int], data: st.DataObject
) -> None:
    num_slots = data.draw(st.integers(1, len(sizes)))
    found = slot_sizes(layouts(sizes), num_slots)
    held: dict[int, list[int]] = {}
    for block, size in enumerate(sizes):
        held.setdefault(block % num_slots, []).append(size * ALIGNMENT)
    assert found == [max(held[slot]) for slot in range(num_slots)]


# Slabs.


def test_memory_that_cannot_be_had_is_a_typed_error() -> None:
    impossible = BlockLayout((), num_bytes=2**50)
    with pytest.raises(HostMemoryError, match=f"expected {2**50} bytes.*found none.*free memory"):
        HostSlab(impossible)
    with pytest.raises(MemoryError) as caught:
        HostStore.allocate([LAYOUT, impossible])
    assert isinstance(caught.value, PorosError)


# Arenas.


def resident_num_bytes(arena: Arena) -> int:
    """Memory that the system has committed to the arena."""
    address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")
    return 1024 * int(after.partition("Rss:")[2].split()[0])


@pytest.mark.parametrize(("num_bytes", "num_layers"), [(8_500_000, 24), (492_000_000, 80)])
def test_an_arena_is_hardly_larger_than_its_slabs(num_bytes: int, num_layers: int) -> None:
    """Of layers of 0.5B and 72B; the allocator of page-locked memory would round to powers of two.

    Only address space is taken: nothing is written.
    """
    layouts = [BlockLayout((), num_bytes)] * num_layers
    (arena,) = {slab.arena for slab in HostStore.allocate(layouts).slabs}
    assert num_layers * num_bytes <= len(arena.memory) <= 1.01 * num_layers * num_bytes
    assert resident_num_bytes(arena) == 0


def test_memory_is_committed_as_it_is_written_and_goes_with_the_last_tensor() -> None:
    gc.collect()
    store = HostStore.allocate([BlockLayout((), 4 * PAGE_NUM_BYTES)] * 3)
    arena = store.slabs[0].arena
    assert resident_num_bytes(arena) == 0
    store.slabs[1].bytes.fill_(1)
    assert resident_num_bytes(arena) == 4 * PAGE_NUM_BYTES
    assert not store.slabs[0].bytes.any() and not store.slabs[2].bytes.any()
    store = three_slabs()
    before = num_arenas()
    memory = weakref.ref(store.slabs[0].arena.memory)
    slab = store.slabs[1]
    kept = slab.tensor(slab.layout.tensors[0])
    kept.fill_(7)
    del store, slab
    gc.collect()
    assert memory() is not None and bool((kept == 7).all())
    del kept
    assert memory() is None and num_arenas() == before - 1


def test_a_private_mapping_of_a_file_keeps_writes_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (2 * PAGE_NUM_BYTES // 256))
    with file.open("rb") as stream:
        arena = Arena(PAGE_NUM_BYTES, file=stream.fileno(), offset=PAGE_NUM_BYTES, private=True)
    (slab,) = HostStore.over(arena, [BlockLayout((), PAGE_NUM_BYTES)]).slabs
    assert slab.bytes[:3].tolist() == [0, 1, 2]
    slab.bytes.fill_(5)
    assert file.read_bytes()[PAGE_NUM_BYTES : PAGE_NUM_BYTES + 3] == bytes([0, 1, 2])


# Page locks.


@pytest.mark.parametrize("refuse_at", [0, 1, 2, 3])
def test_slabs_are_locked_in_place_until_the_driver_refuses_and_the_rest_is_pageable(
    refuse_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = install(FakeDriver(refuse_at), monkeypatch)
    store = three_slabs()
    with caplog.at_level(logging.WARNING, "poros"):
        store.pin(CPU)
    locked = store.slabs[:refuse_at]
    assert driver.locked == {slab.bytes.data_ptr(): slab.layout.num_bytes for slab in locked}
    assert [slab.is_pinned for slab in store.slabs] == [index < refuse_at for index in range(3)]
    assert store.pinned_num_bytes == refuse_at * store.num_bytes // 3
    if refuse_at == 3:
        assert store.fallbacks == [] and caplog.records == []
        return
    # Nothing is tried after a refusal: the limit is one for all slabs.
    assert driver.calls == ["register"] * refuse_at + ["refused"]
    (record,) = caplog.records
    message = record.getMessage()
    assert "page-locked" in message and f"block {refuse_at}" in message and "ulimit -l" in message
    assert store.fallbacks == [f"pageable host memory for blocks {refuse_at} to 2"]


def test_slabs_are_unregistered_once_behind_the_device_and_before_their_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ``unpin``, and where a store is dropped."""
    driver = install(FakeDriver(refuse_at=2), monkeypatch)
    store = three_slabs()
    store.pin(CPU)
    driver.calls.clear()
    for _ in range(2):
        store.unpin()
        assert driver.calls == ["synchronize", "unregister"] * 2
        assert driver.locked == {} and store.pinned_num_bytes == 0
    del store
    gc.collect()
    assert driver.calls == ["synchronize", "unregister"] * 2
    driver = install(FakeDriver(), monkeypatch)
    store = three_slabs()
    store.pin(CPU)
    alive: list[bool] = []
    memories = [weakref.ref(slab.arena.memory) for slab in store.slabs]
    unregister = driver.cudaHostUnregister

    def watching(pointer: int) -> int:
        alive.append(any(memory() is not None for memory in memories))
        return unregister(pointer)

    driver.cudaHostUnregister = watching  # type: ignore[method-assign]
    del store
    gc.collect()
    assert alive == [True] * 3 and driver.locked == {}
    assert [memory() for memory in memories if memory() is not None] == []


@pytest.mark.gpu
def test_page_locked_slabs_of_an_arena_are_copied_as_they_are() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = three_slabs()
    for index, slab in enumerate(store.slabs):
        slab.bytes.fill_(index + 1)
    store.pin(device)
    assert store.pinned_num_bytes == store.num_bytes and store.fallbacks == []
    for slab in store.slabs:
        assert slab.bytes.is_pinned()
        target = torch.zeros_like(slab.bytes, device=device)
        target.copy_(slab.bytes, non_blocking=True)
        torch.cuda.synchronize(device)
        assert same_bits(target.cpu(), slab.bytes)
    store.unpin()
    assert not store.slabs[0].bytes.is_pinned()
