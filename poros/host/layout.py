"""Lays out the frozen tensors of a block in one contiguous slab.

A slab holds the bytes that must move: packed 4-bit weights, their absmax, and dense weights. The
same offsets serve the host slab and the device slot, so a block load is a single copy.

Note: What is small stays
    Norms, biases, buffers and the nested absmax of 4-bit weights take a few megabytes in the
    largest models, and are what people edit and cast. They stay on the device, in one buffer per
    layer with a layout of its own, and are no part of a slab. Kind and size decide: a matrix
    streams however small it is, a vector of more than ``SMALL_NUM_BYTES`` streams too.

Note: Layers start on pages
    A loader lays out one slab per layer, before the number of layers per block is known. So
    each layer starts on a page, in a block as in memory and in a file: the slabs of neighbouring
    layers, read as one, are the slab of the block that they make.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch

ALIGNMENT = 256
"""Bytes. A multiple of every element size and of the widest vector load of current GPUs."""

SMALL_NUM_BYTES = 65536
"""A frozen tensor of at most that many bytes stays on the device, if it is no matrix."""

PAGE_NUM_BYTES = 65536
"""The largest page of current systems (arm64), a multiple of theirs and of a disk's sectors."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor in a slab: qualified name, dtype, shape, and offset in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The tensors of one layer or block in slab order, and the slab's size."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int

    @property
    def padded_num_bytes(self) -> int:
        """Bytes to the end of its last page, which the slab takes where others follow it."""
        return align(self.num_bytes, PAGE_NUM_BYTES)

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> "BlockLayout":
        """Lay tensors out one after the other, each aligned to ``ALIGNMENT`` bytes.

        Args:
            tensors: Names and tensors; only shapes and dtypes are read, so meta tensors will do.
        """
        specs: list[TensorSpec] = []
        end = 0
        for name, tensor in tensors:
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset=end)
            specs.append(spec)
            end = align(end + spec.num_bytes)
        return cls(tuple(specs), num_bytes=end)

    @classmethod
    def join(cls, layers: Sequence["BlockLayout"]) -> "BlockLayout":
        """Join the layouts of ``layers`` to one block: see "Layers start on pages"."""
        offsets = slab_offsets(layers)
        return cls(
            tuple(
                replace(spec, offset=offset + spec.offset)
                for offset, layer in zip(offsets, layers, strict=True)
                for spec in layer.tensors
            ),
            num_bytes=offsets[-1] + layers[-1].num_bytes if layers else 0,
        )


def slab_offsets(layouts: Iterable[BlockLayout]) -> list[int]:
    """Return the offset of each slab, in bytes, when they follow one another on pages."""
    *offsets, _ = accumulate((layout.padded_num_bytes for layout in layouts), initial=0)
    return offsets


def slabs_num_bytes(layouts: Iterable[BlockLayout]) -> int:
    """Count the bytes of all slabs, each padded to a page."""
    return sum(layout.padded_num_bytes for layout in layouts)


def is_small(tensor: torch.Tensor, *, is_buffer: bool = False) -> bool:
    """Whether a frozen tensor that is no part of a 4-bit weight stays on the device.

    Of a 4-bit weight, the nested absmax may; packed weight and absmax stream. See "What is small
    stays".
    """
    has_kind = is_buffer or tensor.ndim <= 1
    return has_kind and tensor.nbytes <= SMALL_NUM_BYTES


def view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor of ``spec`` as a view of a flat uint8 slab or slot (no copy)."""
    return flat[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype).view(spec.shape)


def slot_sizes(layouts: Sequence[BlockLayout], num_slots: int) -> list[int]:
    """Return the bytes of each slot: block k uses slot k mod S, so the largest block decides."""
    return [
        max(layout.num_bytes for layout in layouts[slot::num_slots]) for slot in range(num_slots)
    ]


def align(num_bytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of ``to`` bytes."""
    return -(-num_bytes // to) * to
