"""The frozen base in host memory: one contiguous slab per block, all in one exactly sized arena.

Only this module page-locks memory, but for the buffers of quantizing at load time. A slab is part
of a mapping of our own, registered with the driver in place: the caching host allocator of PyTorch
would round each one up to a power of two.

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

import errno
import logging
import mmap
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from poros.errors import HostMemoryError
from poros.host.layout import PAGE_NUM_BYTES, BlockLayout, TensorSpec, align, slab_offsets
from poros.host.limits import explain_pin_budget
from poros.io.digests import SourceChecksums
from poros.io.reading import mapping_flags
from poros.streams import Event, StreamContext, gb_per_s
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

_ATTACHED = "_poros_store"

NamedTensor = tuple[str, torch.Tensor]


class Arena:
    """One shared mapping, as large as the slabs in it and no larger.

    Args:
        num_bytes: Size. The system commits memory page by page as it is written.
        file: A file or memory file to map instead of new memory. It is not closed.
        offset: Where in ``file`` the arena starts; a multiple of ``PAGE_NUM_BYTES``.
        private: Whether writes stay in this process, and out of the file.
        is_shareable: Whether new memory is a memory file, which takes a file descriptor.

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
        is_shareable: bool = True,
    ) -> None:
        self._file: int | None = None
        try:
            if file is None and is_shareable and hasattr(os, "memfd_create"):
                self._file = file = os.memfd_create("poros", os.MFD_CLOEXEC)
                weakref.finalize(self, os.close, file)
                os.ftruncate(file, max(num_bytes, 1))
            where = -1 if file is None else file
            self.memory = mmap.mmap(
                where, max(num_bytes, 1), offset=offset, **mapping_flags(private)
            )
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EFBIG:  # a memory file is a file too
                found = "the limit of this process on the size of a file; raise it (ulimit -f)"
            else:
                found = f"none left ({error}); free memory or use a smaller model"
            raise HostMemoryError(
                f"expected {num_bytes} bytes of host memory (for the frozen base, or for inputs of "
                f"layers), found {found}"
            ) from error

    def fileno(self) -> int:
        """Return the memory file, for another process of this machine (``HostStore.attach``).

        Raises:
            HostMemoryError: If the system has no memory files.
        """
        if self._file is None:
            raise HostMemoryError(
                "expected an arena in a memory file, which other processes can map, found one that "
                "has none; share the store on disk instead"
            )
        return self._file


class HostSlab:
    """The authoritative bytes of one block, optionally page-locked.

    Args:
        layout: What lies in it.
        arena: The memory it is part of; an arena of its own if None.
        offset: Where in the arena it starts, in bytes.
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
        pointer = self.bytes.data_ptr()
        runtime = torch.cuda.cudart()
        with torch.cuda.device(device):
            if int(runtime.cudaHostRegister(pointer, self.layout.num_bytes, 0)) != 0:
                _clear_cuda_error(device)
                return False
        # The mapping outlives the finalizer: the finalizer's own reference keeps it until then.
        self._unpin = weakref.finalize(self, _unregister, self._memory, pointer, device)
        return True

    def unpin(self) -> None:
        """Undo ``pin`` once the device has no copy from the slab in flight. Idempotent."""
        if self._unpin is not None:
            self._unpin()

    def _flat(self, offset: int, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        start = self.offset + offset
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)


@dataclass
class HostStore:
    """The slabs of all blocks (or, from a loader, of all layers), in execution order."""

    slabs: list[HostSlab]
    fallbacks: list[str] = field(default_factory=list)
    """What could not be had, one line each; each was logged once."""
    disk_num_bytes: int = 0
    """Frozen bytes that are not in memory (``poros.host.disk``)."""
    disk_stall_ms: float = 0.0
    """For how long training waited for them."""
    as_packed: SourceChecksums = field(default_factory=SourceChecksums)

    @classmethod
    def allocate(cls, layouts: Sequence[BlockLayout]) -> "HostStore":
        """Reserve memory for every slab. The system commits it as the bytes are written.

        The arena is the sum of the slabs, each rounded up to a page.

        Raises:
            HostMemoryError: If the mapping is refused.
        """
        return cls.over(Arena(_num_bytes(layouts)), layouts)

    @classmethod
    def attach(cls, file: int, layouts: Sequence[BlockLayout]) -> "HostStore":
        """Attach to the memory file of another process's store: the same bytes, not a copy.

        Args:
            file: What ``Arena.fileno`` gave, handed over (``socket.send_fds``, ``pass_fds``).
            layouts: The layouts that the store was allocated with.

        Raises:
            HostMemoryError: If the file is not as large as a store of ``layouts``.
        """
        expected, found = max(_num_bytes(layouts), 1), os.fstat(file).st_size
        if found != expected:
            raise HostMemoryError(
                f"expected a shared store of {expected} bytes, found one of {found}; attach it "
                "with the layouts that it was allocated with"
            )
        return cls.over(Arena(_num_bytes(layouts), file=file), layouts)

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
                "poros: blocks %s do not lie in one piece where they were loaded (weights replaced "
                "or written since, or only some layers within the host budget): %s of host "
                "memory more",
                copied,
                size(num_bytes),
            )
        return store

    def start(self, streams: StreamContext) -> None:
        """Prepare for ``borrow``; ``streams`` is where copies will be queued."""

    def borrow(self, block: int) -> torch.Tensor:
        """Return the bytes of a block, to be copied to the device: (num_bytes,), uint8.

        They stay as they are until the event given to ``borrowed_until`` has passed.
        """
        return self.slabs[block].bytes

    def borrowed_until(self, block: int, event: Event) -> None:
        """Note that the copy of what ``borrow`` returned is complete at ``event``."""

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Announce the blocks that are borrowed next, in this order."""

    def read(self, block: int) -> torch.Tensor:
        """Return the bytes of a block for reading on the host."""
        return self.slabs[block].bytes

    def at_rest(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the model's tensors at rest, one after the other, readable for copies."""
        return iter(tensors)

    def require_intact(self) -> None:
        """Check that the tensors at rest still hold what was loaded."""

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
            places = _find_places(tensors, slab)
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
                    "slower and do not overlap with compute%s. %s",
                    size(pageable),
                    index,
                    _compare_rates(self.slabs[:index], slab, device),
                    explain_pin_budget(),
                )
                return

    def unpin(self) -> None:
        """Undo ``pin`` for every slab."""
        for slab in self.slabs:
            slab.unpin()

    @property
    def num_bytes(self) -> int:
        """Frozen bytes in host memory."""
        return sum(slab.layout.num_bytes for slab in self.slabs)

    @property
    def pinned_num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slab in self.slabs if slab.is_pinned)


class _Attached:
    """Holds a store in a module's ``__dict__``; copies of the module hold None instead."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


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


def _num_bytes(layouts: Sequence[BlockLayout]) -> int:
    return (
        align(slab_offsets(layouts)[-1] + layouts[-1].num_bytes, PAGE_NUM_BYTES) if layouts else 0
    )


def _find_places(tensors: Sequence[NamedTensor], slab: HostSlab) -> list[TensorSpec] | None:
    """Find the tensors of a layer in ``slab``; None if one is elsewhere, or two overlap."""
    size = slab.layout.num_bytes
    placed: list[TensorSpec] = []
    for name, tensor in tensors:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset=0)
        if spec.num_bytes:
            offset = tensor.data_ptr() - slab.bytes.data_ptr() if size else -1
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


def _compare_rates(pinned: Sequence[HostSlab], pageable: HostSlab, device: torch.device) -> str:
    """Measure what the fallback costs: empty without a device or anything pinned."""
    if device.type != "cuda":
        return ""
    try:
        slow = _copy_rate(pageable.bytes, device)
        text = f" (measured here: {slow:.1f} GB/s pageable"
        return text + (f", {_copy_rate(pinned[-1].bytes, device):.1f} pinned)" if pinned else ")")
    except torch.OutOfMemoryError:
        return ""


def _copy_rate(source: torch.Tensor, device: torch.device) -> float:
    """Measure GB/s of copies to the device, the best of three."""
    source = source[: 64 * 2**20]
    target = torch.empty_like(source, device=device)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return gb_per_s(source.numel(), 1e3 * best)


def _unregister(memory: mmap.mmap, pointer: int, device: torch.device) -> None:
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
