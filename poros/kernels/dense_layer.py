"""The 4-bit weights of one layer, dense, for several calls of the layer in a row.

Each product makes its weight dense anew, forward and backward. Where micro-batches go through a
layer one behind the other, all its weights are made dense once, before the first of them, and every
product reads them from there.

Note: What may read it
    ``use`` says for which layer, from the first ``fill`` on. Outside of that, and for any other
    layer, ``dequantize`` makes a weight dense as ever, so nothing can read what another layer has
    left. A recorded visit has an address baked in; so it is replayed only while the same memory
    serves its layer (``poros.replay.captures``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from poros.kernels.dequantize import DensePlace, dequantize_into

_ALIGNMENT = 256
"""Of each weight, as the allocator's own."""


class DenseWeight(NamedTuple):
    """A 4-bit weight of a layer, and where its dense form goes."""

    packed: torch.Tensor
    state: Any
    place: DensePlace


class DenseLayer:
    """Memory for the dense weights of one layer at a time.

    Args:
        device: Where.

    Attributes:
        served: The layer whose calls share it now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._num_needed = 0
        self.served: int | None = None
        self._reader: int | None = None
        """The layer whose products read it now."""
        self._filled: int | None = None
        """The layer whose weights are there."""

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def address(self) -> int | None:
        """Of its memory; None if it has none."""
        return None if self._memory is None else self._memory.data_ptr()

    def places(self, layer: int, states: Sequence[Any]) -> list[DensePlace]:
        """Where the weights of ``layer`` go, in order."""
        found, offset = [], 0
        for state in states:
            found.append(_Place(self, layer, offset, state.shape, state.dtype))
            num_bytes = state.shape.numel() * state.dtype.itemsize
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_needed = max(self._num_needed, offset)
        return list(found)

    def allocate(self) -> None:
        """Have memory for the largest layer.

        Raises:
            torch.OutOfMemoryError: If the device has not got it; there is none then.
        """
        self.forget()
        if self.num_bytes < self._num_needed:
            self._memory = None
            self._memory = torch.empty(self._num_needed, dtype=torch.uint8, device=self._device)

    def free(self) -> None:
        """Give the memory back; products make their weights dense themselves."""
        self.forget()
        self._memory = None

    def forget(self) -> None:
        """Take no dense weight to be there already."""
        self._reader = self._filled = None

    @contextmanager
    def use(self, layer: int) -> Iterator[None]:
        """Calls of ``layer`` in the body share its dense weights, from ``fill`` on."""
        self.served = None if self._memory is None else layer
        try:
            yield
        finally:
            self.release_all()

    def release_all(self) -> None:
        """No calls share anything from now on."""
        self.served = self._reader = None

    @contextmanager
    def assumed(self, layer: int | None) -> Iterator[None]:
        """Products in the body read it as if ``layer`` were there: to be recorded, not read.

        None: as if no layer were.
        """
        before, self._reader = self._reader, layer
        try:
            yield
        finally:
            self._reader = before

    def fill(self, layer: int, weights: Sequence[DenseWeight]) -> None:
        """Make the weights of ``layer`` dense, if its calls share them and they are not there.

        Streams:
            Queued on the current stream, which has waited for the packed bytes.
        """
        if self.served != layer or self._reader == layer:
            return
        if self._filled != layer:
            self.forget()
            for packed, state, place in weights:
                with torch.no_grad():
                    dequantize_into(packed, state, place.memory())
            self._filled = layer
        self._reader = layer

    def memory_of(self, place: "_Place") -> torch.Tensor:
        """Its part of the memory, whatever is there."""
        if self._memory is None:
            raise RuntimeError("expected memory for the dense weights of a layer, found none")
        end = place.offset + place.shape.numel() * place.dtype.itemsize
        return self._memory[place.offset : end].view(place.dtype).view(place.shape)

    def serves(self, layer: int) -> bool:
        """Whether products of ``layer`` read it now."""
        return self._reader == layer and self._memory is not None


class _Place(DensePlace):
    def __init__(
        self, dense: DenseLayer, layer: int, offset: int, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._dense = dense
        self._layer = layer
        self.offset, self.shape, self.dtype = offset, shape, dtype

    def weight(self, dtype: torch.dtype) -> torch.Tensor | None:
        if dtype != self.dtype or not self._dense.serves(self._layer):
            return None
        return self.memory()

    def memory(self) -> torch.Tensor:
        return self._dense.memory_of(self)
