"""The dense weight that a 4-bit weight of bitsandbytes stands for.

bitsandbytes takes three kernels for a doubly quantized weight: absmax is looked up, the offset is
added, and the weight is looked up and multiplied. One kernel does all of it here, and writes
nothing but the weight. See ``poros.kernels.nf4`` for the parts (Dettmers et al. 2023, QLoRA,
section 3).
"""

from typing import Any

import torch

from poros.kernels.nf4 import NESTED_BLOCKSIZE
from poros.utils.devices import runs_triton


def dequantize(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of shape ``state.shape`` in ``dtype``, on the device of ``packed``.

    Args:
        packed: The packed bytes, contiguous.
        state: The ``QuantState`` of bitsandbytes, on the same device.
        dtype: float32, float16 or bfloat16.

    Streams:
        Queued on the current stream; the weight is memory of the caching allocator, or of the
        ``DenseWorkspace`` that ``state`` has as its ``dense_workspace``: then it is there until the
        next one. Nothing is queued if it is there already, at the ``dense_place`` of ``state``. It
        is to be read, not written.

    Exactness:
        The bits of bitsandbytes' own ``dequantize_4bit``.
    """
    if packed.is_meta:
        # By the operator that a plan knows; scales have no say.
        scales = packed.new_empty(0, dtype=torch.float32)
        made: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            *(packed, scales, state.blocksize, state.quant_type, state.shape, dtype)
        )
        return made
    place = getattr(state, "dense_place", None)
    known = None if place is None else place.weight(dtype)
    if known is not None:
        return known
    if has_kernel(packed, state) and runs_triton(packed.device):
        from poros.kernels.dequantize_gpu import launch

        workspace = getattr(state, "dense_workspace", None)
        if workspace is None:
            return launch(packed, state, packed.new_empty(state.shape, dtype=dtype))
        return launch(packed, state, workspace.take(state.shape, dtype))
    return dequantize_ref(packed, state, dtype)


def dequantize_into(packed: torch.Tensor, state: Any, weight: torch.Tensor) -> None:
    """``dequantize`` to ``weight``, of the shape of ``state``, contiguous."""
    if has_kernel(packed, state) and runs_triton(packed.device):
        from poros.kernels.dequantize_gpu import launch

        launch(packed, state, weight)
    else:
        weight.copy_(dequantize_ref(packed, state, weight.dtype))


def dequantize_ref(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """``dequantize`` by bitsandbytes."""
    from bitsandbytes.functional import dequantize_blockwise

    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed, absmax, state.blocksize, state.quant_type, state.shape, dtype
    )
    return weight


def has_kernel(packed: torch.Tensor, state: Any) -> bool:
    """Whether the kernel knows this kind of weight; bitsandbytes' own are taken for the others.

    The code book of FP4 is not what its kernel multiplies by.
    """
    return (
        state.quant_type == "nf4"
        and packed.dtype == torch.uint8
        and packed.is_contiguous()
        and (not state.nested or state.state2.blocksize == NESTED_BLOCKSIZE)
    )
