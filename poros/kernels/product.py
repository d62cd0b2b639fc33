"""The product of a frozen linear module, as a part of the node that also makes what LoRA adds.

Its gradient by the input takes the weight and nothing of the product itself, so where a
recomputation needs the graph alone, the product is left out.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels import linear4bit
from poros.kernels.autocast import autocast_dtype
from poros.kernels.dequantize import dequantize, has_kernel
from poros.kernels.forwards import has_own_forward
from poros.kernels.quantized import state_of


class Product(NamedTuple):
    """``input @ weight.T + bias``, of one module and for inputs like one that it was made for.

    A node that needs it in backward saves the weight as autograd's own nodes do, and takes it from
    there: so an edit in between is noticed, and a weight that streams is brought back before it is
    read, with the scales of its ``state``.
    """

    module: nn.Module
    weight: Any
    state: Any
    """The ``QuantState`` of a 4-bit weight; None if it is dense."""
    bias: torch.Tensor | None
    num_rows: int
    is_ours: bool
    """Whether it is formed here; or else by the module."""

    def of(self, input: torch.Tensor) -> torch.Tensor:
        """The product; no graph. It may be a view."""
        if not self.is_ours:
            result: torch.Tensor = self.module(input)
            return result
        if self.state is None:
            return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        return linear4bit.multiply(input, self.weight, self.state, self.bias)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient, given the product's."""
        if self.state is not None:
            return linear4bit.multiply_backward(gradient, self.weight, self.state)
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.mm(self.dense(gradient.dtype)).view(*gradient.shape[:-1], -1)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, of shape (num_rows, columns), to be read and not kept; no graph.

        Args:
            dtype: Of the result, which is a dense weight itself where that has it.
        """
        if self.state is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return dequantize(self.weight, self.state, self.state.dtype).to(dtype)
        weight: torch.Tensor = self.weight.to(dtype)
        return weight


def product_of(
    module: Any, input: torch.Tensor, leaves_out: bool, dtype: torch.dtype | None = None
) -> Product | None:
    """The product of ``module`` with ``input``.

    Args:
        module: The linear module below an adapter; nobody hooks into it.
        input: Of shape (..., columns).
        leaves_out: Whether it is likely that nobody reads it.
        dtype: Of the input as it will be given; a dense weight of another dtype is cast to it at
            each use. None stands for the dtype of both.

    Returns:
        None if it is not certain to have the module's own bits, or those of its gradient.
    """
    kind = type(module)
    weight: Any
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    columns = input.shape[-1]
    wanted = dtype or input.dtype
    if dtype is not None and bias is not None and kind is nn.Linear and not bias.requires_grad:
        bias = bias.to(dtype)
    if (
        (bias is not None and (bias.requires_grad or bias.dtype != wanted))
        or input.numel() == columns  # one token takes other kernels
        or autocast_dtype(input.device) not in (None, wanted)
    ):
        return None
    if kind is nn.Linear:
        if (
            type(weight) is not nn.Parameter
            or weight.requires_grad
            or (weight.dtype != wanted and dtype is None)
            or not has_own_forward(kind)
        ):
            return None
        rows = weight.shape[0]
        return Product(module, weight, None, bias, rows, is_ours=True)
    state = state_of(weight)
    if (
        state is None
        or kind is not linear4bit.module_class()
        or not has_own_forward(kind)
        or not module.compute_type_is_set
        or module.compute_dtype not in (None, input.dtype)
        or not state.dtype == input.dtype == wanted  # of what its module returns
        or state.shape[1] != columns
    ):
        return None
    # The subclass of a 4-bit weight would have each look at it pass through Python.
    with torch._C.DisableTorchFunctionSubclass():
        is_ours = input.is_cuda and weight.is_cuda and has_kernel(weight, state)
        if weight.requires_grad or not (is_ours or leaves_out):
            return None
    return Product(module, weight, state, bias, state.shape[0], is_ours)
