"""The product with a 4-bit weight: one projection is dense at a time, and nobody keeps it.

The autograd node is ours, not bitsandbytes': it saves the packed weight as autograd's own nodes do,
so whoever holds the weight in a slot is asked for it before it is read. Where bitsandbytes takes a
kernel that multiplies without a dense weight (few tokens; for which shapes depends on the card),
that kernel runs here too, so that all bits are bitsandbytes'.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from poros.kernels.dequantize import dequantize, has_kernel
from poros.kernels.forwards import PatchedForward, has_own_forward
from poros.kernels.nf4 import state_of
from poros.kernels.nodes import times
from poros.kernels.patching import replace


def linear_4bit(
    input: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    """``input @ dequantized.T + bias``.

    Args:
        input: Of shape (..., columns), not empty. Gets a gradient.
        weight: Packed, of a kind that ``poros.kernels.dequantize`` has a kernel for.
        state: Its ``QuantState``, of shape (rows, columns).
        bias: Of shape (rows,), in the dtype of ``input``; frozen.

    Returns:
        Of shape (..., rows), in the dtype of ``input``.

    Streams:
        Queued on the current stream. The dense weight is gone when the call returns, in backward
        likewise, so its memory serves the next projection.

    Exactness:
        The bits of ``bitsandbytes.matmul_4bit``, and of its gradient by ``input``.
    """
    output: torch.Tensor = _Linear4bit.apply(input, weight, state, bias)
    return output


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.state = state
        return multiply(input, weight, state, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        return multiply_backward(gradient, weight, ctx.state), None, None, None


def multiply(
    input: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    """``linear_4bit`` without a graph."""
    # The subclass of a 4-bit weight would have each look at it pass through Python.
    with torch._C.DisableTorchFunctionSubclass():
        if input.is_cuda and takes_fused_kernel(input, state):
            return _fused(input, weight, state, bias)
        return times(input, dequantize(weight, state, input.dtype), bias)


def multiply_backward(gradient: torch.Tensor, weight: torch.Tensor, state: Any) -> torch.Tensor:
    """The gradient of ``input``, of the shape of ``gradient`` but for its last dimension."""
    with torch._C.DisableTorchFunctionSubclass():
        dense = dequantize(weight, state, state.dtype).to(gradient.dtype)
    if not gradient.is_contiguous():
        return torch.matmul(gradient, dense)
    rows = gradient.view(-1, gradient.shape[-1])
    return rows.mm(dense).view(*gradient.shape[:-1], -1)


def takes_fused_kernel(input: torch.Tensor, state: Any) -> bool:
    """Whether bitsandbytes multiplies ``input`` on a GPU without a dense weight."""
    from bitsandbytes.backends.cuda import ops

    columns = input.shape[-1]
    num_tokens = input.numel() // columns
    if num_tokens > ops._gemm_4bit_custom_max_m or columns % state.blocksize:
        return False
    chosen: bool = ops._gemm_4bit_use_custom_fn(
        input.device.index, input.dtype, num_tokens, state.shape[0], columns
    )
    return chosen


def _fused(
    input: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    nested = state.state2 if state.nested else state
    more = (
        {
            "absmax_8bit": state.absmax,
            "absmax_code": nested.code,
            "absmax_offset": state.offset,
        }
        if state.nested
        else {}
    )
    result: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        input,
        weight.view(-1, 1),
        state.shape,
        nested.absmax,
        state.blocksize,
        state.quant_type,
        bias=bias,
        **more,
    )
    return result


class _Forward(PatchedForward):
    """A ``Linear4bit`` that multiplies by ``linear_4bit``."""

    def run(self, module: Any, input: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        state = state_of(weight)
        dtype = module.compute_dtype or input.dtype
        with torch._C.DisableTorchFunctionSubclass():
            if (
                not module.compute_type_is_set
                or type(input) is not torch.Tensor
                or not (input.is_cuda and weight.is_cuda)
                or input.numel() == 0
                or state is None
                or not has_kernel(weight, state)
                or input.shape[-1] != state.shape[-1]
                or (bias is not None and (bias.requires_grad or bias.dtype != dtype))
            ):
                state = None
        if state is None:
            result: torch.Tensor = self.own(module, input)
            return result
        return linear_4bit(input.to(dtype), weight, state, bias).to(input.dtype)


@cache
def module_class() -> type[nn.Module]:
    """The 4-bit linear module of bitsandbytes."""
    from bitsandbytes.nn import Linear4bit

    kind: type[nn.Module] = Linear4bit
    return kind


def patch(modules: Iterable[nn.Module]) -> None:
    """Have 4-bit modules on a GPU multiply by ``linear_4bit``.

    Modules of other classes, and those whose forward somebody has set, are left alone.
    ``poros.kernels.patching.unpatch`` undoes it.
    """
    kind = module_class()
    if has_own_forward(kind):
        replace(modules, lambda module: _Forward(module) if type(module) is kind else None)
