"""Exactly sized host memory, and the part of it that holds one block, page-locked in place.

Only this module page-locks memory, but for the buffers of quantizing at load time. A slab is part
of a mapping of our own, registered with the driver in place: the caching host allocator of PyTorch
would round each one up to a power of two.
"""

import logging
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch

from poros.errors import HostMemoryError
from poros.host.layout import BlockLayout, TensorSpec, align

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]
T = TypeVar("T")

_MAP_NORESERVE = 0x4000  # Linux on its 64-bit machines; mmap names it from Python 3.13 on


class Arena:
    """One shared mapping, as large as the slabs in it and no larger.

    Args:
        num_bytes: Its size. The system commits memory page by page as it is written.
        file: A file to map instead of new memory. It is not closed.
        offset: Where in ``file`` the arena starts; a multiple of ``PAGE_NUM_BYTES``.
        private: Whether writes stay in this process, and out of the file.

    Raises:
        HostMemoryError: If the mapping is refused.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        file: int | None = None,
        offset: int = 0,
        private: bool = False,
    ) -> None:
        where = -1 if file is None else file
        # Nothing is reserved for pages that may be written: a file may be larger than memory.
        flags = _MAP_NORESERVE | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        try:
            self.memory = mmap.mmap(where, max(num_bytes, 1), offset=offset, flags=flags)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"expected {num_bytes} bytes of host memory (for the frozen base, or for inputs of "
                f"layers), found none left ({error}); free memory, raise the limit of the "
                "process (ulimit -v), or use a smaller model"
            ) from error


class HostSlab:
    """The authoritative bytes of one block, optionally page-locked.

    Args:
        arena: The memory that the slab is part of; None allocates an arena for it alone.
        offset: Offset in the arena, in bytes.
    """

    def __init__(self, layout: BlockLayout, arena: Arena | None = None, offset: int = 0) -> None:
        self.layout = layout
        self.arena = arena or Arena(layout.num_bytes)
        self.offset = offset
        self._memory = self.arena.memory
        self.bytes = self._flat(0, layout.num_bytes)
        self._unpin: weakref.finalize[..., HostSlab] | None = None

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    @property
    def padded(self) -> memoryview:
        """Return its bytes up to the end of its last page, in an arena of several slabs."""
        return memoryview(self._memory)[self.offset :][: self.layout.padded_num_bytes]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return the tensor of ``spec`` over the slab's memory, with a storage of its own."""
        return self._flat(spec.offset, spec.num_bytes).view(spec.dtype).view(spec.shape)

    def holds(self, tensor: torch.Tensor, spec: TensorSpec) -> bool:
        """Whether ``tensor`` lies at the place of ``spec`` already."""
        return (
            spec.num_bytes > 0
            and tensor.device.type == "cpu"
            and tensor.data_ptr() == self.bytes.data_ptr() + spec.offset
        )

    def pin(self, device: torch.device) -> bool:
        """Page-lock the slab for ``device``; False, with nothing changed, if the driver refuses."""
        if not self.layout.num_bytes:
            return True
        self._unpin = page_lock(self, self.bytes, self._memory, device)
        return self._unpin is not None

    def unpin(self) -> None:
        """Undo ``pin`` once the device has no copy from the slab in flight. Idempotent."""
        if self._unpin is not None:
            self._unpin()

    def find(self, tensors: Sequence[NamedTensor]) -> list[TensorSpec] | None:
        """Find the tensors of a layer in the slab; None if one is elsewhere, or two overlap."""
        size = self.layout.num_bytes
        placed: list[TensorSpec] = []
        for name, tensor in tensors:
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset=0)
            if spec.num_bytes:
                offset = tensor.data_ptr() - self.bytes.data_ptr() if size else -1
                if not (
                    tensor.device.type == "cpu"
                    and tensor.is_contiguous()
                    and 0 <= offset <= size - spec.num_bytes
                    and offset == align(offset)
                ):
                    return None
                spec = replace(spec, offset=offset)
            placed.append(spec)
        in_order = sorted((spec for spec in placed if spec.num_bytes), key=lambda spec: spec.offset)
        for left, right in pairwise(in_order):
            if left.offset + left.num_bytes > right.offset:
                return None
        return placed

    def _flat(self, offset: int, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        start = self.offset + offset
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)


def page_lock(
    owner: T, tensor: torch.Tensor, memory: object, device: torch.device
) -> "weakref.finalize[..., T] | None":
    """Page-lock host memory in place for a device, whose kernels may read it then.

    Args:
        owner: When it is gone, so is the lock.
        tensor: The bytes, contiguous.
        memory: Keeps the bytes alive; kept itself until the lock is gone.

    Returns:
        What ends the lock; None, with nothing changed, if the driver refuses.
    """
    pointer = tensor.data_ptr()
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(pointer, tensor.nbytes, 0)) != 0:
            _clear_cuda_error(device)
            return None
    return weakref.finalize(owner, _unregister, memory, pointer, device)


def _unregister(memory: object, pointer: int, device: torch.device) -> None:
    # A copy may still read the slab when the last reference to it goes.
    try:
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.cudart().cudaHostUnregister(pointer)


def _clear_cuda_error(device: torch.device) -> None:
    # A refused registration leaves a sticky error behind that the next, innocent launch reports.
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("poros: cleared the error that a refused page-lock left behind")
