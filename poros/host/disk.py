"""The disk tier: the first blocks in memory, the others read from a file just in time.

At rest the tensors of a block on the disk are views of a private mapping of the file, so that they
can be named, counted, saved and restored like any others, and the system drops their pages when it
needs room. Training does not go through that mapping: a page fault would stop the training thread
for each page. A reader thread reads whole blocks, ahead of the predicted walk, into a few staging
buffers (page-locked for a GPU), and the copies to the device start from there.

Note: What may change
    A loader has hashed the whole file when it opened it. From then on device, inode, size and time
    of modification must be as they were, before the mapping is read and behind each read of the
    reader: behind a file that was cut off, touching a page ends the process, and what was written
    to it since would pass for the weights. The time of change may differ: it also moves when
    somebody links, renames or unlinks the file.

Note: Staging lifetime
    A staging buffer may be overwritten only after the *device* has copied the last bytes out of it
    (see "Slot lifetime" in ``poros.streams``). ``borrowed_until`` keeps the event of that copy, and
    only the training thread, which can ask about events, gives a buffer to the reader. The reader
    never touches a stream.

Note: What is saved
    ``state_dict`` gives views of the mapped file, which takes no time and no memory, so that
    adapters can be saved whatever has become of the base. If the file is no longer what it was, the
    tensors over it come as ``LostTensor``, which raises at any use.

Direct reads (O_DIRECT) go around the page cache: the file is larger than the memory that is to be
used, so that the cache would only push out what is needed. Where the file system has none, ordinary
reads do.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poros.errors import CheckpointFormatError
from poros.host.layout import BlockLayout, slab_offsets, slabs_num_bytes
from poros.host.slab import Arena, HostSlab, NamedTensor
from poros.host.store import HostStore
from poros.io.digests import Identity, identity_of
from poros.io.reading import read_into
from poros.streams import Event, StreamContext

logger = logging.getLogger(__name__)

NUM_STAGING = 3
"""Buffers: one being copied to the device, one full, one being read."""


class SlabFile:
    """The last slabs of a file, mapped; it stays open.

    Args:
        path: The file, which ends with these slabs.
        offset: Offset of the first of them in bytes, a multiple of a page.
        identity: Identity of the file when it was hashed.

    Raises:
        HostMemoryError: If the file cannot be mapped, which takes no memory.
        CheckpointFormatError: If it is not the file that was hashed.
    """

    def __init__(self, path: Path, offset: int, num_bytes: int, identity: Identity) -> None:
        self.path, self.offset, self._identity = path, offset, identity
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.require_intact()
        self.arena = Arena(num_bytes, file=self.descriptor, offset=offset, private=True)
        self._address = torch.frombuffer(self.arena.memory, dtype=torch.uint8).data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the mapping."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        return 0 <= tensor.data_ptr() - self._address < len(self.arena.memory)

    def require_intact(self) -> None:
        """Check that the file is unchanged: see "What may change".

        Raises:
            CheckpointFormatError: If it is not.
        """
        expected, found = self._identity[:-1], identity_of(os.fstat(self.descriptor))[:-1]
        if found != expected:
            raise CheckpointFormatError(
                f"{self.path}: expected device, inode, size and time of modification {expected} as "
                f"when it was opened, found {found}: another file, or one that was written to "
                "since. Adapters are not affected and can be saved; check the disk, or write the "
                "store again, and go on from them"
            )


@dataclass(eq=False)
class DiskStore(HostStore):
    """A host store whose later slabs are on a disk.

    Made by ``DiskStore.over_file`` with one slab per layer; ``adopt`` makes one of blocks.
    """

    behind: SlabFile = field(kw_only=True)
    """The slabs that are on the disk."""

    def __post_init__(self) -> None:
        self._streams: StreamContext | None = None
        self._staging: list[HostSlab] = []
        self._idle: deque[tuple[HostSlab, Event]] = deque()
        """Buffers without a block, and the event of the last copy out of each: the oldest first."""
        self._ahead: dict[int, tuple[HostSlab, Future[None]]] = {}
        """Blocks that were read or are, each with its buffer, in the order of their reads."""
        self._lent: HostSlab | None = None
        """The buffer that is borrowed, from which a copy is about to be queued."""
        self._reader: _Reader | None = None

    @property
    def lender(self) -> "DiskStore":
        return self

    @classmethod
    def over_file(
        cls,
        resident: HostStore,
        file: Path,
        layouts: Sequence[BlockLayout],
        identity: Identity,
    ) -> HostStore:
        """Make a store of the slabs of ``resident``, followed by those of ``file``.

        Args:
            resident: The first slabs of ``layouts``, filled; there may be none.
            file: The file of all slabs, each on a page, one after the other.
            layouts: Layouts of all layers.
            identity: Identity of the file when it was hashed.

        Raises:
            HostMemoryError: If the file cannot be mapped, which takes no memory.
            CheckpointFormatError: If it is another one.
        """
        first, rest = len(resident.slabs), layouts[len(resident.slabs) :]
        if not any(layout.num_bytes for layout in rest):
            return resident
        offset = slab_offsets(layouts)[first]
        opened = SlabFile(file, offset, slabs_num_bytes(rest), identity)
        behind = HostStore.over(opened.arena, rest)
        return cls(
            [*resident.slabs, *behind.slabs],
            list(resident.fallbacks),
            behind=opened,
        )

    def is_untouched(self, slab: HostSlab) -> bool:
        """Whether the file still holds what the tensors over the mapping hold."""
        return not self._is_on_disk(slab) or not num_written_pages(slab.bytes)

    def read(self, block: int) -> torch.Tensor:
        self.require_intact()
        return super().read(block)

    def require_intact(self) -> None:
        self.behind.require_intact()

    def adopt(self, blocks: Sequence[Sequence[Sequence[NamedTensor]]]) -> HostStore | None:
        adopted = super().adopt(blocks)
        if adopted is None:
            return None
        return DiskStore(adopted.slabs, adopted.fallbacks, behind=self.behind)

    def start(self, streams: StreamContext) -> None:
        """Make the reader; copies will be queued in ``streams``. ``pin`` page-locks its buffers."""
        self._streams = streams
        self._make_staging()

    def borrow(self, block: int) -> torch.Tensor:
        """Return the bytes of a block, (num_bytes,) uint8, to be copied to the device.

        They stay as they are until the event given to ``borrowed_until`` has passed. Waits for the
        reader, and counts for how long.

        Raises:
            CheckpointFormatError: If the block cannot be read. Another try reads again.
        """
        if not self._is_on_disk(self.slabs[block]):
            return self.slabs[block].bytes
        begin = time.perf_counter()
        self._take_back(None)  # a copy that was never queued has failed
        if block not in self._ahead:
            self._read(block, self._claim())
        self._lent, reading = self._ahead.pop(block)
        self._wait(reading)
        self.disk_stall_ms += 1e3 * (time.perf_counter() - begin)
        return self._lent.bytes[: self.slabs[block].layout.num_bytes]

    def borrowed_until(self, block: int, event: Event) -> None:
        """Note that the copy of what ``borrow`` returned is complete at ``event``."""
        self._take_back(event)

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Start reading the blocks that are borrowed next, into buffers that are free now."""
        if not self._staging:
            return
        wanted: list[int] = []
        for block in blocks:
            if self._is_on_disk(self.slabs[block]) and block not in wanted:
                wanted.append(block)
            if len(wanted) == len(self._staging):
                break
        for block in wanted:
            if block not in self._ahead:
                slab = self._find_free(wanted)
                if slab is None:
                    return
                self._read(block, slab)

    def pin(self, device: torch.device) -> None:
        """Page-lock the staging buffers, and then the blocks in memory."""
        self._make_staging()
        both = HostStore(
            [*self._staging, *(slab for slab in self.slabs if not self._is_on_disk(slab))]
        )
        both.pin(device)
        self.fallbacks += both.fallbacks

    def unpin(self) -> None:
        """Stop the reader, and undo ``pin``. Idempotent; waits for a read that has begun."""
        if self._reader is not None:
            self._reader.close()
        for slab in self._staging:
            slab.unpin()
        self._staging, self._reader, self._lent = [], None, None
        self._idle.clear()
        self._ahead.clear()
        super().unpin()

    @property
    def num_bytes(self) -> int:
        """Frozen bytes in host memory, staging buffers included."""
        resident = (slab for slab in self.slabs if not self._is_on_disk(slab))
        return sum(slab.layout.num_bytes for slab in (*resident, *self._staging))

    @property
    def pinned_num_bytes(self) -> int:
        slabs = (*self.slabs, *self._staging)
        return sum(slab.layout.num_bytes for slab in slabs if slab.is_pinned)

    def _is_on_disk(self, slab: HostSlab) -> bool:
        return slab.arena is self.behind.arena

    def _make_staging(self) -> None:
        layouts = (slab.layout for slab in self.slabs if self._is_on_disk(slab))
        on_disk = [layout for layout in layouts if layout.num_bytes]
        self.disk_num_bytes = sum(layout.num_bytes for layout in on_disk)
        if self._staging or not on_disk:
            return
        largest = max(layout.padded_num_bytes for layout in on_disk)
        buffers = HostStore.allocate([BlockLayout((), largest)] * min(NUM_STAGING, len(on_disk)))
        self._staging = buffers.slabs
        self._idle.extend((slab, None) for slab in buffers.slabs)
        self._reader = _Reader(self.behind)

    def _find_free(self, wanted: Sequence[int]) -> HostSlab | None:
        """Return a buffer that no read or copy uses and whose block is not wanted, if any."""
        if self._idle and self._has_passed(self._idle[0][1]):
            return self._idle.popleft()[0]
        for block, (slab, reading) in self._ahead.items():
            if block not in wanted and reading.done():
                del self._ahead[block]
                return slab
        return None

    def _claim(self) -> HostSlab:
        """Take a buffer for a block that is needed now, once it is free.

        Waits for the copy out of it; or, if blocks that are needed later have all buffers, for the
        read of the last.
        """
        if not self._staging:
            raise CheckpointFormatError(f"{self.behind.path}: its reader has been stopped")
        if not self._idle:
            slab, reading = self._ahead.pop(next(reversed(self._ahead)))
            wait([reading])
            return slab
        slab, event = self._idle.popleft()
        if self._streams is not None and event is not None:
            self._streams.synchronize(event)
        return slab

    def _take_back(self, event: Event) -> None:
        """Note that the borrowed buffer is free after ``event``."""
        if self._lent is not None:
            self._idle.append((self._lent, event))
            self._lent = None

    def _has_passed(self, event: Event) -> bool:
        return event is None or self._streams is None or self._streams.has_passed(event)

    def _read(self, block: int, target: HostSlab) -> None:
        if self._reader is not None:
            self._ahead[block] = target, self._reader.start(target, self.slabs[block])

    def _wait(self, reading: Future[None]) -> None:
        try:
            reading.result()
        except CheckpointFormatError:
            raise
        except Exception as error:
            raise CheckpointFormatError(
                f"{self.behind.path}: expected to read a block of the frozen base, found: {error}. "
                "Check the disk; training can go on from the last checkpoint of the adapters"
            ) from error


class _Reader:
    """Reads blocks of a file, one after the other, in a thread of its own."""

    def __init__(self, behind: SlabFile) -> None:
        self._behind = behind
        self._pool = ThreadPoolExecutor(1, "poros-disk")
        self._descriptor = behind.descriptor
        try:
            direct = os.open(
                f"/proc/self/fd/{behind.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            )
            weakref.finalize(self, os.close, direct)
            self._descriptor = direct
        except OSError as error:  # some file systems refuse the flag, others the reads
            self._log_cached(error)

    def start(self, target: HostSlab, slab: HostSlab) -> Future[None]:
        """Read ``slab``, one of the mapping, into memory of its own, after what was started."""
        array: Any = target.bytes.numpy()
        memory = memoryview(array)[: slab.layout.padded_num_bytes]
        return self._pool.submit(self._read, memory, self._behind.offset + slab.offset)

    def close(self) -> None:
        """End the thread, after the read that it is in."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, memory: memoryview, place: int) -> None:
        try:
            done = read_into(self._descriptor, memory, place)
        except OSError as error:
            if self._descriptor == self._behind.descriptor:
                raise
            self._log_cached(error)
            self._descriptor = self._behind.descriptor
            done = read_into(self._descriptor, memory, place)
        self._behind.require_intact()
        if done < len(memory):
            raise EOFError(f"the end of the file at {place + done}")

    def _log_cached(self, error: OSError) -> None:
        logger.debug("poros: %s is read through the page cache: %s", self._behind.path, error)


def num_written_pages(flat: torch.Tensor) -> int:
    """Count the pages of a private mapping that this process has written; 0 if that is unknown.

    Source:
        Documentation/admin-guide/mm/pagemap.rst of Linux: bit 61 is set for a page of a file, bits
        62 and 63 for one that is swapped or present.
    """
    if not flat.numel():
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    first = flat.data_ptr() // page
    last = (flat.data_ptr() + flat.numel() - 1) // page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as stream:
            stream.seek(8 * first)
            text = stream.read(8 * (last + 1 - first))
    except OSError:
        return 0
    if not text:
        return 0
    entries = torch.frombuffer(bytearray(text), dtype=torch.int64)
    # Bit 63 is the sign.
    is_there = (entries < 0) | (entries & (1 << 62) != 0)
    return int((is_there & (entries & (1 << 61) == 0)).sum())


class LostTensor(torch.Tensor):
    """Replaces a tensor whose bytes are lost: any use raises ``CheckpointFormatError``.

    Args:
        like: A tensor of the same form.
        why: The error's text.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, why: str) -> "LostTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.__dict__["why"] = why
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lost = (each for each in tree_leaves((args, kwargs)) if isinstance(each, LostTensor))
        raise CheckpointFormatError(next(lost).__dict__["why"])

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def watch_saving(model: nn.Module, store: DiskStore) -> None:
    """Have ``state_dict`` of a loaded model, some layers of which lie in ``store``, check its file.

    A copy or a pickle of the model, whose tensors are its own, is not checked.
    """
    model.register_state_dict_post_hook(_Watch(store))


class _Watch:
    """The hook behind ``state_dict``. That of a copy has no store, and does nothing."""

    def __init__(self, store: DiskStore | None) -> None:
        self._store = store

    def __call__(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if self._store is None:
            return
        try:
            self._store.require_intact()
        except CheckpointFormatError as error:
            logger.error("poros: %s", error)
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and self._store.behind.holds(tensor):
                    state[name] = LostTensor(tensor, f"{name}: {error}")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is not None:
            self._store.require_intact()  # before its layers are copied
        return _Watch, (None,)
