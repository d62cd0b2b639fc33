"""Where each frozen tensor of a block lies in the block's one contiguous slab.

A slab holds the bytes that must move: packed 4-bit weights, their (nested) absmax, norms, biases
and buffers. The same offsets serve the host slab and the device slot, so a block load is a single
copy.

Note: Layers start on pages
    A loader lays out one slab per layer, before anybody has said how many layers make a block. So
    each layer starts on a page, in a block as in memory and in a file: the slabs of neighbouring
    layers, read as one, are the slab of the block that they make.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

ALIGNMENT = 256
"""Bytes. A multiple of every element size and of the widest vector load of current GPUs."""

PAGE_NUM_BYTES = 65536
"""The largest page of current systems (arm64), a multiple of theirs and of a disk's sectors."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a slab: its qualified name, form and place (bytes from the slab's start)."""

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
    spare_num_bytes: int = 0
    """Bytes at the slab's end, from a page's start on, that no tensor of ``tensors`` uses."""

    @classmethod
    def pack(
        cls, tensors: Iterable[tuple[str, torch.Tensor]], spare_num_bytes: int = 0
    ) -> "BlockLayout":
        """Lay tensors out one after the other, each aligned to ``ALIGNMENT`` bytes.

        Args:
            tensors: Names and tensors; only shapes and dtypes are read, so meta tensors will do.
            spare_num_bytes: Room to leave at the end for tensors that change their form before
                ``poros.prepare`` (see ``spare_for``); rounded up to ``ALIGNMENT``.
        """
        specs: list[TensorSpec] = []
        end = 0
        for name, tensor in tensors:
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset=end)
            specs.append(spec)
            end = align(end + spec.num_bytes)
        if not spare_num_bytes:
            return cls(tuple(specs), num_bytes=end)
        spare_num_bytes = align(spare_num_bytes)
        num_bytes = align(end, PAGE_NUM_BYTES) + spare_num_bytes
        return cls(tuple(specs), num_bytes, spare_num_bytes)

    @classmethod
    def join(cls, layers: Sequence["BlockLayout"]) -> "BlockLayout":
        """The layout of a block of ``layers``: see "Layers start on pages"."""
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
    """Where each slab starts, in bytes, when they lie one after the other on pages."""
    offsets = []
    end = 0
    for layout in layouts:
        offsets.append(end)
        end = align(end + layout.num_bytes, PAGE_NUM_BYTES)
    return offsets


def spare_for(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the 16-bit vectors among ``tensors`` (norms, biases) take as float32.

    ``peft.prepare_model_for_kbit_training`` casts them. With that much room to spare in its slab, a
    layer is still adopted where it lies.
    """
    return sum(
        align(4 * each.numel())
        for each in tensors
        if each.dtype in (torch.bfloat16, torch.float16) and each.ndim <= 1
    )


def view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor ``spec`` describes, as a view of a flat uint8 slab or slot (no copy)."""
    return flat[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype).view(spec.shape)


def slot_sizes(layouts: Sequence[BlockLayout], num_slots: int) -> list[int]:
    """Bytes of each slot: block k lives in slot k mod S, so the largest block of each class."""
    return [
        max(layout.num_bytes for layout in layouts[slot::num_slots]) for slot in range(num_slots)
    ]


def align(num_bytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of ``to`` bytes."""
    return -(-num_bytes // to) * to
