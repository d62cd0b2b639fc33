"""Checks the quantization state of a 4-bit weight before any kernel reads it.

bitsandbytes does not check a state. Its kernels read 16 and 256 entries of the code books whatever
their sizes are, and divide by the block size. A wrong state ends the process, or trains on numbers
beyond the end of a tensor.
"""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from poros.errors import CheckpointFormatError, quoted
from poros.kernels.nf4 import DTYPES, MOVING, NESTED_BLOCKSIZE, Parts
from poros.loaders.header import parse_json, shown
from poros.loaders.quantize import require_finite

_PACKED = "quant_state.bitsandbytes__"
_MAX_STATE_NUM_BYTES = 4096
_PLAIN = {"quant_type", "blocksize", "dtype", "shape"}
_TENSORS = {"weight", "weight.absmax", "weight.quant_map"}
_NESTED_TENSORS = {"weight.nested_absmax", "weight.nested_quant_map"}
_NESTED = {"nested_blocksize", "nested_dtype", "nested_offset"}


def require_state(path: Path, name: str, parts: Mapping[str, Any], quant_type: str) -> None:
    """Check the parts of one 4-bit weight before bitsandbytes builds its state.

    Block sizes are compared once it is built (``SlabWriter.require_packed``, ``require_codes``).

    Args:
        parts: The weight's tensors, by their names from ``weight`` on.
        quant_type: The type that the configuration names.

    Raises:
        CheckpointFormatError: If a part is missing or left over, or its values are impossible.
    """

    def refuse(expected: str, found: object) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"{shown(path)}: {quoted(name, is_bare=True)}: expected {expected}, found "
            f"{quoted(found)}; fetch the checkpoint again, or load the one that it was made from"
        )

    keys = [part for part in parts if _PACKED in part]
    if len(keys) != 1:
        raise refuse("one quantization state of the 4-bit weight", sorted(parts))
    (key,) = keys
    text = parts[key]
    if text.dtype != torch.uint8 or text.ndim != 1 or text.numel() > _MAX_STATE_NUM_BYTES:
        raise refuse(
            f"its state as at most {_MAX_STATE_NUM_BYTES} bytes of JSON",
            f"{text.dtype} {tuple(text.shape)}",
        )
    state = parse_json(bytes(text.tolist()), path / f"{name}.{key}")
    is_nested = "nested_absmax" in {part.rpartition(".")[2] for part in parts}
    expected = _TENSORS | (_NESTED_TENSORS if is_nested else set())
    if parts.keys() - {key} != expected:
        raise refuse(f"the tensors {', '.join(sorted(expected))}", sorted(parts))
    if state.keys() != _PLAIN | (_NESTED if is_nested else set()):
        raise refuse(f"{'double' if is_nested else 'single'} quantization", sorted(state))
    if state["quant_type"] != quant_type or not key.endswith(f"__{quant_type}"):
        raise refuse(f"quantization to {quant_type}, as configured", f"{key}: {state}")
    if state["dtype"] not in tuple(DTYPES):
        raise refuse(f"a dtype among {', '.join(DTYPES)}", state["dtype"])
    shape = state["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise refuse("a shape of positive whole numbers", shape)
    if not is_nested:
        return
    if state["nested_dtype"] != "float32":
        raise refuse("scales in float32", state["nested_dtype"])
    offset = state["nested_offset"]
    if not isinstance(offset, int | float) or not isfinite(offset):
        raise refuse("a finite nested_offset", offset)


def require_codes(where: str, state: Any, parts: Parts, form: Parts) -> None:
    """Check code books, offset and dtypes of a state that is about to be used.

    Args:
        where: Checkpoint and weight, for messages.
        form: Expected dtypes and sizes; the shapes of parts that move are not compared.

    Raises:
        CheckpointFormatError: If a kernel would read what is not there, or not finite.
    """
    for part, tensor in sorted(parts.items()):
        num_entries = None if part in MOVING else form[part].numel()
        dtype = form[part].dtype
        if tensor.dtype != dtype or num_entries not in (None, tensor.numel()):
            raise CheckpointFormatError(
                f"{where}: expected {num_entries or 'its'} entries of {dtype} in {part}, found "
                f"{tensor.dtype} {quoted(tuple(tensor.shape))}; fetch the checkpoint again"
            )
        if num_entries is not None:  # scales are checked where they are kept
            require_finite(tensor, f"{where}.{part}")
    if state.nested and state.state2.blocksize != NESTED_BLOCKSIZE:
        raise CheckpointFormatError(
            f"{where}: expected scales in blocks of {NESTED_BLOCKSIZE}, found "
            f"{quoted(state.state2.blocksize)}; fetch the checkpoint again"
        )
