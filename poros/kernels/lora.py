"""What LoRA adds to the result of a linear module: one autograd node, with the bits of PEFT's own.

For an input x, matrices A and B and a scaling s (Hu et al. 2021, LoRA, equation 3)

    result + s * B(A(dropout(x)))

PEFT computes it in five to eight operators, and autograd keeps x in the dtype of the adapters for
each projection, which for float32 adapters is twice the size of x. Here x itself is kept, which
others keep too, and what surrounds the matrix products is one kernel each. The products are the
library's, of the same shapes and layouts, so that no bit changes.

Where the product of the linear module is known too, it is part of the node.

Note: Order
    The node comes behind the one of the linear module, so autograd differentiates it first, as it
    does PEFT's; a node that is both gives its input the two gradients one after the other.
    Contributions to the gradient of an input that several projections share are added up in PEFT's
    order, and so the adapters get their gradients: B, then A.
"""

from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels.lazy_tensor import LazyTensor, values_of
from poros.kernels.nodes import saved_tensors, times
from poros.kernels.product import Product
from poros.kernels.swiglu import input_from, sources_of
from poros.utils.devices import runs_triton


class ActiveLora(NamedTuple):
    """What an adapted linear module of PEFT adds now."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    dropout: float
    magnitude: torch.Tensor | None
    """DoRA's; None if it is LoRA."""


class Added(NamedTuple):
    """How something is added: in PEFT it depends on the module and on autocast."""

    scaling: float
    dropout: float
    """Probability; 0 where there is none, or outside of training."""
    dtype: torch.dtype
    """Of the input as dropout sees it."""
    rounds: bool
    """Whether what is added is rounded to the dtype of ``result`` before it is added."""
    keeps_dtype: bool
    """Whether the sum is brought to the dtype of ``result``."""


class Call(NamedTuple):
    """What a node is given besides tensors."""

    how: Added
    product: Product | None = None
    """Of the linear module with the input, if it is part of the node."""
    owner: object = None
    """Whoever calls; the node in the graph has it as ``owner``."""
    leaves_out: bool = False
    """Whether the values of the sum with a product are computed only if somebody reads them."""


def add_lora(
    result: torch.Tensor | None,
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """The result of a linear module and what LoRA adds to it.

    Args:
        result: Of the linear module, of shape (..., rows). Gets a gradient, as all tensors here.
            None if the product is part of the node.
        input: Of shape (..., columns), contiguous, not empty.
        a: Of shape (rank, columns), in the dtype of the products.
        b: Of shape (rows, rank), likewise.

    Returns:
        Of shape (..., rows), in the dtype of the result, or if ``how`` does not keep that, in the
        one that both are promoted to. A ``LazyTensor`` if it is left out.

    Streams:
        Queued on the current stream. Draws the random numbers that dropout draws. Kept for backward
        are ``input``, A, B, the product with A and the mask of dropout. Of an input that is a
        gated activation (``poros.kernels.swiglu``) gate and up are kept, and it is made again.

    Exactness:
        The bits of ``add_lora_ref`` to what the module gives, forward and gradients, at every tier.
    """
    again = None if call.product is None else input  # for the second of its gradients
    sum_: torch.Tensor = _AddLora.apply(result, input, b, a, again, call)
    return sum_


def add_lora_ref(
    result: torch.Tensor,
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    how: Added,
) -> torch.Tensor:
    """``add_lora`` as PEFT computes it."""
    dropped = nn.functional.dropout(input.to(how.dtype), how.dropout)
    hidden = nn.functional.linear(dropped.to(a.dtype), a)
    added = nn.functional.linear(hidden, b) * how.scaling
    sum_ = result + (added.to(result.dtype) if how.rounds else added)
    return sum_.to(result.dtype) if how.keeps_dtype else sum_


class _AddLora(torch.autograd.Function):
    # B before A: of two equal nodes, autograd takes the first.
    @staticmethod
    def forward(
        ctx: Any,
        result: Any,
        input: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        again: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        how: Added = call.how
        product: Any = call.product
        # Before the others, as PEFT has it: one at a time needs memory.
        formed = None
        if not call.leaves_out:
            formed = values_of(result) if product is None else product.of(input)
        dropped, mask = dropout_of(input.to(how.dtype), how.dropout)
        hidden = times(dropped.to(a.dtype), a)
        del dropped
        sources = sources_of(input)
        # As PEFT's operators keep them: an adapter that is given other data later is not read.
        weight = None if product is None or again is None else product.weight
        ctx.save_for_backward(weight, b.detach(), a.detach(), hidden, mask, *sources)
        ctx.product = None if product is None else product._replace(weight=None)
        ctx.how, ctx.owner = how, call.owner
        ctx.result_dtype = input.dtype if result is None else result.dtype
        ctx.input_form = input.shape, input.dtype, input.device
        ctx.set_materialize_grads(False)
        if formed is not None:
            return add_scaled(formed, times(hidden, b), how)

        def form() -> torch.Tensor:
            return add_scaled(product.of(input), times(hidden, b), how)

        shape = (*input.shape[:-1], product.num_rows)
        dtype = sum_dtype(ctx.result_dtype, b.dtype, how)
        return LazyTensor(shape, dtype, input.device, form, [input, hidden, b])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        shape, dtype, device = ctx.input_form
        wants_result, wants_input, wants_b, wants_a, wants_again, _ = ctx.needs_input_grad
        if gradient is None:
            # What bitsandbytes' node makes of a gradient that is lost.
            makes_zeros = wants_again and ctx.product.state is not None
            zeros = torch.zeros(shape, dtype=dtype, device=device) if makes_zeros else None
            return None, None, None, None, zeros, None
        weight, b, a, hidden, mask, *sources = saved_tensors(ctx)
        how: Added = ctx.how
        of_input = of_b = of_a = of_again = None
        scaled = scale(gradient, how.scaling, hidden.dtype).reshape(-1, b.shape[0])
        if wants_b:
            of_b = scaled.t().mm(hidden.reshape(-1, b.shape[1]))
        if wants_a or wants_input:
            # Of one number autograd takes it that it lies in columns, and turns the product over.
            of_hidden = scaled.mm(b) if hidden.numel() > 1 else b.t().mm(scaled.t()).t()
            of_hidden = of_hidden.to(hidden.dtype)  # as autograd, if autocast is another
            del scaled
            if wants_a:
                input = input_from(sources)
                dropped = drop(input, mask, how.dropout, how.dtype, a.dtype)
                del input
                of_a = of_hidden.t().mm(dropped.reshape(-1, a.shape[1]))
                del dropped
            if wants_input:
                of_dropped = of_hidden.mm(a).to(a.dtype).view(shape)
                of_input = drop(of_dropped, mask, how.dropout, how.dtype, dtype, is_gradient=True)
                del of_dropped  # before a weight is there
        of_result = gradient.to(ctx.result_dtype) if wants_result or wants_again else None
        if wants_again:
            of_again = ctx.product._replace(weight=weight).gradient(of_result)
            of_result = None
        return of_result, of_input, of_b, of_a, of_again, None


def dropout_of(input: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``nn.functional.dropout`` in training, and by what it has multiplied."""
    if not p:
        return input, None
    if input.is_cuda:
        return torch.native_dropout(input, p, True)
    if input.is_meta:
        return torch.empty_like(input), torch.empty_like(input, dtype=torch.bool)
    noise = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
    return input * noise, noise


def add_scaled(result: torch.Tensor, added: torch.Tensor, how: Added) -> torch.Tensor:
    """``result`` + scaling * ``added``, each step rounded as in PEFT. Overwrites ``added``."""
    if result.shape == added.shape and _takes_kernel(result, added):
        from poros.kernels import lora_gpu

        dtype = sum_dtype(result.dtype, added.dtype, how)
        return lora_gpu.add_scaled(result, added, how.scaling, how.rounds, dtype)
    added = added.mul_(how.scaling)
    if how.rounds:
        added = added.to(result.dtype)
    if added.dtype == torch.promote_types(result.dtype, added.dtype):
        sum_ = torch.add(result, added, out=added)
    else:
        sum_ = result + added
    return sum_.to(result.dtype) if how.keeps_dtype else sum_


def sum_dtype(result: torch.dtype, added: torch.dtype, how: Added) -> torch.dtype:
    """Of a result and what is added, of these dtypes."""
    return result if how.keeps_dtype or how.rounds else torch.promote_types(result, added)


def scale(gradient: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` in ``dtype``, times ``scaling``; itself where that changes nothing."""
    if scaling == 1 and gradient.dtype == dtype and gradient.is_contiguous():
        return gradient
    if gradient.dtype != dtype and _takes_kernel(gradient):
        from poros.kernels import lora_gpu

        return lora_gpu.scale(gradient, scaling, dtype)
    return gradient * scaling if gradient.dtype == dtype else gradient.to(dtype).mul_(scaling)


def drop(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    middle: torch.dtype,
    dtype: torch.dtype,
    is_gradient: bool = False,
) -> torch.Tensor:
    """What dropout in the dtype ``middle`` has made of ``values``, in ``dtype``.

    If ``is_gradient``, they are the gradient of its result, and this is that of its input.
    """
    if mask is None:
        return values.to(middle).to(dtype)
    if mask.dtype != torch.bool:
        return values.to(middle, copy=True).mul_(mask).to(dtype)
    factor = 1 / (1 - p) if is_gradient else _forward_scale(p, middle)
    if _takes_kernel(values, mask):
        from poros.kernels import lora_gpu

        return lora_gpu.masked(values, mask, factor, middle, dtype)
    exact = torch.promote_types(middle, torch.float32)
    values = values.to(middle).to(exact, copy=True).mul_(mask).mul_(factor)
    return values.to(middle).to(dtype)


def _forward_scale(p: float, dtype: torch.dtype) -> float:
    """By what dropout multiplies in its forward on a GPU: a quotient in the dtype it computes in.

    Its backward multiplies by the quotient in float64, rounded: not always the same.
    """
    if dtype == torch.float64:
        return 1 / (1 - p)
    (kept,) = unpack("f", pack("f", 1 - p))
    return float(1 / kept)


def _takes_kernel(*tensors: torch.Tensor) -> bool:
    return runs_triton(tensors[0].device) and all(
        tensor.is_contiguous() and tensor.dtype != torch.float64 for tensor in tensors
    )
