"""The manifest of a store: layout and digest of each slab, and how the store was made.

It is in the metadata of ``rest.safetensors``, with a SHA-256 of the whole header, which detects
every changed bit. Its values are checked all the same before anything is allocated by them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from poros.errors import quoted
from poros.host.layout import PAGE_NUM_BYTES, BlockLayout, align
from poros.io.digests import sha256
from poros.loaders.auxiliary_files import is_auxiliary_file
from poros.loaders.header import DTYPE_NAMES, DTYPES, Header, TensorEntry, defect, parse_json

SLABS, REST = "slabs.safetensors", "rest.safetensors"

FORMAT, VERSION = "poros store", "5"

REMEDY = "write the store again (poros load CHECKPOINT --out DIR)"

Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of a file."""


@dataclass(frozen=True)
class Manifest:
    """The expected contents of a store's files."""

    layouts: Sequence[BlockLayout]
    """One per decoder layer, as ``BlockLayout.pack`` lays out its tensors."""
    slab_digests: Sequence[str]
    """The digest (``poros.io.digests``) of each slab, padded with zeros to a page."""
    rest_digest: str
    """The digest of all tensors that are in no slab, in the order of their bytes in the file."""
    files: Mapping[str, str]
    """SHA-256 of the small files of the source, by name."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How the store was made: source fingerprint, quantization, versions, device, threads."""


def rest_header(manifest: Manifest, rest: Mapping[str, torch.Tensor]) -> bytes:
    """Make the header of ``rest.safetensors``, with the manifest in it.

    Raises:
        ValueError: If ``about`` is not plain JSON.
    """
    layouts = [
        [[spec.name, DTYPE_NAMES[spec.dtype], spec.shape] for spec in layout.tensors]
        for layout in manifest.layouts
    ]
    store = json.dumps(vars(manifest) | {"layouts": layouts}, allow_nan=False)
    return sealed_header(forms_of(rest), {"format": FORMAT, "version": VERSION, "store": store})


def sealed_header(forms: Forms, metadata: Mapping[str, str]) -> bytes:
    """Return a header with the SHA-256 of its contents in its metadata."""
    return safetensors_header(forms, {**metadata, "sha256": _seal(forms, metadata)})


def read_manifest(header: Header) -> Manifest:
    """Parse the manifest in the header of ``rest.safetensors``.

    Raises:
        CheckpointFormatError: If there is none, it is of another version, was changed, or
            contradicts itself.
    """
    file, metadata = header.file, dict(header.metadata)
    found = (metadata.get("format"), metadata.get("version"))
    if found != (FORMAT, VERSION):
        raise defect(
            file,
            f"expected {FORMAT!r} of version {VERSION}, found {quoted(found[0])} of version "
            f"{quoted(found[1])}, made by another release or by no Poros",
            remedy=REMEDY,
        )
    if metadata.pop("sha256", None) != _seal(forms_of(header.tensors), metadata):
        raise defect(
            file, "expected the header that was written, found it changed since", remedy=REMEDY
        )
    try:
        return _parse(metadata["store"].encode(), file)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise defect(
            file,
            f"expected a manifest that makes sense, found {quoted(str(error))}",
            remedy=REMEDY,
        ) from error


def safetensors_header(
    forms: Forms, metadata: Mapping[str, str] | None = None, *, to: int = 8
) -> bytes:
    """Make a safetensors header, padded so that the data start on a multiple of ``to`` bytes.

    Args:
        forms: Dtypes and shapes, in the order of the tensors' bytes.
        to: A multiple of 8.
    """
    named = {"__metadata__": dict(metadata)} if metadata else {}
    text = json.dumps(named | _entries(forms), separators=(",", ":")).encode()
    length = align(8 + len(text), to) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def slabs_header(layouts: Sequence[BlockLayout]) -> bytes:
    """Make the header of ``slabs.safetensors``; the first slab follows it, on a page."""
    forms = {
        slab_name(index): (torch.uint8, (layout.padded_num_bytes,))
        for index, layout in enumerate(layouts)
    }
    return safetensors_header(forms, to=PAGE_NUM_BYTES)


def slab_name(index: int) -> str:
    """Name a layer's slab in ``slabs.safetensors``."""
    return f"slab.{index:05d}"


def forms_of(tensors: Mapping[str, torch.Tensor] | Mapping[str, TensorEntry]) -> Forms:
    """Return the dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _entries(forms: Forms) -> dict[str, Any]:
    entries, end = {}, 0
    for name, (dtype, shape) in forms.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    return entries


def _seal(forms: Forms, metadata: Mapping[str, str]) -> str:
    return sha256(json.dumps([_entries(forms), metadata], sort_keys=True).encode())


def _parse(text: bytes, file: Path) -> Manifest:
    store = parse_json(text, file)
    for name in store["files"]:
        # Of folders only the one that extras may have; nothing here leads out of the store.
        if not is_auxiliary_file(name) and (Path(name).name != name or name in ("", ".", "..")):
            raise ValueError(f"a file called {name!r}")
    digests = [*store["slab_digests"], store["rest_digest"], *store["files"].values()]
    if not all(isinstance(digest, str) for digest in digests):
        raise TypeError("a digest that is no text")
    layouts = [_layout(tensors) for tensors in store["layouts"]]
    if len(store["slab_digests"]) != len(layouts):
        raise ValueError("a digest less, or more, than slabs")
    if not isinstance(store["about"], dict):
        raise TypeError("no description")
    return Manifest(**store | {"layouts": layouts})


def _layout(tensors: Any) -> BlockLayout:
    parts = []
    for name, dtype, shape in tensors:
        if not isinstance(name, str) or not all(type(size) is int for size in shape):
            raise TypeError(f"the tensor {name!r} of shape {shape!r}")
        # torch refuses sizes that cannot be.
        parts.append((name, torch.empty(shape, dtype=DTYPES[dtype], device="meta")))
    return BlockLayout.pack(parts)
