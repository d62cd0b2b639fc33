"""4-bit linear modules on a GPU: one projection is dense at a time, and nobody keeps it.

bitsandbytes' node keeps the packed weight as an attribute; ours saves it as autograd's own nodes
do, so whoever holds it in a slot is asked for it before it is read.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from poros.kernels.forwards import PatchedForward, has_own_forward, replace
from poros.kernels.product import Product, frozen_of, linear_4bit_class


def multiply(product: Product, input: torch.Tensor) -> torch.Tensor:
    """``product.of(input)`` of a 4-bit weight, by a node of its own.

    Streams:
        Queued on the current stream. The dense weight is gone when the call returns, in backward
        likewise, so its memory serves the next projection.

    Exactness:
        The bits of ``bitsandbytes.matmul_4bit``, and of its gradient by ``input``.
    """
    output: torch.Tensor = _Multiply.apply(input, product)
    return output


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.save_for_backward(product.weight)
        ctx.product = product._replace(weight=None)
        return product.of(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return ctx.product._replace(weight=weight).gradient(gradients[0]), None


class _Forward(PatchedForward):
    """A ``Linear4bit`` that runs ``multiply``."""

    def run(self, module: Any, input: torch.Tensor) -> torch.Tensor:
        dtype, found = module.compute_dtype or input.dtype, frozen_of(module)
        if (
            found is None
            or type(input) is not torch.Tensor
            or not input.is_cuda
            or input.numel() == 0
            or input.shape[-1] != found.state.shape[-1]
            or (found.bias is not None and found.bias.dtype != dtype)
        ):
            result: torch.Tensor = self.own(module, input)
            return result
        return multiply(found, input.to(dtype)).to(input.dtype)


def patch(modules: Iterable[nn.Module]) -> None:
    """Have 4-bit modules on a GPU run ``multiply``.

    Modules of other classes, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.unpatch`` undoes it.
    """
    kind = linear_4bit_class()
    if has_own_forward(kind):
        replace(modules, lambda module: _Forward(module) if type(module) is kind else None)
