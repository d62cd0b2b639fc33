"""A quantized base on disk, to be opened again without reading the checkpoint or quantizing.

A store is a folder:

    manifest.json       what the other files must be, with a SHA-256 of itself
    slabs.safetensors   one uint8 tensor per decoder layer: its slab, on a page of the file
    rest.safetensors    every other tensor of the model by name, and the small constants
    config.json, ...    the source's own small files: settings, tokenizer, licence

The data of ``slabs.safetensors`` are the bytes of the host store, page by page (see "Layers start
on pages" in ``poros.layout``): they are read into memory, or mapped, without being looked at.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from poros.errors import quoted
from poros.host import HostStore
from poros.layout import PAGE_NUM_BYTES, BlockLayout, align, slab_offsets
from poros.loaders.header import defect, open_regular, read_at
from poros.loaders.limits import Limits
from poros.loaders.manifest import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    REST,
    SLABS,
    Manifest,
    as_bytes,
    data_num_bytes,
    describe_rest,
    read_manifest,
    sha256,
    slab_name,
    slabs_header,
)
from poros.loaders.shard import Shard

_PIECE_NUM_BYTES = 16 * 2**20
_REMEDY = "write the store again"


@dataclass
class OpenStore:
    """A store on disk that has been checked. A context manager; tensors given out stay valid."""

    path: Path
    """Its folder."""
    manifest: Manifest
    """What it says of itself; ``manifest.about`` is what its writer was given."""
    data_offset: int
    """Where in the file ``slabs`` the first slab starts, in bytes."""
    _rest: Shard | None
    _limits: Limits

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """One per decoder layer."""
        return self.manifest.layouts

    @property
    def slabs(self) -> Path:
        """The file of the slabs."""
        return self.path / SLABS

    def rest(self) -> dict[str, torch.Tensor]:
        """Every tensor that is in no slab, by name: views of the file, not copies."""
        if self._rest is None:
            raise defect(self.path, "expected an open store, found a closed one", remedy="open it")
        return {name: self._rest.tensor(each) for name, each in self._rest.header.tensors.items()}

    def text(self, name: str) -> bytes:
        """A small file of the source, such as ``config.json``.

        Raises:
            CheckpointFormatError: If it is not what was written.
        """
        file = self.path / name
        text = self._limits.read(file, "extra_num_bytes")
        _require_digest(file, self.manifest.files[name], sha256([text]))
        return text

    def read_into(self, host: HostStore) -> None:
        """Fill the slabs of ``host``, which are the first ones of the store or all of them.

        Reads large pieces with several threads, so that the disk is the limit and not the copy.

        Raises:
            CheckpointFormatError: If a read fails.
        """
        descriptor, _ = open_regular(self.slabs)

        def read(job: tuple[torch.Tensor, int]) -> None:
            read_into(descriptor, as_bytes(job[0]), job[1], self.slabs)

        starts = [self.data_offset + each for each in slab_offsets(self.layouts)]
        jobs = [
            (slab.bytes[begin : begin + _PIECE_NUM_BYTES], start + begin)
            for slab, start in zip(host.slabs, starts, strict=False)
            for begin in range(0, slab.layout.num_bytes, _PIECE_NUM_BYTES)
        ]
        try:
            with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
                list(pool.map(read, jobs))
        finally:
            os.close(descriptor)

    def require_source(self, fingerprint: str) -> None:
        """Raise ``CheckpointFormatError`` unless the store was made from that checkpoint."""
        found = self.manifest.about.get("source")
        if found != fingerprint:
            raise defect(
                self.path / MANIFEST,
                f"expected a store of the checkpoint {fingerprint}, found one of {quoted(found)}",
                remedy="open it without a source, or write a store of this checkpoint elsewhere",
            )

    def verify(self) -> None:
        """Read every byte and compare its SHA-256 with the manifest.

        Raises:
            CheckpointFormatError: At the first slab or file that differs, by name.
        """
        rest = self.path / REST
        _require_digest(rest, self.manifest.rest_sha256, sha256(_contents(rest, 0, _size(rest))))
        starts = [self.data_offset + each for each in slab_offsets(self.layouts)]
        sizes = [align(each.num_bytes, PAGE_NUM_BYTES) for each in self.layouts]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(
                lambda start, size: sha256(_contents(self.slabs, start, size)), starts, sizes
            )
            for index, (digest, each) in enumerate(
                zip(found, self.manifest.slab_sha256, strict=True)
            ):
                _require_digest(self.slabs, each, digest, tensor=slab_name(index))

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._rest = None

    def __enter__(self) -> "OpenStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
        for _ in range(-(-Limits().manifest_num_bytes // _PIECE_NUM_BYTES)):
            piece = stream.read(_PIECE_NUM_BYTES)
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
        verify: Also read every byte and compare its SHA-256.
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
    header = slabs_header(manifest.layouts)
    slabs = path / SLABS
    expected, found = len(header) + data_num_bytes(manifest.layouts), _size(slabs)
    if found != expected:
        raise defect(slabs, f"expected {expected} bytes, found {found}", remedy=_REMEDY)
    if b"".join(_contents(slabs, 0, len(header))) != header:
        raise defect(
            slabs, "expected the slabs of the manifest, found another header", remedy=_REMEDY
        )
    rest = Shard.open(path / REST)
    forms = describe_rest({name: rest.tensor(each) for name, each in rest.header.tensors.items()})
    if forms != dict(manifest.rest):
        name = next(iter(set(forms.items()) ^ set(manifest.rest.items())))[0]
        raise defect(
            path / REST, "expected the tensors of the manifest", tensor=name, remedy=_REMEDY
        )
    opened = OpenStore(path, manifest, len(header), rest, limits)
    try:
        for name in manifest.files:
            opened.text(name)
        if verify:
            opened.verify()
    except BaseException:
        opened.close()
        raise
    return opened


def _what(path: Path) -> str:
    """What lies where a store was expected."""
    if not os.path.lexists(path):
        return "nothing there"
    if not path.is_dir():
        return "a file"
    return "a checkpoint" if (path / "config.json").exists() else "another folder"


def read_into(descriptor: int, target: memoryview, offset: int, file: Path) -> None:
    """Fill ``target`` from ``offset`` of an open file.

    Raises:
        CheckpointFormatError: If the system reports an error or the file ends too early.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise defect(
                file,
                f"expected to read {len(target) - done} bytes at {offset + done}, found: "
                f"{error.strerror}",
                remedy="check the disk, or write the store again",
            ) from error
        if not count:
            raise defect(
                file,
                f"expected {len(target) - done} more bytes at {offset + done}, found the end",
                remedy=_REMEDY,
            )
        done += count


def _require_digest(file: Path, expected: str, found: str, tensor: str | None = None) -> None:
    if expected != found:
        raise defect(
            file,
            f"expected SHA-256 {quoted(expected, is_bare=True)}, found {found}: bytes changed "
            "since it was written",
            tensor=tensor,
            remedy=_REMEDY,
        )


def _contents(file: Path, offset: int, num_bytes: int) -> Iterator[bytes]:
    descriptor, _ = open_regular(file)
    try:
        for begin in range(offset, offset + num_bytes, _PIECE_NUM_BYTES):
            yield read_at(
                descriptor, min(_PIECE_NUM_BYTES, offset + num_bytes - begin), begin, file
            )
    finally:
        os.close(descriptor)


def _size(file: Path) -> int:
    descriptor, status = open_regular(file)
    os.close(descriptor)
    return status.st_size
