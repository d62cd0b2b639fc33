"""Reads the header of a safetensors file before any tensor is read.

safetensors itself reads and checks it: the tensors fill the file without a hole or an overlap. Only
their places are computed here, since it gives tensors through a mapping of the file alone, which
would end the process with SIGBUS where a page cannot be read (the disk fails, the file is cut off).
Each defect is a ``CheckpointFormatError`` that names the file.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

from poros.errors import CheckpointFormatError, HostMemoryError, quoted, reason_of
from poros.io.digests import as_bytes
from poros.io.reading import open_descriptor, parse_strictly, read_into

MAX_RANK = 64
"""Dimensions of a tensor that torch computes with."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Names in a header. The format also has types of 4 and 6 bits; no tensor is made of them here."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The other way round."""

_MAX_PATH = 1000  # characters of a path in a message
_PIECE_NUM_BYTES = 16 * 2**20  # read and hashed at a time


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: dtype, shape, and offset from the start of the file in bytes."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of one safetensors file, from its header."""

    file: Path
    tensors: dict[str, TensorEntry]
    """Entries by name, in the order of their bytes."""
    metadata: dict[str, str]
    num_bytes: int
    """Size of the whole file."""


def defect(
    file: Path | str, problem: str, *, tensor: str | None = None, remedy: str = "fetch it again"
) -> CheckpointFormatError:
    """Make the error for a defect: file, tensor, expected and found, remedy.

    Args:
        file: A path, or text that names the place, quoted already.
        problem: What was expected and what was found; names and values in it are ``quoted``.
    """
    where = shown(file) if isinstance(file, Path) else file
    if tensor is not None:
        where = f"{where}: tensor {quoted(tensor)}"
    return CheckpointFormatError(f"{where}: {problem}; {remedy}")


def shown(path: Path) -> str:
    """Format a path for messages."""
    return quoted(str(path), is_bare=True, limit=_MAX_PATH)


@contextmanager
def open_regular(file: Path) -> Iterator[tuple[int, os.stat_result]]:
    """As ``poros.io.reading.open_descriptor``, for the body, with a typed error."""
    try:
        descriptor, status = open_descriptor(file)
    except (OSError, ValueError) as error:
        raise defect(
            file, f"expected a regular file that can be read, found: {reason_of(error)}"
        ) from error
    try:
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_start(descriptor: int, num_bytes: int, file: Path) -> memoryview:
    """Read exactly the first ``num_bytes``; the position of the descriptor is not used."""
    target = as_bytes(torch.empty(num_bytes, dtype=torch.uint8))
    fill(descriptor, target, 0, file)
    return target


def fill(descriptor: int, target: memoryview, offset: int, file: Path, **of_defect: str) -> None:
    """Read from ``offset`` on into existing memory, all of it.

    Args:
        of_defect: Tensor and remedy, as ``defect`` takes them.
    """
    num_bytes = len(target)
    try:
        done = read_into(descriptor, target, offset)
    except OSError as error:
        raise defect(
            file,
            f"expected to read {num_bytes} bytes at {offset}, found: {error.strerror}",
            **of_defect,
        ) from error
    if done < num_bytes:
        raise defect(
            file,
            f"expected {num_bytes - done} more bytes at {offset + done}, found the end of the "
            "file: it is cut off, or shrank while it was read",
            **of_defect,
        )


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """Cut memory into pieces to read."""
    for start in range(0, len(memory), _PIECE_NUM_BYTES):
        yield memory[start : start + _PIECE_NUM_BYTES]


def scratch(num_bytes: int) -> Iterator[memoryview]:
    """Yield pieces of so many bytes in all, over the same memory, for what is only hashed."""
    memory = memoryview(bytearray(min(num_bytes, _PIECE_NUM_BYTES)))
    for start in range(0, num_bytes, _PIECE_NUM_BYTES):
        yield memory[: num_bytes - start]


def fill_and_hash(
    descriptor: int, targets: Iterable[memoryview], offset: int, file: Path, **of_defect: str
) -> str:
    """``fill`` memory piece by piece; the digest of all bytes (``poros.io.digests``)."""
    hasher = xxh3_128()
    for target in targets:
        fill(descriptor, target, offset, file, **of_defect)
        hasher.update(target)
        offset += len(target)
    return hasher.hexdigest()


def read_header(descriptor: int, file: Path) -> Header:
    """Read the header of an open safetensors file.

    Args:
        descriptor: From ``open_regular``; it stays open.

    Raises:
        CheckpointFormatError: If anything in the header breaks the format, or the file is not as
            long as the header requires.
        HostMemoryError: If the process may not have so much address space.
    """
    size = os.fstat(descriptor).st_size
    try:
        metadata, entries = _described(file)
    except MemoryError as error:
        raise HostMemoryError(
            f"expected {size} bytes of address space for {shown(file)}, found too few; raise the "
            "limit of the process (ulimit -v)"
        ) from error
    except (SafetensorError, OSError) as error:
        start = bytes(read_start(descriptor, min(size, 64), file))
        is_pointer = start.startswith(b"version https://git-lfs")
        raise defect(
            file,
            f"expected a safetensors file, found {size} bytes: {quoted(str(error))}",
            remedy="run git lfs pull" if is_pointer else "fetch it again",
        ) from error
    lengths = {name: _num_bytes(name, *entry, file) for name, entry in entries.items()}
    offset = size - sum(lengths.values())
    tensors = {}
    for name, (kind, shape) in entries.items():
        tensors[name] = TensorEntry(file, DTYPES[kind], shape, offset, lengths[name])
        offset += lengths[name]
    return Header(file, tensors, metadata, size)


def parse_json(text: bytes, file: Path, *, strict: bool = True) -> dict[str, Any]:
    """Parse a JSON object in UTF-8.

    Args:
        strict: Refuse keys that are given twice, unpaired surrogates in keys, NaN and Infinity.
            transformers accepts them in a configuration.
    """
    try:
        document = parse_strictly(text.decode()) if strict else json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        reason = quoted(str(error)) if isinstance(error, ValueError) else "it is nested too deeply"
        raise defect(file, f"expected a JSON object, found text that is none: {reason}") from error
    if not isinstance(document, dict):
        raise defect(file, f"expected a JSON object, found a {type(document).__name__}")
    return document


def _described(file: Path) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return the metadata of a file, and dtype and shape of each tensor in the order of bytes.

    The mapping of the file ends with this function.
    """
    entries = {}
    with safe_open(file, framework="np") as opened:
        for name in opened.offset_keys():
            described = opened.get_slice(name)
            entries[name] = described.get_dtype(), tuple(described.get_shape())
        return opened.metadata() or {}, entries


def _num_bytes(name: str, kind: str, shape: tuple[int, ...], file: Path) -> int:
    """Count the bytes of a tensor that torch can have."""
    try:
        if len(shape) <= MAX_RANK:
            return torch.empty(shape, dtype=DTYPES[kind], device="meta").nbytes
    except (KeyError, RuntimeError):  # no such dtype; an empty tensor with sizes beyond 2**63
        pass
    raise defect(
        file,
        f"expected a dtype that torch has and at most {MAX_RANK} sizes that it can address, found "
        f"{quoted(kind)} {quoted(shape)}",
        tensor=name,
        remedy="convert it",
    )
