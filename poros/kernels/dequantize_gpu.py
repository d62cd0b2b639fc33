"""The kernel of ``poros.kernels.dequantize``, in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl

from poros.kernels.launching import ceil_div, start_kernel

_NUM_BYTES = 2048
"""Packed bytes of a program. At large shapes on an H100 none of 512 to 4096 was faster with 4
warps, but 4096 with 8 warps by 3 %."""


@triton.jit
def _dequantize(
    packed,
    absmax,
    nested_absmax,
    nested_code,
    offset,
    code,
    weight,
    num_elements,
    IS_NESTED: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    # Blocks of equal scale are rows of a tile, so that each scale is looked up once.
    HALF: tl.constexpr = BLOCKSIZE // 2
    NUM_BLOCKS: tl.constexpr = SIZE // HALF
    block = tl.program_id(0).to(tl.int64) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    inside = block * BLOCKSIZE < num_elements
    scale = tl.load(absmax + block, mask=inside, other=0)
    if IS_NESTED:
        # A product and a sum, each rounded: fusion is switched off at the launch.
        product = tl.load(nested_code + scale.to(tl.int32)) * tl.load(
            nested_absmax + block // NESTED_BLOCKSIZE, mask=inside, other=0.0
        )
        scale = product + tl.load(offset)
    at = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    both = tl.load(packed + at, mask=at * 2 < num_elements, other=0).to(tl.int32)
    first = tl.load(code + (both >> 4)) * scale[:, None]
    second = tl.load(code + (both & 15)) * scale[:, None]
    place = block[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    values = tl.interleave(first, second).to(weight.dtype.element_ty)
    tl.store(weight + place, values, mask=place < num_elements)


def launch(packed: torch.Tensor, state: Any, weight: torch.Tensor) -> torch.Tensor:
    """``dequantize.dequantize`` on a GPU, written to ``weight``, which is returned."""
    nested = state.state2 if state.nested else state
    start_kernel(
        _dequantize,
        ceil_div(weight.numel(), 2 * _NUM_BYTES),
        packed,
        state.absmax,
        nested.absmax,
        nested.code,
        state.offset if state.nested else state.absmax,
        state.code,
        weight,
        weight.numel(),
        IS_NESTED=state.nested,
        BLOCKSIZE=state.blocksize,
        NESTED_BLOCKSIZE=nested.blocksize,
        SIZE=_NUM_BYTES,
    )
    return weight
