"""The orders in which the products of a LoRA layer can be formed: their cost, and the node of one.

RunLoRA (Cherniuk et al., Table 1 and Appendix A) has two forwards and five backwards, none of which
keeps XA; ``docs/explanation/runlora.md`` has their formulas.

``peft`` is PEFT's own order, f1 and b1 with XA kept, as ``poros.kernels.lora`` computes it.

Note: The choice
    It depends on shapes, dtypes and the constants below alone, so that a forward, its
    recomputation, a replay and a resident model take the same order with every budget.

Note: The node
    It keeps input, A, B and the mask of dropout, but not XA; W + sAB is memory of its own, formed
    in forward and again in backward. Where base and adapters have one dtype, products are added to
    what is there. As PEFT holds them, ``weight`` is (rows, columns), A (rank, columns) and B (rows,
    rank): the paper's matrices transposed.

Note: Precision
    W + sAB has the dtype of the base. If that is narrower than float32, or its products are in
    TF32, small updates sAB are rounded away: f2, b4 and b5 run there only if asked for by name.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from poros.config import LORA_ORDERS
from poros.kernels.autocast import without_autocast
from poros.kernels.lazy_tensor import LazyTensor
from poros.kernels.lora import Added, Call, add_scaled, drop, dropout_of, sum_dtype
from poros.kernels.nodes import saved_tensors, times
from poros.kernels.product import Product
from poros.kernels.swiglu import input_from, sources_of

PEFT = LORA_ORDERS[0]
_FLOP_PER_S = {torch.float16: 989e12, torch.bfloat16: 989e12}
_OTHER_FLOP_PER_S, _TF32_FLOP_PER_S = 67e12, 495e12
"""Of float32 and float64; of float32 in TF32. All from the data sheet of NVIDIA's H100 SXM."""
_BYTES_PER_S = 3.35e12

# An (m x k) by (k x n) product is "mkn"; in capitals it runs in the dtype of the base, else in that
# of the adapters. With a plus it is added to what is there, if both have one dtype.
_PRODUCTS = {
    "f1": ("TIO", "tir", "tro+"),
    "f2": ("ori+", "TIO"),
    "b1": ("tor", "tir", "itr", "rto", "TOI", "tri+"),
    "b2": ("tor", "ito", "itr", "rio", "TOI", "tri+"),
    "b3": ("tor", "ito", "ior", "rio", "TOI", "tri+"),
    "b4": ("ori+", "ito", "ior", "rio", "TOI"),
    "b5": ("ori+", "tor", "tir", "itr", "rto", "TOI"),
    PEFT: ("tor", "itr", "rto", "TOI", "tri"),
}
# Elementwise work where dtypes differ: over what, how often in the base's, in the adapters' dtype.
_CASTS = {
    "f1": (("ti", 1, 1), ("to", 2, 1)),
    "f2": (("io", 2, 2),),
    **dict.fromkeys(("b1", "b2", "b3", PEFT), (("ti", 5, 2), ("to", 1, 1))),
    **dict.fromkeys(("b4", "b5"), (("ti", 1, 1), ("to", 1, 1), ("io", 2, 2))),
}
_OF_PEFT = (("to", 4, 0), ("ti", 3, 0))
"""Where they are the same: PEFT's order scales and adds by kernels of their own."""


class LoraShape(NamedTuple):
    """All that the choice of an order depends on."""

    tokens: int
    columns: int
    """Inputs."""
    rows: int
    """Outputs."""
    rank: int
    base: torch.dtype
    adapters: torch.dtype
    has_dropout: bool = False
    is_4bit: bool = False
    has_tf32: bool = False

    def __str__(self) -> str:
        base, adapters = (str(dtype).removeprefix("torch.") for dtype in (self.base, self.adapters))
        others = ", 4-bit" * self.is_4bit + ", dropout" * self.has_dropout
        others += ", TF32" * self.has_tf32
        sizes = f"{self.tokens} tokens, {self.columns} to {self.rows}, rank {self.rank}"
        return f"{sizes}, {base} with {adapters}{others}"


class Cost(NamedTuple):
    """Of one call, forward and backward."""

    flop: int
    seconds: float


def cost(order: str, shape: LoraShape) -> Cost:
    """FLOPs (Table 1 of the paper), and FLOPs over rates plus bytes over bandwidth.

    Args:
        order: As in ``LORA_ORDERS``; or one forward or backward.
        shape: Of the layer and its input.
    """
    sizes = dict(zip("tior", shape[:4], strict=True))
    base, own = shape.base, shape.adapters
    is_mixed, total, num_bytes, seconds = base != own, 0, 0, 0.0
    steps = ("f1", PEFT) if order == PEFT else order.split(":")
    for step in steps:
        for product in _PRODUCTS[step]:
            m, k, n = (sizes[letter] for letter in product[:3].lower())
            dtype, is_added = base if product.isupper() else own, "+" in product and not is_mixed
            rate = _FLOP_PER_S.get(dtype, _OTHER_FLOP_PER_S)
            if shape.has_tf32 and dtype == torch.float32:
                rate = _TF32_FLOP_PER_S
            total += 2 * m * k * n
            seconds += 2 * m * k * n / rate
            num_bytes += (m * k + k * n + m * n * (1 + is_added)) * dtype.itemsize
        extras = _CASTS[step] if is_mixed else _OF_PEFT if step == PEFT else ()
        for area, of_base, of_own in extras:
            size = of_base * base.itemsize + of_own * own.itemsize
            num_bytes += sizes[area[0]] * sizes[area[1]] * size
    return Cost(total, seconds + num_bytes / _BYTES_PER_S)


def merges(order: str) -> bool:
    """Whether an order forms W + sAB, and so is not defined with dropout."""
    return order in LORA_ORDERS[1:] and (order[:2] == "f2" or order[3:] in ("b4", "b5"))


def candidates(shape: LoraShape) -> list[str]:
    """The orders that may be chosen for a shape, PEFT's first."""
    is_narrow = torch.finfo(shape.base).eps > torch.finfo(torch.float32).eps
    is_narrow |= shape.has_tf32 and shape.base == torch.float32
    return [each for each in LORA_ORDERS if not (merges(each) and (is_narrow or shape.has_dropout))]


@cache
def cheapest(shape: LoraShape) -> str:
    """The candidate that costs least; of equals the first."""
    return min(candidates(shape), key=lambda order: cost(order, shape).seconds)


def multiply_in_order(
    order: str, input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, call: Call
) -> torch.Tensor:
    """``poros.kernels.lora.add_lora`` of a product, formed in another order such as ``"f2:b5"``.

    With dropout f1 and b1 to b3 are defined.

    Exactness:
        Within rounding of ``add_lora``; the same order gives the same bits.

    Source:
        Cherniuk et al., Run LoRA Run, equations 1 to 3 and Appendix A.
    """
    sum_: torch.Tensor = _Ordered.apply(input, b, a, order, call)
    return sum_


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        order: str,
        call: Call,
    ) -> torch.Tensor:
        how: Added = call.how
        product: Any = call.product
        hidden = mask = None
        if how.dropout:
            dropped, mask = dropout_of(input.to(how.dtype), how.dropout)
            hidden = times(dropped.to(a.dtype), a)
            del dropped
        ctx.save_for_backward(product.weight, b, a, mask, *sources_of(input))
        ctx.order, ctx.how, ctx.product = order, how, product._replace(weight=None)
        ctx.owner, ctx.shape, ctx.dtype = call.owner, input.shape, input.dtype
        ctx.set_materialize_grads(False)
        dtype = sum_dtype(input.dtype, b.dtype, how)

        def form() -> torch.Tensor:
            if order[:2] == "f2":
                merged = _merged(product, a, b, how.scaling, input.dtype)
                return times(input, merged, product.bias).to(dtype)
            result = product.of(input)
            inner = times(input.to(how.dtype).to(a.dtype), a) if hidden is None else hidden
            if result.dtype == b.dtype and result.is_contiguous():
                inner = inner.reshape(-1, b.shape[1])
                result.view(-1, b.shape[0]).addmm_(inner, b.t(), alpha=how.scaling)
                # Where the module's own result is a view, nobody could write to it in place.
                return torch.ops.aten._unsafe_view(result, result.shape)
            return add_scaled(result, times(inner, b), how)

        if not call.leaves_out:
            return form()
        shape = (*input.shape[:-1], product.num_rows)
        return LazyTensor(shape, dtype, input.device, form, [input, b, a])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        # A region around the backward alone would cast for some of its products, and not for all.
        with without_autocast(gradient.device):
            return _backward(ctx, gradient)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, b, a, mask, *sources = saved_tensors(ctx)
    product: Product = ctx.product._replace(weight=weight)
    how, scaling, order = ctx.how, ctx.how.scaling, ctx.order[3:]
    wants_input, wants_b, wants_a, *_ = ctx.needs_input_grad
    is_merged = order in ("b4", "b5")
    of_input = of_b = of_a = of_hidden = outer = None
    rows = gradient.to(a.dtype).reshape(-1, b.shape[0])
    if (wants_a and order in ("b1", "b2", "b5")) or (wants_input and not is_merged):
        of_hidden = rows.mm(b).mul_(scaling)
    if wants_a or wants_b:
        input = input_from(sources)
        seen = drop(input, mask, how.dropout, how.dtype, a.dtype).reshape(-1, a.shape[1])
        del input
        if order in ("b3", "b4") or (wants_b and order == "b2"):
            outer = rows.t().mm(seen)  # X'dY of the paper, transposed
        if wants_b:
            inner = rows.t().mm(seen.mm(a.t())) if outer is None else outer.mm(a.t())
            of_b = inner.mul_(scaling)
        if wants_a and outer is not None and order != "b2":
            of_a = b.t().mm(outer).mul_(scaling)
        elif wants_a and of_hidden is not None:
            of_a = of_hidden.t().mm(seen)
        del seen, outer
    del rows
    if wants_input:
        arriving = gradient.to(ctx.dtype).reshape(-1, b.shape[0])
        if is_merged or of_hidden is None:
            of_input = arriving.mm(_merged(product, a, b, scaling, ctx.dtype)).view(ctx.shape)
        else:
            of_input = product.gradient(arriving)
            if mask is None and of_input.dtype == of_hidden.dtype:
                of_input = of_input.addmm_(of_hidden, a).view(ctx.shape)
            else:
                of_lora = of_hidden.mm(a).view(ctx.shape)
                of_lora = drop(of_lora, mask, how.dropout, how.dtype, ctx.dtype, is_gradient=True)
                of_input = of_input.view(ctx.shape).add_(of_lora)
    return of_input, of_b, of_a, None, None


def _merged(
    product: Product, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """W + sAB, rounded to ``dtype`` once: (rows, columns), memory of its own."""
    wide = torch.promote_types(dtype, a.dtype)
    weight = product.dense(dtype).to(wide)
    return torch.addmm(weight, b.to(wide), a.to(wide), alpha=scaling).to(dtype)
