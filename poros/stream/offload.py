"""The inputs of recomputed layers, in host memory between their forward and their backward.

A recomputed layer needs its input again: one tensor of (batch, tokens, hidden) per layer, which
grows with depth and sequence. So each input is copied to page-locked
host memory, on a copy stream of its own, while the layers compute, and brought back ahead of its
layer's backward. Two are on the device at any moment: one in use, one on its way.

Note: No wait, no reuse
    The device memory comes from the allocator as the compute stream's own, so that the peak stays a
    formula. The allocator hands it on in the order of that stream alone. So whoever gives such
    memory up first makes the compute stream wait for the copy from it or into it. Only a graph that
    is dropped half-way cannot: a collector may drop it in any thread, on any stream. There the
    allocator is told of the copy stream instead (``abandon``). Host buffers need nothing of the
    kind: all copies from and to them are on one stream, one after the other.

Source:
    Offloaded activations of Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.1.2.
"""

import logging
import weakref
from collections import deque

import torch

from poros.errors import RematerializationError
from poros.host.layout import BlockLayout
from poros.host.limits import require_host_memory
from poros.host.slab import HostSlab
from poros.stream.args import as_result
from poros.streams import Event, StreamContext

logger = logging.getLogger(__name__)

NUM_ON_DEVICE = 2


class ActivationOffloader:
    """The offloaded inputs of one prepared model, and the host buffers they lie in.

    Args:
        streams: Of the blocks; inputs get a copy stream beside it.

    Attributes:
        fallbacks: What could not be had, one line each; each was logged once.
    """

    def __init__(self, streams: StreamContext) -> None:
        self.fallbacks: list[str] = []
        self._streams = streams.beside()
        self._buffers: list[HostSlab] = []
        self._free: list[HostSlab] = []
        self._recent: deque[weakref.ref[OffloadedInput]] = deque()

    @property
    def num_bytes(self) -> int:
        """Host memory that is held for inputs."""
        return sum(buffer.layout.num_bytes for buffer in self._buffers)

    def offload(self, tensor: torch.Tensor, where: str, index: int) -> "OffloadedInput":
        """Queue the copy of a layer's input to the host; the device memory goes two calls later.

        The caller keeps no reference to it that outlives the forward of the layer, which is number
        ``index`` of them and named in errors by ``where``.

        Streams:
            Copies on a stream of its own, behind what the compute stream has queued; the compute
            stream waits for the copy of two calls ago. Blocks the host only if its memory could not
            be page-locked.

        Raises:
            HostMemoryError: If there is no host memory for it.
        """
        previous = self._recent[-1] if self._recent else None
        offloaded = OffloadedInput(tensor, where, index, self, self._take(tensor), previous)
        self._recent.append(weakref.ref(offloaded))
        while len(self._recent) > NUM_ON_DEVICE:
            leaving = self._recent.popleft()()
            if leaving is not None:
                leaving.leave_device()
        return offloaded

    def unpin(self) -> None:
        """Undo the page locks; nothing is offloaded any more."""
        for buffer in self._buffers:
            buffer.unpin()

    def _take(self, tensor: torch.Tensor) -> HostSlab:
        num_bytes = tensor.numel() * tensor.element_size()
        for index, buffer in enumerate(self._free):
            if buffer.layout.num_bytes >= num_bytes:
                return self._free.pop(index)
        if self._free:  # too small for the batches that have come now
            unfit = self._free.pop()
            self._buffers.remove(unfit)
            unfit.unpin()
        require_host_memory(num_bytes, "inputs of layers (offload_boundaries)")
        buffer = HostSlab(BlockLayout((), num_bytes))
        self._buffers.append(buffer)
        device = self._streams.device
        if device.type == "cuda" and not buffer.pin(device) and not self.fallbacks:
            self.fallbacks.append("pageable host memory for layer inputs")
            logger.warning(
                "poros: host memory for layer inputs (%.1f MB each) could not be page-locked. "
                "Training stays exact, but their copies do not overlap with compute",
                num_bytes / 1e6,
            )
        return buffer


class OffloadedInput:
    """One input of one layer, from its forward until its graph is gone."""

    _tensor: torch.Tensor | None = None
    """The bytes on the device, while ``_copied`` reads or writes them or they are wanted."""

    def __init__(
        self,
        tensor: torch.Tensor,
        where: str,
        index: int,
        offloader: ActivationOffloader,
        buffer: HostSlab,
        previous: "weakref.ref[OffloadedInput] | None",
    ) -> None:
        self.index = index
        self._where = where
        self._offloader = offloader
        self._streams = offloader._streams
        self._buffer = buffer
        self._previous = previous
        self._is_edited = False
        self._form = (tensor.shape, tensor.dtype)
        self._requires_grad = tensor.requires_grad
        self._version = tensor._version
        source = tensor.detach()
        self._copied: Event = self._streams.copy(self._host(), source, after=self._streams.record())
        self._tensor = source

    def fetch(self) -> torch.Tensor:
        """The input, on the device; the input of the layer before is brought back meanwhile.

        Streams:
            The compute stream waits for the copy; the host does not.

        Raises:
            RematerializationError: If the input was edited in place before it left the device.
            torch.OutOfMemoryError: If the device has no room for it.
        """
        self._bring_back()
        tensor = self._give_up()
        if tensor is None or self._is_edited:
            raise RematerializationError(
                f"{self._where}: its input was edited in place between forward and backward, so "
                "the forward cannot be recomputed; edit it after backward"
            )
        previous = self._previous() if self._previous is not None else None
        if previous is not None and previous.index == self.index - 1:
            previous._bring_back()
        return as_result(tensor) if self._requires_grad else tensor

    def leave_device(self) -> None:
        """Give up the device memory: in a while the input is needed no more."""
        if self._tensor is not None:
            self._give_up()

    def _bring_back(self) -> None:
        if self._tensor is not None:
            return
        target = self._streams.borrow(*self._form)
        self._copied = self._streams.copy(target, self._host(), after=self._streams.record())
        self._tensor, self._version = target, target._version

    def _give_up(self) -> torch.Tensor | None:
        """The tensor, which from here on is ordinary memory of the compute stream."""
        self._streams.wait(self._copied)
        tensor, self._tensor = self._tensor, None
        # For good: what the host holds may be from before the edit or from after it.
        self._is_edited |= tensor is not None and tensor._version != self._version
        return tensor

    def _host(self) -> torch.Tensor:
        shape, dtype = self._form
        num_bytes = shape.numel() * dtype.itemsize
        return self._buffer.bytes[:num_bytes].view(dtype).view(shape)

    def __del__(self) -> None:
        if self._tensor is not None:
            self._streams.abandon(self._tensor, self._copied)
        self._offloader._free.append(self._buffer)
