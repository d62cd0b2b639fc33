"""Where each frozen tensor of a block lies in the block's one contiguous slab.

A slab holds the bytes that must move, and nothing else: packed 4-bit weights, their (nested)
absmax, norms, biases and buffers. The same offsets serve the host slab and the device slot, so a
block load is a single copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 256
"""Bytes. A multiple of every element size and of the widest vector load of current GPUs."""


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
    """The tensors of one block in slab order, and the slab's size."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> "BlockLayout":
        """Lay tensors out one after the other, each aligned to ``ALIGNMENT`` bytes."""
        specs: list[TensorSpec] = []
        end = 0
        for name, tensor in tensors:
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset=end)
            specs.append(spec)
            end = _align(end + spec.num_bytes)
        return cls(tuple(specs), num_bytes=end)


def view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor ``spec`` describes, as a view of a flat uint8 slab or slot (no copy)."""
    return flat[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype).view(spec.shape)


def slot_sizes(layouts: Sequence[BlockLayout], num_slots: int) -> list[int]:
    """Bytes of each slot: block k lives in slot k mod S, so the largest block of each class."""
    return [
        max(layout.num_bytes for layout in layouts[slot::num_slots]) for slot in range(num_slots)
    ]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
