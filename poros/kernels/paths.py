"""In which order the products of a LoRA layer are formed, and what each order costs.

RunLoRA (Cherniuk et al., Table 1 and Appendix A) has two forwards and five backwards, none of which
keeps XA; ``docs/explanation/runlora.md`` has their formulas.

``peft`` is PEFT's own order, f1 and b1 with XA kept, as ``poros.kernels.lora`` computes it.

Note: The choice
    It depends on shapes, dtypes and the constants below alone, so that a forward, its
    recomputation, a replay and a resident model take the same order with every budget.

Note: Precision
    W + sAB has the dtype of the base. If that is narrower than float32, or its products are in
    TF32, small updates sAB are rounded away: f2, b4 and b5 run there only if asked for by name.
"""

from functools import cache
from typing import NamedTuple

import torch

from poros.config import LORA_ORDERS

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
        marks = zip((", 4-bit", ", dropout", ", TF32"), self[7:5:-1] + self[8:], strict=True)
        others = "".join(mark for mark, is_so in marks if is_so)
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
    """Whether an order forms W + sAB."""
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


def order_of(wanted: str, shape: LoraShape) -> str:
    """The order for a shape; PEFT's if the one asked for is not defined with dropout.

    Args:
        wanted: ``lora_paths`` as in ``StreamingPolicy``.
        shape: Of the layer and its input.
    """
    if wanted == "flops":
        return cheapest(shape)
    return PEFT if shape.has_dropout and merges(wanted) else wanted
