"""Opens a quantized base on disk (a store) without the checkpoint and without quantizing.

A store is a folder:

    slabs.bin           the slab of each decoder layer, one after the other, each to the end of its
                        last page (see "Layers start on pages" in ``poros.host.layout``)
    rest.safetensors    every other tensor of the model by name, and the small constants; in its
                        metadata the manifest, with the digests of everything, and its own SHA-256
    config.json, ...    the source's own small files: settings, tokenizer, licence

The bytes of ``slabs.bin`` are those of the host store: they are read into memory, or mapped,
without being parsed.

Note: Nothing is used that was not checked
    Whatever is read is hashed and compared with the manifest, and so are slabs that stay in the
    file (``poros.host.disk``). A file that the manifest does not name is not looked at.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from poros.errors import quoted
from poros.host.layout import BlockLayout, TensorSpec
from poros.host.store import HostStore
from poros.io.digests import Identity, as_bytes, identity_of, num_threads, sha256
from poros.loaders.checkpoint import new_bytes
from poros.loaders.header import (
    DTYPE_NAMES,
    Header,
    TensorEntry,
    defect,
    fill_and_hash,
    open_regular,
    pieces,
    read_header,
    scratch,
)
from poros.loaders.source import MAX_AUXILIARY_NUM_BYTES, is_auxiliary_file, read_small
from poros.model.origin import Origin

SLABS, REST = "slabs.bin", "rest.safetensors"

FORMAT, VERSION = "poros store", "6"

REMEDY = "write the store again (poros load CHECKPOINT --out DIR)"

Form = tuple[str, list[int]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True, kw_only=True)
class About:
    """How a store was made."""

    origin: Origin
    """The checkpoint that it was made from."""
    quantization: dict[str, Any] | None
    """A ``BitsAndBytesConfig``."""
    is_prequantized: bool
    """Whether the checkpoint was in 4 bit already."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"]
    """That of the tensors that are not quantized."""
    vision: Literal["keep", "drop"]
    auto_class: Literal["AutoModel", "AutoModelForSequenceClassification"] | None
    num_labels: int | None
    dense: list[str]
    """Names of the tensors that are not quantized."""
    weights: dict[str, tuple[Literal["float16", "bfloat16", "float32"], int]]
    """Dtype and block size of each 4-bit weight."""
    versions: dict[str, str]
    device: str
    num_threads: int


@dataclass(frozen=True)
class Manifest:
    """The expected contents of a store's files."""

    layouts: list[list[tuple[str, Form]]]
    """Of each decoder layer the tensors in its slab, in order."""
    slabs: list[tuple[Annotated[int, Field(ge=0)], str]]
    """Bytes and digest of each slab."""
    rest: dict[str, tuple[Form, str]]
    """Form and digest of each tensor that is in no slab."""
    files: dict[str, str]
    """SHA-256 of the small files of the source, by name."""
    about: About


class _Read(NamedTuple):
    """Bytes to read from a file, and their digest."""

    targets: Iterable[memoryview]
    offset: int
    digest: str
    name: str


@dataclass(frozen=True)
class OpenStore:
    """An open store whose files fit its manifest; tensors outlive it."""

    path: Path
    """Its folder."""
    manifest: Manifest
    identity: Identity
    """Identity of the file ``slabs`` when it was opened."""
    _header: Header
    """The header of ``rest.safetensors``."""
    _files: tuple[int, int]
    """Descriptors of slabs and rest."""

    @property
    def about(self) -> About:
        return self.manifest.about

    @property
    def slabs(self) -> Path:
        return self.path / SLABS

    @property
    def starts(self) -> list[int]:
        """Offset of each slab in its file, and the end of the last."""
        return list(accumulate((size for size, _ in self.manifest.slabs), initial=0))

    @property
    def origin(self) -> Origin:
        """The checkpoint that it was made from, and this store."""
        return replace(self.about.origin, store=str(self.path))

    def rest(self) -> dict[str, torch.Tensor]:
        """Read every tensor that is in no slab, by name."""
        entries, digests = self._header.tensors, self.manifest.rest
        flat = {name: new_bytes(entry.num_bytes) for name, entry in entries.items()}
        self._read(
            REST,
            [
                _Read(pieces(as_bytes(flat[name])), entry.offset, digests[name][1], name)
                for name, entry in entries.items()
            ],
        )
        for name, entry in entries.items():
            flat[name] = flat[name].view(entry.dtype).view(entry.shape)
        return flat

    def text(self, name: str) -> bytes:
        """Read a small file of the source, such as ``config.json``."""
        text = read_small(self.path / name, MAX_AUXILIARY_NUM_BYTES)
        _require_digest(self.path / name, self.manifest.files[name], sha256(text))
        return text

    def read_into(self, host: HostStore) -> None:
        """Fill the slabs of ``host`` with the first ones of the store."""
        self._read_slabs(0, [pieces(slab.padded) for slab in host.slabs])

    def verify(self) -> None:
        """Read every byte and compare its digest with the manifest; nothing is kept."""
        self.rest()
        self.verify_slabs()

    def verify_slabs(self, first: int = 0) -> None:
        """``verify`` for the slabs from ``first`` on alone."""
        self._read_slabs(first, [scratch(size) for size, _ in self.manifest.slabs[first:]])

    def _read_slabs(self, first: int, targets: Sequence[Iterable[memoryview]]) -> None:
        digests = [digest for _, digest in self.manifest.slabs]
        self._read(
            SLABS,
            [
                _Read(each, self.starts[index], digests[index], f"slab {index}")
                for index, each in enumerate(targets, first)
            ],
        )

    def _read(self, name: str, reads: Sequence[_Read]) -> None:
        """Do all reads in several threads, so that the disk is the limit."""
        descriptor, file = self._files[name == REST], self.path / name

        def read(each: _Read) -> None:
            found = fill_and_hash(descriptor, each.targets, each.offset, file, remedy=REMEDY)
            _require_digest(file, each.digest, found, each.name)

        # While some wait for the disk, the others hash.
        pool = ThreadPoolExecutor(2 * num_threads(), "poros-reading")
        try:
            list(pool.map(read, reads))
        finally:
            pool.shutdown(cancel_futures=True)


def form_of(tensor: torch.Tensor | TensorEntry | TensorSpec) -> Form:
    """Return the form of a tensor as a manifest says it."""
    return DTYPE_NAMES[tensor.dtype], list(tensor.shape)


def forms_of(layouts: Sequence[BlockLayout]) -> list[list[tuple[str, Form]]]:
    """Return what a manifest says of layouts."""
    return [[(spec.name, form_of(spec)) for spec in layout.tensors] for layout in layouts]


def is_store(directory: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a store, sound or not, by the names of its files."""
    try:
        return any((Path(directory) / name).exists() for name in (SLABS, REST))
    except (OSError, ValueError):  # an endless name, a null in it: no store in any case
        return False


@contextmanager
def open_store(directory: str | os.PathLike[str]) -> Iterator[OpenStore]:
    """Open a store for the body, and check it: manifest, names and sizes, small files.

    Args:
        directory: What ``StoreWriter.commit`` returned.
    """
    path = Path(directory).absolute()
    if not is_store(path):
        raise defect(
            path,
            f"expected a store (a folder with {SLABS} and {REST}), found none there",
            remedy="make one of a checkpoint with `poros load CHECKPOINT --out DIR`",
        )
    with ExitStack() as undo:
        rest, _ = undo.enter_context(open_regular(path / REST))
        header = read_header(rest, path / REST)
        manifest = _read_manifest(header)
        slabs, status = undo.enter_context(open_regular(path / SLABS))
        opened = OpenStore(path, manifest, identity_of(status), header, (slabs, rest))
        if status.st_size != opened.starts[-1]:
            raise defect(
                path / SLABS,
                f"expected {opened.starts[-1]} bytes, found {status.st_size}",
                remedy=REMEDY,
            )
        for name in manifest.files:
            opened.text(name)
        yield opened


def _read_manifest(header: Header) -> Manifest:
    """Parse the manifest in the header of ``rest.safetensors``."""
    file, metadata = header.file, header.metadata
    found = (metadata.get("format"), metadata.get("version"))
    if found != (FORMAT, VERSION):
        raise defect(
            file,
            f"expected {FORMAT!r} of version {VERSION}, found {quoted(found[0])} of version "
            f"{quoted(found[1])}, made by another release or by no Poros",
            remedy=REMEDY,
        )
    text = metadata.get("store", "")
    if metadata.get("sha256") != sha256(text.encode()):
        raise defect(
            file, "expected the manifest that was written, found it changed since", remedy=REMEDY
        )
    try:
        manifest = TypeAdapter(Manifest).validate_json(text)
    except ValidationError as error:
        raise defect(
            file,
            f"expected a manifest that makes sense, found {quoted(str(error))}",
            remedy=REMEDY,
        ) from error
    # Of folders only the one that extras may have; nothing here leads out of the store.
    wrong = [name for name in manifest.files if not _is_inside(name)]
    forms = {name: form_of(entry) for name, entry in header.tensors.items()}
    if forms != {name: form for name, (form, _) in manifest.rest.items()}:
        wrong = sorted(forms)
    if wrong or len(manifest.layouts) != len(manifest.slabs):
        raise defect(
            file,
            f"expected a manifest of its slabs, tensors and files, found others: {quoted(wrong)}",
            remedy=REMEDY,
        )
    return manifest


def _is_inside(name: str) -> bool:
    is_plain = Path(name).name == name and name not in ("", ".", "..")
    return is_plain or is_auxiliary_file(name)


def _require_digest(file: Path, expected: str, found: str, name: str | None = None) -> None:
    """Refuse bytes whose digest differs from the one they were written with."""
    if expected != found:
        raise defect(
            file,
            f"expected digest {quoted(expected, is_bare=True)}, found {found}: bytes changed "
            "since it was written",
            tensor=name,
            remedy=REMEDY,
        )
