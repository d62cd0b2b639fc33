"""The kernels of ``poros.kernels.swiglu``, in Triton: SiLU, in 16-bit floats.

A value is rounded wherever PyTorch's operators would have written it, and computed as they compute
it: the exponential is that of CUDA's library, quotients are rounded correctly, and of the
derivative the product and sum that CUDA's compiler fuses are fused.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from poros.kernels.launching import start_elementwise


@triton.jit
def _silu_mul(gate, up, product, num_elements, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num_elements
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    activated = tl.div_rn(x, 1.0 + libdevice.exp(-x)).to(product.dtype.element_ty)
    value = activated.to(tl.float32) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + at, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward(gradient, gate, up, of_gate, of_up, num_elements, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < num_elements
    arriving = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    power = 1.0 + libdevice.exp(-x)
    activated = tl.div_rn(x, power).to(of_up.dtype.element_ty).to(tl.float32)
    tl.store(of_up + at, (arriving * activated).to(of_up.dtype.element_ty), mask=inside)
    factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    arriving = (arriving * factor).to(of_gate.dtype.element_ty).to(tl.float32)
    part = tl.div_rn(1.0, power)
    slope = tl.fma(x, 1.0 - part, 1.0)
    tl.store(of_gate + at, (arriving * part * slope).to(of_gate.dtype.element_ty), mask=inside)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    product = torch.empty_like(gate)
    start_elementwise(_silu_mul, gate, up, product)
    return product


def silu_mul_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and of up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    start_elementwise(_silu_mul_backward, gradient, gate, up, of_gate, of_up)
    return of_gate, of_up
