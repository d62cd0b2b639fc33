"""The frozen base in host memory: one contiguous slab per block.

Only this module page-locks memory. A slab is an anonymous mapping of its own, registered with the
driver in place: the caching host allocator of PyTorch would round each one up to a power of two.

Note: Authoritative host copy
    Frozen bytes go from here to the device and never back. state_dict, save and restore read these
    bytes, never a slot. The tensors handed out by ``HostSlab.tensor`` have storages of their own
    over the slab's memory, so that no saver takes two neighbours for one shared tensor.
"""

import logging
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from poros.errors import HostMemoryError
from poros.layout import BlockLayout, TensorSpec

logger = logging.getLogger(__name__)


class HostSlab:
    """The authoritative bytes of one block, optionally page-locked."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        try:
            self._memory = mmap.mmap(-1, max(layout.num_bytes, 1), **_private())
        except OSError as error:
            raise HostMemoryError(
                f"expected {layout.num_bytes} bytes of host memory for a block of the frozen base, "
                f"found none left ({error}); free memory or use a smaller model"
            ) from error
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[: layout.num_bytes]
        self._unpin: weakref.finalize[..., HostSlab] | None = None

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor ``spec`` describes, over the slab's memory but with a storage of its own."""
        if spec.num_bytes == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        flat = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=spec.num_bytes, offset=spec.offset
        )
        return flat.view(spec.dtype).view(spec.shape)

    def pin(self, device: torch.device) -> bool:
        """Page-lock the slab for ``device``; False, with nothing changed, if the driver refuses."""
        pointer = self.bytes.data_ptr()
        runtime = torch.cuda.cudart()
        with torch.cuda.device(device):
            if int(runtime.cudaHostRegister(pointer, len(self._memory), 0)) != 0:
                _clear_cuda_error(device)
                return False
        # The mapping outlives the finalizer: the finalizer's own reference keeps it until then.
        self._unpin = weakref.finalize(self, _unregister, self._memory, pointer, device)
        return True

    def unpin(self) -> None:
        """Undo ``pin`` once the device has no copy from the slab in flight. Idempotent."""
        if self._unpin is not None:
            self._unpin()


@dataclass
class HostStore:
    """The slabs of all blocks, in execution order."""

    slabs: list[HostSlab]
    fallbacks: list[str] = field(default_factory=list)
    """What could not be had, one line each; each was logged once."""

    @classmethod
    def allocate(cls, layouts: Sequence[BlockLayout]) -> "HostStore":
        """Reserve memory for every block. The system commits it as the bytes are written.

        Raises:
            HostMemoryError: If the mapping is refused.
        """
        return cls([HostSlab(layout) for layout in layouts])

    def pin(self, device: torch.device) -> None:
        """Page-lock slab after slab until the driver refuses; what remains is pageable, loudly."""
        for index, slab in enumerate(self.slabs):
            if not slab.pin(device):
                pageable = sum(each.layout.num_bytes for each in self.slabs[index:])
                self.fallbacks.append(
                    f"pageable host memory for blocks {index} to {len(self.slabs) - 1}"
                )
                logger.warning(
                    "poros: %.2f GB of the frozen base could not be page-locked (the driver "
                    "refused at block %d). Training stays exact, but copies of these blocks are "
                    "slower and do not overlap with compute. Raise the locked-memory limit "
                    "(ulimit -l).",
                    pageable / 1e9,
                    index,
                )
                return

    def unpin(self) -> None:
        """Undo ``pin`` for every slab."""
        for slab in self.slabs:
            slab.unpin()

    @property
    def num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slab in self.slabs)

    @property
    def pinned_num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slab in self.slabs if slab.is_pinned)


def _private() -> dict[str, int]:
    # Anonymous mappings are shared by default, which would count them as tmpfs pages.
    if hasattr(mmap, "MAP_PRIVATE"):
        return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return {}


def _unregister(memory: mmap.mmap, pointer: int, device: torch.device) -> None:
    # A copy may still read the slab when the last reference to it goes.
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(pointer)


def _clear_cuda_error(device: torch.device) -> None:
    # A refused registration leaves a sticky error behind that the next, innocent launch reports.
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("poros: cleared the error that a refused page-lock left behind")
