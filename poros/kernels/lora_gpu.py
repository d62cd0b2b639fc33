"""The kernels of ``poros.kernels.lora``, in Triton: what surrounds the matrix products.

Each goes over its tensors once. A value is rounded wherever PEFT's operators would have written it.
"""

import torch
import triton
import triton.language as tl

from poros.kernels.launching import start_elementwise

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _add_scaled(
    result, added, sum_, scaling, num_elements, ROUNDS: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num_elements
    term = tl.load(added + at, mask=inside).to(tl.float32) * scaling
    term = term.to(added.dtype.element_ty)
    if ROUNDS:
        term = term.to(result.dtype.element_ty)
    total = tl.load(result + at, mask=inside).to(tl.float32) + term.to(tl.float32)
    tl.store(sum_ + at, total.to(sum_.dtype.element_ty), mask=inside)


@triton.jit
def _scale(gradient, scaled, scaling, num_elements, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num_elements
    value = tl.load(gradient + at, mask=inside).to(scaled.dtype.element_ty)
    product = value.to(tl.float32) * scaling
    tl.store(scaled + at, product.to(scaled.dtype.element_ty), mask=inside)


@triton.jit
def _masked(values, mask, result, factor, num_elements, MIDDLE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num_elements
    value = tl.load(values + at, mask=inside).to(MIDDLE).to(tl.float32)
    # A product with the mask, not a choice: what is infinite becomes NaN, and zeros keep signs.
    kept = tl.load(mask + at, mask=inside).to(tl.float32)
    product = (value * kept * factor).to(MIDDLE)
    tl.store(result + at, product.to(result.dtype.element_ty), mask=inside)


def add_scaled(
    result: torch.Tensor, added: torch.Tensor, scaling: float, rounds: bool, dtype: torch.dtype
) -> torch.Tensor:
    """``lora.add_scaled`` on a GPU; the sum is in ``dtype``."""
    sum_ = added if added.dtype == dtype else torch.empty_like(result, dtype=dtype)
    start_elementwise(_add_scaled, result, added, sum_, scaling, ROUNDS=rounds)
    return sum_


def scale(gradient: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """``lora.scale`` on a GPU."""
    scaled = torch.empty_like(gradient, dtype=dtype)
    start_elementwise(_scale, gradient, scaled, scaling)
    return scaled


def masked(
    values: torch.Tensor,
    mask: torch.Tensor,
    factor: float,
    middle: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``values`` in the dtype ``middle``, times mask and factor, rounded there and to ``dtype``."""
    result = torch.empty_like(values, dtype=dtype)
    # Bytes: what is false is 0, what is true is 1.
    start_elementwise(
        _masked, values, mask.view(torch.uint8), result, factor, MIDDLE=_TYPES[middle]
    )
    return result
