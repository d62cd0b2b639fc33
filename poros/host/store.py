"""The frozen base in host memory: one contiguous slab per block, all in one exactly sized arena.

Note: Authoritative host copy
    Frozen bytes go from here to the device and never back. state_dict, save and restore read these
    bytes, never a slot. The tensors handed out by ``HostSlab.tensor`` have storages of their own
    over the slab's memory, so that no saver takes two neighbours for one shared tensor.

Note: Adoption
    A loader writes into one slab per layer and leaves the store on the model (``attach_store``).
    ``poros.prepare`` then finds each frozen tensor at an address of that store, and takes whole
    runs of slabs over as blocks (``HostStore.adopt``; see "Layers start on pages" in
    ``poros.host.layout``) instead of copying a byte. Addresses decide, nothing else: a block whose
    tensors have been replaced since is copied like any other.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from poros.host.layout import BlockLayout, TensorSpec, slab_offsets, slabs_num_bytes
from poros.host.slab import Arena, HostSlab, NamedTensor
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

_ATTACHED = "_poros_store"


@dataclass
class HostStore:
    """The slabs of all blocks (or, from a loader, of all layers), in execution order."""

    slabs: list[HostSlab]
    fallbacks: list[str] = field(default_factory=list)
    """Things that were not available, one line each; each was logged once."""
    disk_num_bytes: int = 0
    """Frozen bytes that are not in memory (``poros.host.disk``)."""
    disk_stall_ms: float = 0.0
    """Time for which training waited for them."""
    lender: ClassVar[Any] = None
    """Gives the bytes of blocks that are copied, if some are on a disk: a ``DiskStore``."""

    @classmethod
    def allocate(cls, layouts: Sequence[BlockLayout]) -> "HostStore":
        """Reserve memory for every slab. The system commits it as the bytes are written.

        The arena is the sum of the slabs, each rounded up to a page.

        Raises:
            HostMemoryError: If the mapping is refused.
        """
        return cls.over(Arena(slabs_num_bytes(layouts)), layouts)

    @classmethod
    def over(cls, arena: Arena, layouts: Sequence[BlockLayout]) -> "HostStore":
        """Make a store of the slabs of ``layouts``, one after the other, over an arena."""
        offsets = slab_offsets(layouts)
        slabs = [HostSlab(layout, arena, at) for layout, at in zip(layouts, offsets, strict=True)]
        return cls(slabs)

    def adopt(self, blocks: Sequence[Sequence[Sequence[NamedTensor]]]) -> "HostStore | None":
        """Return these bytes as a store of blocks, as far as the blocks' tensors lie in it.

        Args:
            blocks: For each block, for each of its layers, the names and tensors that move. There
                are as many layers in all as slabs.

        Returns:
            A store whose slabs are runs of the slabs of this one, and whose layouts place each
            tensor, in the order given. A block of which a tensor lies elsewhere (weights
            replaced, part of it on a disk) has a new slab, and has to be copied as a whole. None
            if that is all of them. Nothing is changed in any case.

        Raises:
            HostMemoryError: If the memory for a new slab is refused.
        """
        if sum(map(len, blocks)) != len(self.slabs):
            return None
        slabs = iter(self.slabs)
        adopted = []
        for block in blocks:
            run = [next(slabs) for _ in block]
            adopted.append(self._find_run(block, run))
        if not any(adopted):
            return None
        layouts = [
            BlockLayout.join([BlockLayout.pack(layer) for layer in block]) for block in blocks
        ]
        store = HostStore(
            [old or HostSlab(layout) for old, layout in zip(adopted, layouts, strict=True)],
            list(self.fallbacks),
        )
        copied = [index for index, old in enumerate(adopted) if old is None]
        if copied:
            num_bytes = sum(layouts[index].num_bytes for index in copied)
            store.fallbacks.append(f"blocks {copied} copied to new host memory")
            logger.warning(
                "poros: blocks %s are no longer contiguous where they were loaded (weights were "
                "replaced or written since, or only some layers are within the host budget). They "
                "are copied, which takes %s more host memory",
                copied,
                size(num_bytes),
            )
        return store

    def read(self, block: int) -> torch.Tensor:
        """Return the bytes of a block for reading on the host."""
        return self.slabs[block].bytes

    def require_intact(self) -> None:
        """Check that the tensors at rest still hold what was loaded; call it before copying one."""

    def is_untouched(self, slab: HostSlab) -> bool:
        """Whether ``slab`` was not written to except by the store."""
        return True

    def _find_run(
        self, block: Sequence[Sequence[NamedTensor]], run: Sequence[HostSlab]
    ) -> HostSlab | None:
        if len({slab.arena for slab in run}) != 1 or not all(map(self.is_untouched, run)):
            return None
        specs: list[TensorSpec] = []
        for tensors, slab in zip(block, run, strict=True):
            places = slab.find(tensors)
            if places is None:
                return None
            start = slab.offset - run[0].offset
            specs += [replace(spec, offset=start + spec.offset) for spec in places]
        num_bytes = run[-1].offset - run[0].offset + run[-1].layout.num_bytes
        return HostSlab(BlockLayout(tuple(specs), num_bytes), run[0].arena, run[0].offset)

    def pin(self, device: torch.device) -> None:
        """Page-lock slab after slab until the driver refuses; warn that the rest is pageable."""
        for index, slab in enumerate(self.slabs):
            if not slab.pin(device):
                pageable = sum(other.layout.num_bytes for other in self.slabs[index:])
                self.fallbacks.append(
                    f"pageable host memory for blocks {index} to {len(self.slabs) - 1}"
                )
                logger.warning(
                    "poros: %s of the frozen base could not be page-locked (the driver "
                    "refused at block %d). Training stays exact, but copies of these blocks are "
                    "slower and do not overlap with compute. The limit on locked memory can be "
                    "raised (ulimit -l; docker run --ulimit memlock; on WSL, which locks half of "
                    "its memory, memory= under [wsl2] in .wslconfig)",
                    size(pageable),
                    index,
                )
                return

    def unpin(self) -> None:
        for slab in self.slabs:
            slab.unpin()

    @property
    def num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slab in self.slabs)

    @property
    def pinned_num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slab in self.slabs if slab.is_pinned)


def attach_store(model: nn.Module, store: HostStore) -> None:
    """Put ``store``, one slab per decoder layer, on the model whose tensors lie in it.

    ``poros.prepare`` adopts it. A deep copy or a pickle of the model has tensors of its own, and no
    store.
    """
    model.__dict__[_ATTACHED] = _Attached(store)


def attached_store(model: nn.Module) -> HostStore | None:
    """The store that ``attach_store`` has put on ``model``, if any."""
    found = model.__dict__.get(_ATTACHED)
    return found.store if isinstance(found, _Attached) else None


def detach_store(model: nn.Module) -> None:
    """Remove what ``attach_store`` has put on ``model``: its tensors have moved away."""
    model.__dict__.pop(_ATTACHED, None)


class _Attached:
    """Holds a store in a module's ``__dict__``; copies of the module hold None instead."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
