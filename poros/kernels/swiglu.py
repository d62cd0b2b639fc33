"""SwiGLU, or any gated activation of a feed-forward layer: saves its inputs, and recomputes it.

For gate and up, each of the intermediate size (Shazeer 2020, GLU Variants, equation 6)

    activation(gate) * up

Autograd keeps four tensors of that size for it: gate, activation(gate), up, and for the adapter of
the projection behind it the product. Here two are kept, gate and up; the others are computed from
them again in backward, by the same operators, so by the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation

from poros.kernels.autocast import autocast_as, autocast_dtype
from poros.kernels.nodes import saved_tensors
from poros.utils.devices import runs_triton

Activation = Callable[[torch.Tensor], torch.Tensor]

_SILU = (nn.SiLU, SiLUActivation)
_MADE_OF = "_poros_made_of"
_NUM_ELEMENTS = 2**25
"""That a backward works on at a time on a GPU."""


class RecomputeInfo(NamedTuple):
    """How a product was made."""

    activation: Activation
    autocast: torch.dtype | None
    """In which autocast multiplied; None if it was off."""

    def again(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Recompute ``activation(gate) * up`` without a graph."""
        with torch.no_grad(), autocast_as(self.autocast, gate.device):
            return _product(gate, up, self.activation)


class SavedInputs(NamedTuple):
    """What a product was made of. The tensors have no graph."""

    gate: torch.Tensor
    up: torch.Tensor
    making: RecomputeInfo
    version: int
    """Of the product, when it was made."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up``.

    Args:
        gate: Of any shape. Gets a gradient.
        up: Likewise, of the same shape and dtype.
        activation: A function of its argument alone: no state, no random numbers, no graph to
            anything else.

    Returns:
        Of the same shape and dtype; ``parts_of`` tells what it was made of.

    Streams:
        Queued on the current stream. Kept for backward are gate and up.

    Exactness:
        The bits of ``swiglu_ref``, forward and gradients.
    """
    product: torch.Tensor = _SwiGlu.apply(gate, up, activation)
    if product.requires_grad:
        making = RecomputeInfo(activation, autocast_dtype(gate.device))
        parts = SavedInputs(gate.detach(), up.detach(), making, product._version)
        product.__dict__[_MADE_OF] = parts
    return product


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``swiglu`` as models compute it."""
    return activation(gate) * up


def parts_of(tensor: torch.Tensor) -> SavedInputs | None:
    """What ``tensor`` was made of by ``swiglu``; None if it was not, or was written to since."""
    parts: SavedInputs | None = tensor.__dict__.get(_MADE_OF)
    return parts if parts is not None and parts.version == tensor._version else None


def forget_parts(tensor: torch.Tensor) -> None:
    """Drop the recompute information of ``tensor``."""
    tensor.__dict__.pop(_MADE_OF, None)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.autocast = activation, autocast_dtype(gate.device)
        return _product(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradients[0] is None:
            return None, None, None
        gate, up = saved_tensors(ctx)
        making = RecomputeInfo(ctx.activation, ctx.autocast)
        return *swiglu_backward(gradients[0], gate, up, making), None


def swiglu_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, making: RecomputeInfo
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, given that of their product; ``making`` says how it was made.

    All of one shape; gate and up are of one dtype, and so are their gradients.
    """
    activation = making.activation
    if _takes_kernel(activation, gradient, gate, up):
        from poros.kernels import swiglu_gpu

        return swiglu_gpu.silu_mul_backward(gradient, gate, up)
    if type(activation) in _SILU and gradient.dtype == gate.dtype == up.dtype:
        # In place, so that no more is there than with the kernel.
        of_up = torch.nn.functional.silu(gate).mul_(gradient)
        of_gate = gradient * up
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    parts = [_rows(each) for each in (gradient, gate, up, of_gate, of_up)]
    for arriving, gate, up, into_gate, into_up in zip(*parts, strict=True):
        with torch.enable_grad(), autocast_as(making.autocast, gate.device):
            leaf = gate.detach().requires_grad_()
            activated = _own(activation)(leaf)
        into_up.copy_(arriving * activated.detach())
        into_gate.copy_(torch.autograd.grad(activated, leaf, arriving * up)[0])
    return of_gate, of_up


def _own(activation: Activation) -> Activation:
    """Without hooks: there were none when it was first called, and those that came see no more."""
    return activation.forward if isinstance(activation, nn.Module) else activation


def _product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if _takes_kernel(activation, gate, up):
        from poros.kernels import swiglu_gpu

        return swiglu_gpu.silu_mul(gate, up)
    activated = _own(activation)(gate)
    return activated.mul_(up) if activated.dtype == up.dtype else activated * up


def _takes_kernel(activation: Activation, *tensors: torch.Tensor) -> bool:
    """Whether there is a kernel that computes all of it: of 16 bits, where all inputs are known."""
    first = tensors[0]
    return (
        type(activation) in _SILU
        and first.dtype in (torch.bfloat16, torch.float16)
        and runs_triton(first.device)
        and all(each.dtype == first.dtype and each.is_contiguous() for each in tensors)
    )


def _rows(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """``tensor`` in parts, so that what comes in between is small.

    Not on a CPU: where a vector instruction ends, its bits may be others.
    """
    if tensor.device.type == "cpu":
        return [tensor]
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows.split(max(1, _NUM_ELEMENTS // rows.shape[1]))
