"""Arenas: exactly as large as what lies in them, and shared with other processes when asked."""

import gc
import logging
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import num_memory_files, same_bits
from test_host import FakeDriver, install, some_tensors

import poros.host.store
from poros.errors import HostMemoryError
from poros.host.store import Arena, HostStore
from poros.layout import ALIGNMENT, PAGE_NUM_BYTES, BlockLayout, slab_offsets

CPU = torch.device("cpu")


def layer_of(hidden: int, intermediate: int, kv: int) -> BlockLayout:
    """A layer of a quantized Qwen2, as a loader lays it out; no memory is touched."""
    with torch.device("meta"):
        tensors: list[tuple[str, torch.Tensor]] = []
        for index, (rows, columns) in enumerate(
            [
                *((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)),
                *((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)),
            ]
        ):
            num_scales = rows * columns // 64
            tensors += [
                (f"weight{index}", torch.empty(rows * columns // 2, 1, dtype=torch.uint8)),
                (f"absmax{index}", torch.empty(num_scales, dtype=torch.uint8)),
            ]
    return BlockLayout.pack(tensors)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "kv", "num_layers"),
    [
        (896, 4864, 128, 24),
        (3584, 18944, 512, 28),
        (5120, 27648, 1024, 64),
        (8192, 29568, 1024, 80),
    ],
    ids=["0.5B", "7B", "32B", "72B"],
)
def test_an_arena_is_at_most_3_percent_over_its_tensors(
    hidden: int, intermediate: int, kv: int, num_layers: int
) -> None:
    """Only address space is taken: nothing is written."""
    layouts = [layer_of(hidden, intermediate, kv)] * num_layers
    stored = sum(spec.num_bytes for layout in layouts for spec in layout.tensors)
    store = HostStore.allocate(layouts)
    (arena,) = {slab.arena for slab in store.slabs}
    assert stored < len(arena.memory) <= 1.03 * stored
    assert resident_num_bytes(arena) == 0
    # Control: the caching host allocator's rounding would not pass.
    rounded = sum(1 << (layout.num_bytes - 1).bit_length() for layout in layouts)
    assert rounded > 1.03 * stored


def resident_num_bytes(arena: Arena) -> int:
    """Memory that the system has committed to the arena's memory file."""
    return 512 * os.fstat(arena.fileno()).st_blocks


def test_memory_is_committed_as_it_is_written() -> None:
    store = HostStore.allocate([BlockLayout((), 4 * PAGE_NUM_BYTES)] * 3)
    arena = store.slabs[0].arena
    assert resident_num_bytes(arena) == 0
    store.slabs[1].bytes.fill_(1)
    assert resident_num_bytes(arena) == 4 * PAGE_NUM_BYTES
    assert not store.slabs[0].bytes.any() and not store.slabs[2].bytes.any()


def test_slabs_lie_one_after_the_other_on_pages() -> None:
    layouts = [
        BlockLayout.pack(some_tensors().items()),
        BlockLayout((), 0),
        BlockLayout((), PAGE_NUM_BYTES + 256),
        BlockLayout.pack(some_tensors().items()),
    ]
    store = HostStore.allocate(layouts)
    start = store.slabs[0].bytes.data_ptr()
    assert start % mmap.PAGESIZE == 0
    assert [slab.offset for slab in store.slabs] == slab_offsets(layouts)
    for slab in store.slabs:
        assert slab.offset % PAGE_NUM_BYTES == 0
        if slab.layout.num_bytes:
            assert slab.bytes.data_ptr() == start + slab.offset


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_neighbouring_slabs_are_the_slab_of_their_block(cut: int) -> None:
    """The layout of a block is that of its layers, as they lie in the arena."""
    layers = [BlockLayout.pack(some_tensors().items()) for _ in range(3)]
    layers.append(BlockLayout.pack([("a", torch.empty(70_000, dtype=torch.uint8))]))
    offsets = slab_offsets(layers)
    block = BlockLayout.join(layers[:cut])
    assert block.num_bytes == offsets[cut - 1] + layers[cut - 1].num_bytes
    specs = iter(block.tensors)
    for offset, layer in zip(offsets[:cut], layers[:cut], strict=True):
        for spec in layer.tensors:
            joined = next(specs)
            assert joined.offset == offset + spec.offset and joined.offset % ALIGNMENT == 0
            assert (joined.name, joined.shape, joined.dtype) == (spec.name, spec.shape, spec.dtype)


def test_the_memory_goes_with_the_last_tensor() -> None:
    gc.collect()
    store = HostStore.allocate([BlockLayout.pack(some_tensors().items())] * 3)
    before = num_memory_files()
    memory = weakref.ref(store.slabs[0].arena.memory)
    slab = store.slabs[1]
    kept = slab.tensor(slab.layout.tensors[0])
    del store, slab
    gc.collect()
    assert memory() is not None and kept.numel()
    del kept
    assert memory() is None and num_memory_files() == before - 2  # ours, and the mapping's own


CHILD = """
import pickle, sys
sys.path[:0] = [{root!r}]
from poros.host.store import HostStore
layouts = pickle.loads(bytes.fromhex({layouts!r}))
store = HostStore.attach({file}, layouts)
for slab in store.slabs:
    spec = slab.layout.tensors[0]
    tensor = slab.tensor(spec)
    assert tensor[0].item() == 7, tensor[0]
    tensor[1] = 9
print(sum(int(slab.bytes.sum()) for slab in store.slabs))
"""


def test_another_process_sees_the_same_bytes() -> None:
    import pickle

    layouts = [BlockLayout.pack(some_tensors().items())] * 3
    store = HostStore.allocate(layouts)
    for slab in store.slabs:
        slab.tensor(slab.layout.tensors[0])[0] = 7
    file = store.slabs[0].arena.fileno()
    program = CHILD.format(
        root=str(Path(__file__).parents[1]), layouts=pickle.dumps(layouts).hex(), file=file
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        pass_fds=[file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == 3 * 16
    # It wrote here, not into a copy.
    assert all(slab.tensor(slab.layout.tensors[0])[1] == 9 for slab in store.slabs)
    with pytest.raises(HostMemoryError, match=r"expected a shared store of \d+ bytes"):
        HostStore.attach(file, layouts[:2])


def test_without_memory_files_there_is_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    store = HostStore.allocate([BlockLayout.pack(some_tensors().items())])
    store.slabs[0].bytes.fill_(3)
    assert bool((store.slabs[0].bytes == 3).all())
    with pytest.raises(HostMemoryError, match="other processes can map"):
        store.slabs[0].arena.fileno()


def test_a_private_mapping_of_a_file_keeps_writes_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (2 * PAGE_NUM_BYTES // 256))
    with file.open("rb") as stream:
        arena = Arena(PAGE_NUM_BYTES, file=stream.fileno(), offset=PAGE_NUM_BYTES, private=True)
    (slab,) = HostStore.over(arena, [BlockLayout((), PAGE_NUM_BYTES)]).slabs
    assert slab.bytes[:3].tolist() == [0, 1, 2]
    slab.bytes.fill_(5)
    assert file.read_bytes()[PAGE_NUM_BYTES : PAGE_NUM_BYTES + 3] == bytes([0, 1, 2])


def test_a_refused_page_lock_tells_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU the warning holds measured rates; the copies are those of a CPU here."""

    class Device:
        type = "cuda"

    rates = iter([2.5, 25.0])
    measured: list[Any] = []

    def copy_rate(source: torch.Tensor, device: object) -> float:
        measured.append(source.data_ptr())
        return next(rates)

    install(FakeDriver(refuse_at=2), monkeypatch)
    monkeypatch.setattr(poros.host.store, "_copy_rate", copy_rate)
    monkeypatch.setattr(poros.host.store, "_clear_cuda_error", lambda device: None)
    store = HostStore.allocate([BlockLayout.pack(some_tensors().items())] * 3)
    with caplog.at_level(logging.WARNING, "poros"):
        store.pin(Device())  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "measured here: 2.5 GB/s pageable, 25.0 pinned" in record.getMessage()
    # The slab that was refused, and the last one that was not.
    assert measured == [store.slabs[2].bytes.data_ptr(), store.slabs[1].bytes.data_ptr()]


@pytest.mark.gpu
def test_the_rates_of_a_real_copy() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = HostStore.allocate([BlockLayout((), 64 * 2**20)] * 2)
    assert store.slabs[0].pin(device)
    pinned, pageable = (poros.host.store._copy_rate(slab.bytes, device) for slab in store.slabs)
    store.unpin()
    assert 0 < pageable < pinned


@pytest.mark.gpu
def test_page_locked_slabs_of_an_arena_are_copied_as_they_are() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = HostStore.allocate([BlockLayout.pack(some_tensors().items())] * 3)
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
