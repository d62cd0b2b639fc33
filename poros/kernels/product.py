"""The product of a frozen linear module, as a part of the node that also makes what LoRA adds.

Its gradient by the input takes the weight and nothing of the product itself, so where a
recomputation needs the graph alone, the product is left out.

Where bitsandbytes takes a kernel that multiplies by a 4-bit weight without making it dense (few
tokens; for which shapes depends on the card), that kernel runs here too.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype
from poros.kernels.dequantize import dequantize, has_kernel
from poros.kernels.forwards import has_own_forward
from poros.kernels.nf4 import NESTED_BLOCKSIZE
from poros.kernels.nodes import times


class Product(NamedTuple):
    """``input @ weight.T + bias``, of one module and for inputs like one that it was made for.

    A node that needs it in backward saves the weight as autograd's own nodes do, and takes it from
    there: so an edit in between is noticed, and a weight that streams is brought back before it is
    read, with the scales of its ``state``.
    """

    weight: Any
    state: Any
    """The ``QuantState`` of a 4-bit weight; None if it is dense."""
    bias: torch.Tensor | None
    num_rows: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the dense weight."""
        found: torch.dtype = self.weight.dtype if self.state is None else self.state.dtype
        return found

    def of(self, input: torch.Tensor) -> torch.Tensor:
        """The product; no graph, and to be called where none is made. It may be a view."""
        if self.state is None:
            return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)
        # The subclass of a 4-bit weight would have each look at it pass through Python.
        with torch._C.DisableTorchFunctionSubclass():
            is_ours = input.is_cuda and has_kernel(self.weight, self.state)
            if is_ours and not takes_fused_kernel(input, self.state):
                return times(input, dequantize(self.weight, self.state, input.dtype), self.bias)
            from bitsandbytes import matmul_4bit

            product: torch.Tensor = matmul_4bit(input, self.weight, self.state, bias=self.bias)
            return product

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient, given the product's."""
        dense = self.dense(gradient.dtype)
        if self.state is not None and not gradient.is_contiguous():
            return torch.matmul(gradient, dense)  # as bitsandbytes has it
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.mm(dense).view(*gradient.shape[:-1], -1)

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


def frozen_of(module: Any) -> Product | None:
    """The product of a frozen linear module; None if it is another kind, or trained."""
    kind, parameters = type(module), module._parameters
    weight: Any
    weight, bias = parameters.get("weight"), parameters.get("bias")
    state = None if kind is nn.Linear else getattr(weight, "quant_state", None)
    if kind is nn.Linear:
        is_known = type(weight) is nn.Parameter
    else:
        is_known = kind is linear_4bit_class() and state is not None and _is_known(state)
        is_known = is_known and module.compute_type_is_set
    if not is_known or not has_own_forward(kind) or (bias is not None and bias.requires_grad):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if weight.requires_grad:
            return None
    return Product(weight, state, bias, (weight if state is None else state).shape[0])


def _is_known(state: Any) -> bool:
    """Whether a 4-bit weight is packed as ever: not for inference on a CPU."""
    is_usual = not getattr(state, "packing_format_for_cpu", False)
    return is_usual and (not state.nested or state.state2.blocksize == NESTED_BLOCKSIZE)


def product_of(
    module: Any, input: torch.Tensor, dtype: torch.dtype | None = None
) -> Product | None:
    """The product of ``module`` with ``input``, with the bits of the module's own.

    Args:
        module: The linear module below an adapter; nobody hooks into it.
        input: Of shape (..., columns).
        dtype: Of the input as it will be given; a dense weight of another dtype is cast to it at
            each use. None stands for the dtype of both.

    Returns:
        None if it is not certain to have the module's own bits, or those of its gradient.
    """
    found = frozen_of(module)
    columns, wanted = input.shape[-1], dtype or input.dtype
    # One token takes other kernels.
    if (
        found is None
        or input.numel() == columns
        or autocast_dtype(input.device) not in (None, wanted)
    ):
        return None
    state, bias = found.state, found.bias
    if state is None:
        if dtype is None and found.weight.dtype != wanted:
            return None
        if bias is not None and dtype is not None:
            found = found._replace(bias=bias.to(dtype))
    elif (
        module.compute_dtype not in (None, input.dtype)
        or not state.dtype == input.dtype == wanted  # of what its module returns
        or state.shape[1] != columns
    ):
        return None
    return found if found.bias is None or found.bias.dtype == wanted else None


@cache
def linear_4bit_class() -> type[nn.Module]:
    """The 4-bit linear module of bitsandbytes."""
    from bitsandbytes.nn import Linear4bit

    kind: type[nn.Module] = Linear4bit
    return kind
