"""Memory for dense weights: for one at a time, or for those of a layer.

Note: The weights of a layer, for several calls in a row
    Each product makes its weight dense anew, forward and backward. Where micro-batches go through a
    layer one behind the other, all its weights are made dense once, before the first of them, and
    every product reads them from there (``DenseLayer``). ``use`` says for which layer, from the
    first ``fill`` on. Outside of that, and for any other layer, ``dequantize`` makes a weight dense
    as ever, so nothing can read what another layer has left. A recorded visit has an address baked
    in; so it is replayed only while the same memory serves its layer (``poros.replay.captures``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from poros.kernels.dequantize import dequantize_into

_ALIGNMENT = 256
"""Of each weight, as the allocator's own."""


class DenseWorkspace:
    """Memory for one dense weight at a time, at one address.

    For a model that has one weight dense at a time. The allocator would cut what a weight leaves
    free up for smaller tensors, and need as much again for the next weight.

    Args:
        num_bytes: Of the largest weight.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._is_left_alone = False

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Weights in the body have memory of their own: what is recorded runs beside others."""
        self._is_left_alone = True
        try:
            yield
        finally:
            self._is_left_alone = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a weight has memory of its own

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized, until the next is taken; memory of its own if there is not enough."""
        num_bytes = shape.numel() * dtype.itemsize
        if num_bytes > self.num_bytes or self._is_left_alone:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._memory[:num_bytes].view(dtype).view(shape)


class DensePlace:
    """Where the dense form of a 4-bit weight of a layer goes, and may be already."""

    def __init__(
        self, dense: "DenseLayer", layer: int, offset: int, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._dense = dense
        self._layer = layer
        self.offset, self.shape, self.dtype = offset, shape, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a weight is of no layer

    def weight(self, dtype: torch.dtype) -> torch.Tensor | None:
        """It, in that dtype; None if it is not there. To be read within the visit of its layer."""
        if dtype != self.dtype or not self._dense.serves(self._layer):
            return None
        return self.memory()

    def memory(self) -> torch.Tensor:
        """Its part of the memory, whatever is there."""
        whole: Any = self._dense.memory
        end = self.offset + self.shape.numel() * self.dtype.itemsize
        return whole[self.offset : end].view(self.dtype).view(self.shape)


class DenseLayer:
    """Memory for the dense weights of one layer at a time.

    Attributes:
        served: The layer whose calls share it now.
        memory: Where they go; None if there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory: torch.Tensor | None = None
        self._num_needed = 0
        self.served: int | None = None
        self._reader: int | None = None
        """The layer whose products read it now."""
        self._filled: int | None = None
        """The layer whose weights are there."""
        self._recorded: dict[int, Callable[[], None]] = {}
        """Makes the weights of a layer dense by one call."""

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        return 0 if self.memory is None else self.memory.numel()

    @property
    def address(self) -> int | None:
        """Of its memory; None if it has none."""
        return None if self.memory is None else self.memory.data_ptr()

    def places(self, layer: int, states: Sequence[Any]) -> list[DensePlace]:
        """Where the weights of ``layer`` go, in order."""
        found, offset = [], 0
        for state in states:
            found.append(DensePlace(self, layer, offset, state.shape, state.dtype))
            num_bytes = state.shape.numel() * state.dtype.itemsize
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_needed = max(self._num_needed, offset)
        return found

    def allocate(self) -> None:
        """Have memory for the largest layer.

        Raises:
            torch.OutOfMemoryError: If the device has not got it; there is none then.
        """
        self.forget()
        if self.num_bytes < self._num_needed:
            self.free()
            self.memory = torch.empty(self._num_needed, dtype=torch.uint8, device=self._device)

    def free(self) -> None:
        """Give the memory back; products make their weights dense themselves."""
        self.forget_recorded()
        self.memory = None

    def forget(self) -> None:
        """Take no dense weight to be there already."""
        self._reader = self._filled = None

    def forget_recorded(self) -> None:
        """The same, and how: packed weights or the memory will be elsewhere."""
        self.forget()
        self._recorded.clear()

    @contextmanager
    def use(self, layer: int) -> Iterator[None]:
        """Calls of ``layer`` in the body share its dense weights, from ``fill`` on."""
        self.served = None if self.memory is None else layer
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

    def fill(self, layer: int, weights: Sequence[Any]) -> None:
        """Make the weights of ``layer`` dense, if its calls share them and they are not there.

        Streams:
            Queued on the current stream, which has waited for the packed bytes.
        """
        if self.served != layer or self._reader == layer:
            return
        if self._filled != layer:
            self.forget()
            self._recorded.get(layer, partial(self._make, weights))()
            self._filled = layer
        self._reader = layer

    def record(
        self,
        layer: int,
        weights: Sequence[Any],
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        """Have the weights of ``layer`` made dense by one call, for as long as they lie where now.

        Args:
            record: Records what it is given; what replays that.
        """
        if layer not in self._recorded:
            self._filled = None  # it may be done as it is recorded
            self._recorded[layer] = record(partial(self._make, weights))

    def _make(self, weights: Sequence[Any]) -> None:
        with torch.no_grad():
            for weight in weights:
                state = weight.quant_state
                dequantize_into(weight, state, state.dense_place.memory())

    def serves(self, layer: int) -> bool:
        """Whether products of ``layer`` read it now."""
        return self._reader == layer and self.memory is not None
