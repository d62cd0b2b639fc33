"""SwiGLU, the gated activation of a feed-forward layer: saves its inputs, and recomputes it.

For gate and up, each of the intermediate size (Shazeer 2020, GLU Variants, equation 6)

    silu(gate) * up

Autograd keeps four tensors of that size for it: gate, silu(gate), up, and for the adapter of the
projection behind it the product. Here two are kept, gate and up; the others are computed from them
again in backward, by the same operators, so by the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from poros.kernels.nodes import saved_tensors
from poros.utils.devices import runs_triton

_SOURCES = "_poros_sources"


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate: Of any shape. Gets a gradient.
        up: Likewise, of the same shape and dtype.

    Returns:
        Of the same shape and dtype; ``sources_of`` tells what it was made of.

    Streams:
        Queued on the current stream. Kept for backward are gate and up.

    Exactness:
        The bits of ``swiglu_ref``, forward and gradients.
    """
    product: torch.Tensor = _SwiGlu.apply(gate, up)
    if product.requires_grad:
        product.__dict__[_SOURCES] = (gate.detach(), up.detach()), product._version
    return product


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``swiglu`` as models compute it."""
    return nn.functional.silu(gate) * up


def sources_of(input: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a node keeps of its input: gate and up if ``swiglu`` has made it, else itself.

    Itself too if it was written to since.
    """
    found = input.__dict__.get(_SOURCES)
    return found[0] if found is not None and found[1] == input._version else (input,)


def input_from(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input again that ``sources_of`` was given, without a graph."""
    with torch.no_grad():
        return sources[0] if len(sources) == 1 else _product(*sources)


def forget_sources(product: torch.Tensor) -> None:
    """Have nodes behind this one keep the product itself."""
    product.__dict__.pop(_SOURCES, None)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None
        gate, up = saved_tensors(ctx)
        if _takes_kernel(gradient, gate, up):
            from poros.kernels import swiglu_gpu

            return swiglu_gpu.silu_mul_backward(gradient, gate, up)
        # In place, so that no more is there than with the kernel.
        of_up = nn.functional.silu(gate).mul_(gradient)
        of_gate = gradient * up
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up


def _product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if _takes_kernel(gate, up):
        from poros.kernels import swiglu_gpu

        return swiglu_gpu.silu_mul(gate, up)
    return nn.functional.silu(gate).mul_(up)


def _takes_kernel(*tensors: torch.Tensor) -> bool:
    """Whether a kernel computes all of it: of 16 bits, where all inputs are known."""
    first = tensors[0]
    return (
        first.dtype in (torch.bfloat16, torch.float16)
        and runs_triton(first.device)
        and all(each.is_contiguous() for each in tensors)
    )
