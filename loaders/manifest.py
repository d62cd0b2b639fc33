"""What a store says of itself: the layout and digest of each slab, and who made it from what.

A manifest is a JSON object with a SHA-256 of its own text, so no bit of it can change unseen. What
it says is checked all the same before anything is sized or placed by it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from poros.digests import sha256
from poros.errors import quoted
from poros.layout import PAGE_NUM_BYTES, BlockLayout, TensorSpec, align
from poros.loaders.extras import is_extra
from poros.loaders.header import DTYPE_NAMES, DTYPES, TensorEntry, defect, parse_json
from poros.loaders.limits import Limits

SLABS, REST, MANIFEST = "slabs.safetensors", "rest.safetensors", "manifest.json"

PARTIAL = ".partial"
"""How the name of a folder ends that somebody is still writing, or was when they were killed."""

FORMAT = "poros store"
VERSION = 3

_MAX_INT = 2**62

REMEDY = "write the store again"


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    layouts: Sequence[BlockLayout]
    """One per decoder layer."""
    slab_digests: Sequence[str]
    """The digest (``poros.digests``) of each slab, padded with zeros to a page."""
    rest: Mapping[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of each tensor that is in no slab."""
    rest_digest: str
    """The digest of the whole file."""
    files: Mapping[str, str]
    """SHA-256 of the small files of the source, by name."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the writer was told: source fingerprint, quantization, versions, device, threads."""

    def holds_the_same_as(self, other: "Manifest") -> bool:
        """Whether the bytes are the same, whoever made them."""
        return (*self._bytes(),) == (*other._bytes(),)

    def _bytes(self) -> Iterable[object]:
        return self.layouts, self.slab_digests, self.rest, self.rest_digest, self.files


def write_manifest(manifest: Manifest) -> bytes:
    """The text of ``manifest.json``.

    Raises:
        ValueError: If ``about`` is not plain JSON.
    """
    store = {
        "format": FORMAT,
        "version": VERSION,
        "slabs": [
            {
                "num_bytes": layout.num_bytes,
                "digest": digest,
                "tensors": [
                    [spec.name, DTYPE_NAMES[spec.dtype], list(spec.shape), spec.offset]
                    for spec in layout.tensors
                ],
            }
            for layout, digest in zip(manifest.layouts, manifest.slab_digests, strict=True)
        ],
        "rest": {name: [dtype, list(shape)] for name, (dtype, shape) in manifest.rest.items()},
        "rest_digest": manifest.rest_digest,
        "files": dict(manifest.files),
        "about": dict(manifest.about),
    }
    text = _canonical(store)
    return _canonical({"sha256": sha256(text), "store": store})


def read_manifest(file: Path, limits: Limits | None = None) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointFormatError: If it is not there, cut off, changed, of another version, or says
            what cannot be.
    """
    document = parse_json((limits or Limits()).read(file, "manifest_num_bytes"), file)
    store = document.get("store")
    if document.keys() != {"sha256", "store"} or not isinstance(store, dict):
        raise defect(file, "expected the manifest of a store, found other JSON", remedy=REMEDY)
    if store.get("format") != FORMAT or store.get("version") != VERSION:
        raise defect(
            file,
            f"expected {FORMAT!r} of version {VERSION}, found {quoted(store.get('format'))} of "
            f"version {quoted(store.get('version'))}",
            remedy="open it with the release of Poros that wrote it, or write it again",
        )
    if sha256(_canonical(store)) != document["sha256"]:
        raise defect(
            file, "expected the text that was written, found it changed since", remedy=REMEDY
        )
    try:
        return _parse(store)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise defect(
            file,
            f"expected a manifest that makes sense, found {quoted(str(error))}",
            remedy=REMEDY,
        ) from error


def describe_rest(
    rest: Mapping[str, torch.Tensor | TensorEntry],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor, as the manifest keeps them."""
    return {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in rest.items()}


def safetensors_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], *, to: int = 8
) -> bytes:
    """Length and text of a safetensors header, padded so that the data start on ``to`` bytes.

    Args:
        tensors: Dtype name, shape and size in bytes of each tensor, in the order of their bytes.
        to: A multiple of 8.
    """
    entries, end = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        offsets = [end, end + num_bytes]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        end += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = align(8 + len(text), to) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def slabs_header(layouts: Sequence[BlockLayout]) -> bytes:
    """The header of ``slabs.safetensors``; the first slab follows it, on a page."""
    sizes = [layout.padded_num_bytes for layout in layouts]
    return safetensors_header(
        {slab_name(index): ("U8", [size], size) for index, size in enumerate(sizes)},
        to=PAGE_NUM_BYTES,
    )


def rest_header(rest: Mapping[str, torch.Tensor]) -> bytes:
    """The header of ``rest.safetensors``."""
    return safetensors_header(
        {
            name: (DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.numel() * tensor.element_size())
            for name, tensor in rest.items()
        }
    )


def slab_name(index: int) -> str:
    """The name of a layer's slab in ``slabs.safetensors``."""
    return f"slab.{index:05d}"


def padding(layout: BlockLayout) -> memoryview:
    """The zeros behind a slab, up to the end of its last page."""
    return memoryview(bytearray(layout.padded_num_bytes - layout.num_bytes))


def data_num_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of all slabs, each padded to a page."""
    return sum(layout.padded_num_bytes for layout in layouts)


def _parse(store: dict[str, Any]) -> Manifest:
    expected = {"format", "version", "slabs", "rest", "rest_digest", "files", "about"}
    if store.keys() != expected:
        raise ValueError(f"the keys {sorted(store)}")
    layouts = [_layout(slab) for slab in store["slabs"]]
    names = [spec.name for layout in layouts for spec in layout.tensors]
    if len(set(names)) != len(names):
        raise ValueError("a tensor in two places")
    if data_num_bytes(layouts) > _MAX_INT:
        raise ValueError("more bytes than can be addressed")
    rest = {name: _form(*form) for name, form in store["rest"].items()}
    for name in store["files"]:
        # Of folders only the one that extras may have; nothing here leads out of the store.
        if not is_extra(name) and (Path(name).name != name or name in ("", ".", "..")):
            raise ValueError(f"a file called {name!r}")
    if not isinstance(store["about"], dict):
        raise TypeError("no description")
    return Manifest(
        layouts,
        [_text(slab["digest"]) for slab in store["slabs"]],
        {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in rest.items()},
        _text(store["rest_digest"]),
        {name: _text(digest) for name, digest in store["files"].items()},
        store["about"],
    )


def _layout(value: dict[str, Any]) -> BlockLayout:
    num_bytes = _size(value["num_bytes"])
    specs, end = [], 0
    for name, dtype, shape, offset in value["tensors"]:
        form, sizes = _form(dtype, shape)
        spec = TensorSpec(_text(name), sizes, form, offset=_size(offset))
        if spec.num_bytes:
            if spec.offset != align(spec.offset) or spec.offset < end:
                raise ValueError(f"{name!r} at {offset}, over its neighbour or not aligned")
            end = spec.offset + spec.num_bytes
        specs.append(spec)
    if end > num_bytes:
        raise ValueError(f"tensors up to {end} in a slab of {num_bytes}")
    return BlockLayout(tuple(specs), num_bytes)


def _form(dtype: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    sizes = tuple(_size(length) for length in shape)
    num_bytes = DTYPES[dtype].itemsize
    for size in sizes:
        num_bytes = _size(num_bytes * size)
    return DTYPES[dtype], sizes


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ValueError(f"the size {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} for a text")
    return value


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
