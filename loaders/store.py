"""A quantized base on disk, to be opened again without reading the checkpoint or quantizing.

A store is a folder:

    manifest.json       what the other files must be, with a SHA-256 of itself
    slabs.safetensors   one uint8 tensor per decoder layer: its slab, on a page of the file
    rest.safetensors    every other tensor of the model by name, and the small constants
    config.json, ...    the source's own small files: settings, tokenizer, licence

The data of ``slabs.safetensors`` are the bytes of the host store, page by page (see "Layers start
on pages" in ``poros.layout``): they are read into memory, or mapped, without being looked at.

Note: Nothing is used that was not checked
    Whatever is read is hashed meanwhile (``poros.loaders.checked_reader``), and ``OpenStore.check``
    compares it with the manifest before the model is given out. What happens to 4-bit weights in
    memory after that, ``poros.prepare`` sees by the digests of their parts. Slabs that stay in the
    file are hashed when they are first read (``poros.host.disk``). A file that the manifest does
    not name is not looked at.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from poros.digests import PIECE_NUM_BYTES, Identity, as_bytes, hash_piece, identity_of, join, sha256
from poros.errors import quoted
from poros.host.store import HostStore
from poros.layout import BlockLayout, slab_offsets
from poros.loaders.checked_reader import CheckedReader, Run, new_bytes, require_digest
from poros.loaders.header import Header, defect, open_regular, read_at, read_buffer, read_header
from poros.loaders.limits import Limits
from poros.loaders.manifest import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    REMEDY,
    REST,
    SLABS,
    Manifest,
    data_num_bytes,
    describe_rest,
    padding,
    read_manifest,
    slab_name,
    slabs_header,
)


@dataclass
class OpenStore:
    """A store on disk whose files fit its manifest. A context manager; what it gave out stays."""

    path: Path
    """Its folder."""
    manifest: Manifest
    """What it says of itself; ``manifest.about`` is what its writer was given."""
    data_offset: int
    """Where in the file ``slabs`` the first slab starts, in bytes."""
    identity: Identity
    """What the file ``slabs`` was when it was opened."""
    _header: Header
    """Of the rest."""
    _files: tuple[int, int] | None
    """Descriptors of slabs and rest."""
    _undo: ExitStack
    _limits: Limits
    _reader: CheckedReader | None = field(default=None, init=False)

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """One per decoder layer."""
        return self.manifest.layouts

    @property
    def slabs(self) -> Path:
        """The file of the slabs."""
        return self.path / SLABS

    def rest(self) -> dict[str, torch.Tensor]:
        """Read every tensor that is in no slab, by name. Checked by ``check``.

        Raises:
            CheckpointFormatError: If a read fails, or the store is closed.
        """
        _, descriptor = self._require_open()
        file, entries = self.path / REST, self._header.tensors
        tensors = {
            name: new_bytes(entry.num_bytes).view(entry.dtype).view(entry.shape)
            for name, entry in entries.items()
        }
        header = memoryview(bytearray(self._header.data_offset))
        parts = [header, *map(as_bytes, tensors.values())]
        self._reading().read(descriptor, file, [Run(0, parts, self.manifest.rest_digest)])
        return tensors

    def text(self, name: str) -> bytes:
        """A small file of the source, such as ``config.json``.

        Raises:
            CheckpointFormatError: If it is not what was written.
        """
        file = self.path / name
        text = self._limits.read(file, "extra_num_bytes")
        require_digest(file, self.manifest.files[name], sha256(text))
        return text

    def read_into(self, host: HostStore) -> None:
        """Fill the slabs of ``host``, which are the first ones of the store or all of them.

        Reads pieces with several threads, so that the disk is the limit and not the copy. Checked
        by ``check``.

        Raises:
            CheckpointFormatError: If a read fails, or the store is closed.
        """
        descriptor, _ = self._require_open()
        runs = [
            Run(
                self.data_offset + start,
                [as_bytes(slab.bytes), padding(slab.layout)],
                digest,
                slab_name(index),
            )
            for index, (slab, start, digest) in enumerate(
                zip(
                    host.slabs,
                    slab_offsets(self.layouts),
                    self.manifest.slab_digests,
                    strict=False,
                )
            )
        ]
        self._reading().read(descriptor, self.slabs, runs)

    def check(self) -> None:
        """Compare all that ``rest`` and ``read_into`` have read with the manifest.

        Raises:
            CheckpointFormatError: At the first slab or file that differs, by name.
        """
        if self._reader is not None:
            self._reader.check()

    def require_source(self, fingerprint: str) -> None:
        """Raise ``CheckpointFormatError`` unless the store was made from that checkpoint."""
        source = self.manifest.about.get("source")
        if source != fingerprint:
            raise defect(
                self.path / MANIFEST,
                f"expected a store of the checkpoint {fingerprint}, found one of {quoted(source)}",
                remedy="open it without a source, or write a store of this checkpoint elsewhere",
            )

    def verify(self) -> None:
        """Read every byte and compare its digest with the manifest; nothing is kept.

        Raises:
            CheckpointFormatError: At the first slab or file that differs, by name.
        """
        slabs, rest = self._require_open()
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:

            def digest(descriptor: int, file: Path, start: int, size: int) -> str:
                def hash_at(offset: int) -> bytes:
                    num_bytes = min(PIECE_NUM_BYTES, start + size - offset)
                    return hash_piece([read_buffer(descriptor, num_bytes, offset, file)])

                return join(pool.map(hash_at, range(start, start + size, PIECE_NUM_BYTES)))

            file = self.path / REST
            actual = digest(rest, file, 0, os.fstat(rest).st_size)
            require_digest(file, self.manifest.rest_digest, actual)
            for index, (start, layout, expected) in enumerate(
                zip(
                    slab_offsets(self.layouts),
                    self.layouts,
                    self.manifest.slab_digests,
                    strict=True,
                )
            ):
                size = layout.padded_num_bytes
                actual = digest(slabs, self.slabs, self.data_offset + start, size)
                require_digest(self.slabs, expected, actual, slab_name(index))

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._files = None
        if self._reader is not None:
            self._reader.close()
        self._undo.close()

    def __enter__(self) -> "OpenStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> tuple[int, int]:
        if self._files is None:
            raise defect(self.path, "expected an open store, found a closed one", remedy="open it")
        return self._files

    def _reading(self) -> CheckedReader:
        if self._reader is None:
            self._reader = CheckedReader()
        return self._reader


def is_store(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a store in the folder, sound or not.

    It is known by the mark of its format in the manifest, for other programs have files of that
    name too; a manifest that is damaged, by the slabs beside it.
    """
    folder = Path(directory)
    try:
        if (folder / SLABS).exists():
            return True
        file = folder / MANIFEST
        return file.is_file() and _has_mark(file)
    except (OSError, ValueError):  # an endless name, a null in it: no store in any case
        return False


def _has_mark(file: Path) -> bool:
    """Whether a manifest names the format. Reads no more than a manifest may be long."""
    mark = json.dumps(FORMAT).encode()
    end = b""
    with file.open("rb") as stream:
        for _ in range(-(-Limits().manifest_num_bytes // PIECE_NUM_BYTES)):
            piece = stream.read(PIECE_NUM_BYTES)
            if mark in end + piece:
                return True
            if not piece:
                return False
            end = piece[-len(mark) :]
    return False


def open_store(
    directory: str | os.PathLike[str], *, verify: bool = False, limits: Limits | None = None
) -> OpenStore:
    """Open a store and check it: the manifest, all names, forms and sizes, the small files.

    Args:
        directory: What ``StoreWriter.commit`` returned.
        verify: Also read every byte and compare its digest.
        limits: On what its files may ask for; None are the defaults.

    Raises:
        CheckpointFormatError: If anything is not as it was written; nothing is left open.
    """
    limits = limits or Limits()
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
            f"expected a store (a folder with {SLABS} and a {MANIFEST} of the format {FORMAT!r}), "
            f"found {_what(path)}",
            remedy="make one of a checkpoint with `poros load CHECKPOINT --out DIR`",
        )
    manifest = read_manifest(path / MANIFEST, limits)
    with ExitStack() as undo:
        slabs, status = open_regular(path / SLABS)
        undo.callback(os.close, slabs)
        header = slabs_header(manifest.layouts)
        expected, found = len(header) + data_num_bytes(manifest.layouts), status.st_size
        if found != expected:
            raise defect(path / SLABS, f"expected {expected} bytes, found {found}", remedy=REMEDY)
        if read_at(slabs, len(header), 0, path / SLABS) != header:
            raise defect(
                path / SLABS,
                "expected the slabs of the manifest, found another header",
                remedy=REMEDY,
            )
        rest, _ = open_regular(path / REST)
        undo.callback(os.close, rest)
        rest_header = read_header(rest, path / REST)
        forms = describe_rest(rest_header.tensors)
        if forms != dict(manifest.rest):
            name = next(iter(set(forms.items()) ^ set(manifest.rest.items())))[0]
            raise defect(
                path / REST, "expected the tensors of the manifest", tensor=name, remedy=REMEDY
            )
        opened = OpenStore(
            path,
            manifest,
            len(header),
            identity_of(status),
            rest_header,
            (slabs, rest),
            undo,
            limits,
        )
        for name in manifest.files:
            opened.text(name)
        if verify:
            opened.verify()
        opened._undo = undo.pop_all()
    return opened


def _what(path: Path) -> str:
    """What lies where a store was expected."""
    if not os.path.lexists(path):
        return "nothing there"
    if not path.is_dir():
        return "a file"
    return "a checkpoint" if (path / "config.json").exists() else "another folder"
