"""The product of a frozen linear module, left out where a recomputation needs its graph alone.

Its gradient by the input takes the weight and nothing of the product itself. The node is in the
place of the module's own, so what comes after it in the graph, and in which order, is the same.
"""

from typing import Any

import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype
from poros.kernels.dequantize import dequantize
from poros.kernels.forwards import has_own_forward
from poros.kernels.hooks import has_hooks
from poros.kernels.unformed import Unformed
from poros.nf4 import state_of


def leave_out(module: Any, input: torch.Tensor) -> torch.Tensor | None:
    """What ``module`` gives for ``input``, without values.

    Args:
        module: The linear module below an adapter.
        input: Of shape (..., columns).

    Returns:
        An ``Unformed`` of shape (..., rows) with the graph that the module's own result has; None
        if that is not certain to be the same.

    Exactness:
        The gradient by ``input`` has the bits of that of the module's own result, and so have the
        values, if they are read.
    """
    from bitsandbytes.nn import Linear4bit

    kind = type(module)
    if (
        kind not in (nn.Linear, Linear4bit)
        or not has_own_forward(kind)
        or has_hooks(module, but_ours=True)
    ):
        return None
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    state = state_of(weight) if kind is Linear4bit else None
    columns = input.shape[-1]
    if (
        any(each is not None and each.requires_grad for each in (weight, bias))
        or input.numel() == columns  # one token takes other kernels
        or (bias is not None and bias.dtype != input.dtype)
        or autocast_dtype(input.device) not in (None, input.dtype)
    ):
        return None
    if kind is nn.Linear:
        if weight.dtype != input.dtype or type(weight) is not nn.Parameter:
            return None
        rows = weight.shape[0]
    else:
        if (
            state is None
            or not module.compute_type_is_set
            or module.compute_dtype not in (None, input.dtype)
            or state.dtype != input.dtype
            or state.shape[1] != columns
        ):
            return None
        rows = state.shape[0]
    result: torch.Tensor = _LeftOut.apply(input, module, weight, state, rows)
    return result


class _LeftOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, module: nn.Module, weight: Any, state: Any, rows: int
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.state = weight, state
        shape = (*input.shape[:-1], rows)
        return Unformed(shape, input.dtype, input.device, lambda: module(input), [input])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        if ctx.state is None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_input = rows.mm(ctx.weight).view(*gradient.shape[:-1], -1)
        else:
            dense = dequantize(ctx.weight, ctx.state, ctx.state.dtype).to(gradient.dtype)
            of_input = torch.matmul(gradient, dense)
        return of_input, None, None, None, None
