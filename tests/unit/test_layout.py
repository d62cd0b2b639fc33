"""Slabs: where tensors lie in them, and that their bytes come back as they were."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.host.layout import ALIGNMENT, BlockLayout, slot_sizes, view
from tests.support import same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
DTYPES = (torch.uint8, torch.int8, torch.bool, torch.int64, *FLOATS)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (3, 0, 2), (3, 5), (1, 1, 1), (64, 3))
SHAPES += ((1,), (7,), (255,), (256,), (257,))

forms = st.tuples(
    st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes at all, NaNs included (0 and 1 for bool, where other bytes mean nothing)."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    highest = 2 if dtype is torch.bool else 256
    flat = torch.randint(highest, (num_bytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def named(forms: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"tensor {index}", random_tensor(shape, dtype, seed=index))
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
