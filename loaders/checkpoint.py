"""A safetensors checkpoint, opened and checked as a whole and read tensor by tensor.

What is loaded is read into memory, ahead of its use (see ``poros.loaders.header`` for why).

Nothing of a checkpoint is executed: pickle files are refused by their name, and no other file is
opened than configuration, index and the shards that the index names.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from poros.errors import HostMemoryError, quoted
from poros.io.digests import Identity, as_bytes, identity_of, num_threads, sha256
from poros.loaders.header import (
    DTYPE_NAMES,
    Header,
    TensorEntry,
    defect,
    fill,
    fill_and_hash,
    open_regular,
    read_header,
    scratch,
    shown,
)
from poros.loaders.source import CONFIG, find_source

AHEAD_NUM_BYTES = 128 * 2**20
"""How far ahead ``slices`` reads."""

NUM_READERS = 2
"""Threads that do it."""

_LARGE_NUM_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Shard:
    """A file: its header, and its identity when the header was read."""

    header: Header
    identity: Identity

    @classmethod
    def open(cls, file: Path) -> "Shard":
        """Read and check the header of ``file``; nothing is left open."""
        with open_regular(file) as (descriptor, status):
            return cls(read_header(descriptor, file), identity_of(status))

    @property
    def file(self) -> Path:
        return self.header.file

    def read(self, name: str, entry: TensorEntry) -> torch.Tensor:
        """Read a tensor into new memory; call ``check_unchanged`` after the last read.

        Raises:
            CheckpointFormatError: If it cannot be read.
            HostMemoryError: If there is no memory for it.
        """
        flat = new_bytes(entry.num_bytes)
        remedy = "check the disk and fetch the file again"
        with open_regular(self.file) as (descriptor, _):
            fill(descriptor, as_bytes(flat), entry.offset, self.file, tensor=name, remedy=remedy)
        return flat.view(entry.dtype).view(entry.shape)

    def check_unchanged(self) -> None:
        """Compare the file with what it was when it was opened."""
        try:
            current = identity_of(os.stat(self.file))
        except OSError as error:
            raise defect(
                self.file, f"expected the file that was opened, found: {error.strerror}"
            ) from error
        if current != self.identity:
            raise defect(
                self.file,
                "expected device, inode, size and times of modification and change "
                f"{self.identity} as when it was opened, found {current}: it changed while it was "
                "read",
                remedy="let nothing write to the checkpoint and load it again",
            )

    def digest(self, is_over: threading.Event) -> bytes:
        """Hash the whole file, unless ``is_over`` is set.

        Raises:
            CheckpointFormatError: If the file changed since it was opened, or a read fails.
            ValueError: If it was over before.
        """

        def targets() -> Iterator[memoryview]:
            for piece in scratch(self.header.num_bytes):
                if is_over.is_set():
                    raise ValueError(f"expected an open checkpoint, found {self.file} closed")
                yield piece

        with open_regular(self.file) as (descriptor, _):
            self.check_unchanged()
            found = fill_and_hash(descriptor, targets(), 0, self.file)
            self.check_unchanged()
        return bytes.fromhex(found)


class Checkpoint:
    """The tensors of a checkpoint by name, read from disk when they are asked for.

    A context manager. No file stays open, and after ``close`` none is read ahead. Made by ``open``,
    whose errors are those of a tensor in two shards too, and of shards without any.

    Attributes:
        path: The folder of the checkpoint; configuration files lie there.
        texts: ``config.json``, and ``generation_config.json`` if there is one, as at ``open``.
        entries: File, dtype, shape and offset of each tensor by its name, in the order of their
            bytes, shard by shard.
    """

    def __init__(self, path: Path, texts: Mapping[str, bytes], shards: Sequence[Shard]) -> None:
        self.path = path
        self.texts = texts
        self._shards = {shard.file: shard for shard in shards}
        self.entries: dict[str, TensorEntry] = {}
        for shard in shards:
            for name, entry in shard.header.tensors.items():
                if name in self.entries:
                    raise defect(
                        shard.file,
                        "expected each tensor in one file, found it in "
                        f"{shown(self.entries[name].file)} too",
                        tensor=name,
                    )
                self.entries[name] = entry
        if not self.entries:
            raise defect(path, "expected tensors, found a checkpoint of none")
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._reader = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="poros-reader")
        self._asked: dict[str, Future[torch.Tensor]] = {}
        self._order: list[str] = []
        self._begun = 0

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str],
        hub: Mapping[str, Any] | None = None,
    ) -> "Checkpoint":
        """Find and check a checkpoint; no tensor is read.

        Args:
            source: A folder with ``config.json`` and ``model.safetensors`` or its index and shards
                (links are followed, as in a hub cache), one ``.safetensors`` file with
                ``config.json`` beside it, or the name of a hub repository.
            hub: Of ``huggingface_hub.snapshot_download``: ``revision``, ``cache_dir``, ``token``,
                ``local_files_only``, ``force_download``.

        Raises:
            CheckpointFormatError: If the checkpoint cannot be found or any file breaks its format.
            UnsupportedModelError: If it is an adapter, or has one beside it.
                Nothing is left open in either case.
        """
        path, texts, files = find_source(source, hub)
        return cls(path, texts, [Shard.open(file) for file in files])

    def fetch(self, name: str) -> torch.Tensor:
        """Read the tensor into new memory; a failing disk raises here.

        What was begun ahead is there already, or is waited for.

        Raises:
            CheckpointFormatError: If its file has changed since ``open``, or reading it fails.
            HostMemoryError: If there is no memory for it.
        """
        entry = self.entries[name]
        shard = self._shards[entry.file]
        asked = self._asked.pop(name, None)
        tensor = asked.result() if asked is not None else shard.read(name, entry)
        shard.check_unchanged()
        return tensor

    def slices(self, names: Sequence[str] | None = None) -> dict[str, "CheckpointSlice"]:
        """Return slices that are read later, to pass to transformers as a ``state_dict``.

        transformers indexes each with ``[...]`` when its turn comes, as it does with the slices of
        ``safetensors.safe_open``; that is ``fetch``. It takes them in its own order (layer 2 before
        layer 10), and while one is used the next ``AHEAD_NUM_BYTES`` are being read, each once.

        Args:
            names: Names of the tensors; None takes all of them.
        """
        from transformers.core_model_loading import dot_natural_key

        try:
            self._order = sorted(self.entries if names is None else names, key=dot_natural_key)
        except ValueError as error:  # of digits that are no numbers
            raise defect(
                self.path, f"expected names that transformers sorts, found {quoted(str(error))}"
            ) from error
        places = {name: place for place, name in enumerate(self._order)}
        self._begun = 0  # place in the order up to which reads have begun
        return {name: CheckpointSlice(self, name, place) for name, place in places.items()}

    def take(self, name: str, place: int) -> torch.Tensor:
        """``fetch`` the tensor of a slice, and begin to read those that follow in the order.

        Threads begin with the first call and end with ``close``, after which none is read ahead.
        """
        left = AHEAD_NUM_BYTES
        with self._lock:  # transformers may take slices in several threads
            for index in range(place + 1, len(self._order)):
                following = self._order[index]
                entry = self.entries[following]
                if left <= 0 or self._is_closed.is_set():
                    break
                left -= entry.num_bytes
                if index >= self._begun and entry.num_bytes:
                    read = self._shards[entry.file].read
                    self._asked[following] = self._reader.submit(read, following, entry)
                self._begun = max(self._begun, index + 1)
        return self.fetch(name)

    def fingerprint(self) -> str:
        """Hash the content: the configuration and, shard by shard, size and every byte.

        It does not depend on where the files lie, how they are called or when they were written.

        Returns:
            ``xxh3:`` and 32 hexadecimal digits.
        """
        text = self.texts[CONFIG]
        digest = xxh3_128(len(text).to_bytes(8, "little") + text)
        shards = self._shards.values()
        with ThreadPoolExecutor(num_threads()) as pool:
            found = pool.map(lambda shard: shard.digest(self._is_closed), shards)
            for shard, each in zip(shards, found, strict=True):
                digest.update(shard.header.num_bytes.to_bytes(8, "little") + each)
        return f"xxh3:{digest.hexdigest()}"

    def seen(self) -> dict[str, Any]:
        """Return what identifies the same files without reading them, as plain JSON values.

        The digest of the configuration; size, times of modification and of change, and inode of
        every shard. A program that writes to a file can set all of these back but the time of
        change.
        """
        shards = []
        for shard in self._shards.values():
            _, inode, size, modified, changed = shard.identity
            shards.append([size, modified, changed, inode])
        return {"config": sha256(self.texts[CONFIG]), "shards": shards}

    def float_dtype(self) -> torch.dtype:
        """The dtype for ``dtype="auto"`` without one in the configuration: the first tensor's."""
        first = next(iter(self._shards.values()))
        for _, entry in sorted(first.header.tensors.items()):
            if entry.dtype.is_floating_point:
                return entry.dtype
        raise defect(self.path, "expected tensors in floating point, found none")

    def close(self) -> None:
        """End reading ahead, and hashing. Idempotent."""
        self._is_closed.set()
        with self._lock:
            self._asked = {}
        self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CheckpointSlice:
    """One tensor that is read when it is indexed, with what transformers asks of such slices."""

    def __init__(self, checkpoint: Checkpoint, name: str, place: int) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._place = place

    def get_dtype(self) -> str:
        """As in safetensors: the name in the file, such as ``BF16``."""
        return DTYPE_NAMES[self._checkpoint.entries[self._name].dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the tensor and index it; ``[...]`` is all of it. Raises as ``fetch`` does."""
        return self._checkpoint.take(self._name, self._place)[index]


def new_bytes(num_bytes: int) -> torch.Tensor:
    """Allocate bytes; many of them in large pages, which are four times as fast."""
    if num_bytes < _LARGE_NUM_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"expected {num_bytes} bytes of host memory for a tensor, found: {error.strerror}; "
            "free memory, or raise the limit of the process (ulimit -v)"
        ) from error
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
