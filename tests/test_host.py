"""Host slabs: their tensors, their memory, and page-locking when the driver refuses."""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from snapshots import assert_same_run, build, layers_of, run
from support import same_bits

import poros
from poros.errors import HostMemoryError, PorosError
from poros.host.store import HostSlab, HostStore
from poros.layout import ALIGNMENT, BlockLayout

CPU = torch.device("cpu")


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "packed": torch.randint(0, 256, (300, 1), dtype=torch.uint8),
        "absmax": torch.rand(5),
        "norm": torch.rand(33).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "counts": torch.arange(7),
    }


def filled_slab() -> tuple[HostSlab, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    source = some_tensors()
    layout = BlockLayout.pack(source.items())
    slab = HostSlab(layout)
    inside = {spec.name: slab.tensor(spec) for spec in layout.tensors}
    for name, tensor in inside.items():
        tensor.copy_(source[name])
    return slab, source, inside


def test_tensors_lie_inside_the_slab_where_the_layout_says() -> None:
    slab, source, inside = filled_slab()
    start, end = slab.bytes.data_ptr(), slab.bytes.data_ptr() + slab.bytes.numel()
    assert slab.bytes.numel() == slab.layout.num_bytes and slab.bytes.dtype is torch.uint8
    for spec in slab.layout.tensors:
        tensor, expected = inside[spec.name], source[spec.name]
        assert same_bits(tensor, expected)
        if tensor.numel():
            assert tensor.data_ptr() == start + spec.offset
            assert tensor.data_ptr() + spec.num_bytes <= end
            flat = slab.bytes[spec.offset : spec.offset + spec.num_bytes]
            assert same_bits(flat, expected.contiguous().reshape(-1).view(torch.uint8))
        assert spec.offset % ALIGNMENT == 0


def test_tensors_have_storages_of_their_own() -> None:
    _, _, inside = filled_slab()
    tensors = [each for each in inside.values() if each.numel()]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        assert storage.data_ptr() == tensor.data_ptr()
        assert storage.nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.storage_offset() == 0
    assert len({each.untyped_storage()._cdata for each in tensors}) == len(tensors)


def test_a_write_to_a_tensor_is_a_write_to_the_slab() -> None:
    slab, _, inside = filled_slab()
    inside["absmax"].fill_(0)
    spec = next(each for each in slab.layout.tensors if each.name == "absmax")
    assert not slab.bytes[spec.offset : spec.offset + spec.num_bytes].any()
    assert slab.bytes.any()


def test_tensors_keep_the_memory_and_nothing_else_does() -> None:
    slab, source, inside = filled_slab()
    memory = weakref.ref(slab._memory)
    kept = inside["norm"]
    del slab, inside
    gc.collect()
    assert memory() is not None and same_bits(kept, source["norm"])
    del kept
    gc.collect()
    assert memory() is None


def test_a_store_has_one_slab_per_block_and_counts_its_bytes() -> None:
    layouts = [BlockLayout.pack(some_tensors().items()), BlockLayout.pack([("a", torch.zeros(3))])]
    store = HostStore.allocate(layouts)
    assert [each.bytes.numel() for each in store.slabs] == [each.num_bytes for each in layouts]
    assert store.num_bytes == sum(each.num_bytes for each in layouts)
    assert store.pinned_num_bytes == 0 and store.fallbacks == []


def test_a_block_without_tensors_has_an_empty_slab() -> None:
    store = HostStore.allocate([BlockLayout.pack([])])
    assert store.slabs[0].bytes.numel() == store.num_bytes == 0


def test_host_slab_of_a_prepared_model_equals_its_tensors() -> None:
    model = build()
    layer = layers_of(model)[2]

    def packed() -> list[Any]:
        return [each for each in layer.parameters() if hasattr(each, "quant_state")]

    expected = [each.detach().clone() for each in packed()]
    runtime = poros.runtime(poros.prepare(model))
    slab = runtime.host_slab(2)
    found = packed()
    assert len(expected) == len(found) == 7
    for before, tensor in zip(expected, found, strict=True):
        offset = tensor.data_ptr() - slab.data_ptr()
        size = tensor.numel() * tensor.element_size()
        assert 0 <= offset <= slab.numel() - size
        assert same_bits(slab[offset : offset + size], before.view(-1).view(torch.uint8))
    for each in found:
        assert 0 <= each.quant_state.absmax.data_ptr() - slab.data_ptr() < slab.numel()
    assert runtime.stats()["host_num_bytes"] == sum(runtime.host_slab(k).numel() for k in range(3))


def test_memory_that_cannot_be_had_is_a_typed_error() -> None:
    impossible = BlockLayout((), num_bytes=2**50)
    with pytest.raises(HostMemoryError, match=f"expected {2**50} bytes.*found none.*free memory"):
        HostSlab(impossible)
    with pytest.raises(MemoryError) as caught:
        HostStore.allocate([BlockLayout.pack(some_tensors().items()), impossible])
    assert isinstance(caught.value, PorosError)


class FakeDriver:
    """Counts page-locks; refuses from registration number ``refuse_at`` (from 0) on."""

    def __init__(self, refuse_at: int = 1_000_000) -> None:
        self.refuse_at = refuse_at
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        if sum(each == "register" for each in self.calls) >= self.refuse_at:
            self.calls.append("refused")
            return 2
        self.calls.append("register")
        assert pointer not in self.locked and flags == 0
        self.locked[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append("unregister")
        del self.locked[pointer]
        return 0


@contextmanager
def _no_device(device: torch.device) -> Iterator[None]:
    yield


def install(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    def synchronize(device: Any = None) -> None:
        driver.calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", _no_device)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return driver


def three_slabs() -> HostStore:
    return HostStore.allocate([BlockLayout.pack(some_tensors().items()) for _ in range(3)])


def test_pinning_registers_each_slab_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(FakeDriver(), monkeypatch)
    store = three_slabs()
    store.pin(CPU)
    assert driver.locked == {each.bytes.data_ptr(): each.layout.num_bytes for each in store.slabs}
    assert store.pinned_num_bytes == store.num_bytes and store.fallbacks == []
    assert all(each.is_pinned for each in store.slabs)


@pytest.mark.parametrize("refuse_at", [0, 1, 2])
def test_a_refused_page_lock_is_logged_once_and_the_rest_is_pageable(
    refuse_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = install(FakeDriver(refuse_at), monkeypatch)
    store = three_slabs()
    with caplog.at_level(logging.WARNING, "poros"):
        store.pin(CPU)
    assert [each.is_pinned for each in store.slabs] == [index < refuse_at for index in range(3)]
    assert store.pinned_num_bytes == refuse_at * store.num_bytes // 3
    # Nothing is tried after a refusal: the limit is one for all slabs.
    assert driver.calls == ["register"] * refuse_at + ["refused"]
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "page-locked" in message and f"block {refuse_at}" in message and "ulimit -l" in message
    assert store.fallbacks == [f"pageable host memory for blocks {refuse_at} to 2"]


def test_unpin_unregisters_each_slab_once_behind_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = install(FakeDriver(refuse_at=2), monkeypatch)
    store = three_slabs()
    store.pin(CPU)
    driver.calls.clear()
    store.unpin()
    assert driver.calls == ["synchronize", "unregister"] * 2
    assert driver.locked == {} and store.pinned_num_bytes == 0
    store.unpin()
    del store
    gc.collect()
    assert driver.calls == ["synchronize", "unregister"] * 2


def test_a_dropped_slab_is_unregistered_before_its_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = install(FakeDriver(), monkeypatch)
    store = three_slabs()
    store.pin(CPU)
    alive: list[bool] = []
    memories = [weakref.ref(each._memory) for each in store.slabs]
    unregister = driver.cudaHostUnregister

    def watching(pointer: int) -> int:
        alive.append(any(each() is not None for each in memories))
        return unregister(pointer)

    driver.cudaHostUnregister = watching  # type: ignore[method-assign]
    del store
    gc.collect()
    assert alive == [True] * 3 and driver.locked == {}
    assert [each() for each in memories if each() is not None] == []


def test_the_fallback_shows_in_stats_and_training_stays_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = install(FakeDriver(refuse_at=1), monkeypatch)
    model = poros.prepare(build())
    runtime = poros.runtime(model)
    assert runtime.stats()["fallbacks"] == [] and driver.calls == []  # a CPU needs no page-locks
    runtime.host.pin(CPU)
    stats = runtime.stats()
    assert stats["fallbacks"] == ["pageable host memory for blocks 1 to 2"]
    assert stats["pinned_num_bytes"] == runtime.host_slab(0).numel()
    assert_same_run(run(build()), run(model))
    poros.restore(model)
    assert driver.locked == {} and driver.calls.count("unregister") == 1
