"""Opens a quantized base on disk (a store) without the checkpoint and without quantizing.

A store is a folder:

    slabs.safetensors   one uint8 tensor per decoder layer: its slab, on a page of the file
    rest.safetensors    every other tensor of the model by name, and the small constants; in its
                        metadata what all files must be (``poros.loaders.manifest``)
    config.json, ...    the source's own small files: settings, tokenizer, licence

The data of ``slabs.safetensors`` are the bytes of the host store, page by page (see "Layers start
on pages" in ``poros.host.layout``): they are read into memory, or mapped, without being parsed.
They are a file of their own because a header comes first, and digests are known last: slabs are
mapped from their file while they are quantized.

Note: Nothing is used that was not checked
    Whatever is read is hashed and compared with the manifest, and so are slabs that stay in the
    file (``poros.host.disk``). A file that the manifest does not name is not looked at.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import quoted
from poros.host.layout import BlockLayout, slab_offsets, slabs_num_bytes
from poros.host.store import HostStore
from poros.io.digests import (
    PIECE_NUM_BYTES,
    Identity,
    as_bytes,
    cut,
    hash_piece,
    identity_of,
    join,
    num_threads,
    sha256,
)
from poros.io.writing import PARTIAL
from poros.loaders.header import Header, defect, fill, open_regular, read_at, read_header, shown
from poros.loaders.limits import MAX_AUXILIARY_NUM_BYTES, read_small
from poros.loaders.manifest import (
    REMEDY,
    REST,
    SLABS,
    Manifest,
    read_manifest,
    slab_name,
    slabs_header,
)
from poros.loaders.shard import new_bytes
from poros.model.origin import Origin

PLACE = "source_place"
"""Key of the place of the checkpoint in the manifest's ``about``."""


@dataclass(frozen=True)
class Run:
    """A contiguous run of bytes in a file, and the memory to read it into."""

    offset: int
    """Offset of the first byte in the file."""
    parts: Sequence[memoryview]
    """Memory for the bytes, one part after the other."""
    digest: str
    """The expected digest (``poros.io.digests``)."""
    name: str | None = None
    """A name for messages."""


@dataclass(frozen=True)
class OpenStore:
    """An open store whose files fit its manifest; tensors outlive it."""

    path: Path
    """Its folder."""
    manifest: Manifest
    """The manifest; ``manifest.about`` is how it was made."""
    data_offset: int
    """Offset of the first slab in the file ``slabs``, in bytes."""
    identity: Identity
    """Identity of the file ``slabs`` when it was opened."""
    _header: Header
    """The header of ``rest.safetensors``."""
    _files: tuple[int, int]
    """Descriptors of slabs and rest."""

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        return self.manifest.layouts

    @property
    def slabs(self) -> Path:
        return self.path / SLABS

    def rest(self) -> dict[str, torch.Tensor]:
        """Read every tensor that is in no slab, by name.

        Raises:
            CheckpointFormatError: If a read fails, or the file is not what was written.
        """
        tensors = {
            name: new_bytes(entry.num_bytes).view(entry.dtype).view(entry.shape)
            for name, entry in self._header.tensors.items()
        }
        parts = [*map(as_bytes, tensors.values())]
        run = Run(self._header.data_offset, parts, self.manifest.rest_digest)
        read_checked(self._files[1], self.path / REST, [run])
        return tensors

    def text(self, name: str) -> bytes:
        """Read a small file of the source, such as ``config.json``.

        Raises:
            CheckpointFormatError: If it is not what was written.
        """
        file = self.path / name
        text = read_small(file, MAX_AUXILIARY_NUM_BYTES)
        require_digest(file, self.manifest.files[name], sha256(text))
        return text

    def read_into(self, host: HostStore, first: int = 0) -> None:
        """Fill the slabs of ``host`` with those of the store from ``first`` on.

        Raises:
            CheckpointFormatError: If a read fails, or a slab is not what was written, by name.
        """
        starts = slab_offsets(self.layouts)
        runs = [
            Run(
                self.data_offset + starts[index],
                [slab.padded],
                self.manifest.slab_digests[index],
                slab_name(index),
            )
            for index, slab in enumerate(host.slabs, first)
        ]
        read_checked(self._files[0], self.slabs, runs)

    @property
    def origin(self) -> Origin:
        """The checkpoint that it was made from.

        Raises:
            CheckpointFormatError: If the manifest says nothing that makes sense.
        """
        about = self.manifest.about
        place = about.get(PLACE)
        record = {
            **(place if isinstance(place, dict) else {}),
            "fingerprint": about.get("source"),
            "seen": about.get("source_seen"),
            "store": str(self.path),
        }
        return Origin.of(record, f"{shown(self.path)}: {PLACE}")

    def require_source(self, fingerprint: str) -> None:
        """Raise ``CheckpointFormatError`` unless the store was made from that checkpoint."""
        source = self.manifest.about.get("source")
        if source != fingerprint:
            raise defect(
                self.path,
                f"expected a store of the checkpoint {fingerprint}, found one of {quoted(source)}",
                remedy="open it without a source, or write a store of this checkpoint elsewhere",
            )

    def verify(self) -> None:
        """Read every byte and compare its digest with the manifest; nothing is kept.

        Raises:
            CheckpointFormatError: At the first slab or file that differs, by name.
        """
        self.rest()
        self.verify_slabs()

    def verify_slabs(self, first: int = 0) -> None:
        """``verify`` for the slabs from ``first`` on alone, one after the other."""
        for index in range(first, len(self.layouts)):
            self.read_into(HostStore.allocate(self.layouts[index : index + 1]), index)


def is_store(directory: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a store, sound or not, by the names of its files."""
    try:
        return any((Path(directory) / name).exists() for name in (SLABS, REST))
    except (OSError, ValueError):  # an endless name, a null in it: no store in any case
        return False


@contextmanager
def open_store(directory: str | os.PathLike[str]) -> Iterator[OpenStore]:
    """Open a store for the body, and check it: manifest, names, forms and sizes, small files.

    Args:
        directory: What ``StoreWriter.commit`` returned.

    Raises:
        CheckpointFormatError: If anything is not as it was written.
    """
    path = Path(directory).absolute()
    if path.name.endswith(PARTIAL):
        raise defect(
            path,
            "expected a store, found one that was not finished",
            remedy="remove it if it is old",
        )
    if not is_store(path):
        raise defect(
            path,
            f"expected a store (a folder with {SLABS} and {REST}), found {_what(path)}",
            remedy="make one of a checkpoint with `poros load CHECKPOINT --out DIR`",
        )
    with ExitStack() as undo:
        rest, _ = undo.enter_context(open_regular(path / REST))
        header = read_header(rest, path / REST)
        manifest = read_manifest(header)
        slabs, status = undo.enter_context(open_regular(path / SLABS))
        written = slabs_header(manifest.layouts)
        expected, found = len(written) + slabs_num_bytes(manifest.layouts), status.st_size
        if found != expected:
            raise defect(path / SLABS, f"expected {expected} bytes, found {found}", remedy=REMEDY)
        if read_at(slabs, len(written), 0, path / SLABS) != written:
            raise defect(
                path / SLABS,
                "expected the slabs of the manifest, found another header",
                remedy=REMEDY,
            )
        opened = OpenStore(
            path,
            manifest,
            len(written),
            identity_of(status),
            header,
            (slabs, rest),
        )
        for name in manifest.files:
            opened.text(name)
        yield opened


def read_checked(descriptor: int, file: Path, runs: Sequence[Run]) -> None:
    """Fill the parts of all runs with several threads, so that the disk is the limit.

    Raises:
        CheckpointFormatError: If a read fails, or a run is not what it has to be.
    """

    def read_piece(piece: list[memoryview], offset: int) -> bytes:
        for view in piece:
            fill(descriptor, view, offset, file, remedy=REMEDY)
            offset += len(view)
        return hash_piece(piece)

    # While some wait for the disk, the others hash.
    pool = ThreadPoolExecutor(2 * num_threads(), "poros-reading")
    try:
        submitted = [
            [
                pool.submit(read_piece, piece, run.offset + number * PIECE_NUM_BYTES)
                for number, piece in enumerate(cut(run.parts))
            ]
            for run in runs
        ]
        for run, pieces in zip(runs, submitted, strict=True):
            found = join(piece.result() for piece in pieces)
            require_digest(file, run.digest, found, run.name)
    finally:
        pool.shutdown(cancel_futures=True)


def require_digest(file: Path, expected: str, found: str, name: str | None = None) -> None:
    """Refuse bytes whose digest differs from the one they were written with.

    Raises:
        CheckpointFormatError: With file and name.
    """
    if expected != found:
        raise defect(
            file,
            f"expected digest {quoted(expected, is_bare=True)}, found {found}: bytes changed "
            "since it was written",
            tensor=name,
            remedy=REMEDY,
        )


def _what(path: Path) -> str:
    """Describe what is there instead of a store."""
    if not os.path.lexists(path):
        return "nothing there"
    if not path.is_dir():
        return "a file"
    return "a checkpoint" if (path / "config.json").exists() else "another folder"
