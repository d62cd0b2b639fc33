"""A frozen linear module with LoRA in any order of products, beside float64, with error bounds.

Bounds are Higham's: a sum of n products, in any order, is off by at most gamma(n) times the sum of
their absolute values, with gamma(n) = nu / (1 - nu) and u the unit roundoff.
"""

from typing import Any

import torch
from torch import nn

from poros.kernels.lora import Added, add_lora
from poros.kernels.paths import InOrder, multiply_in_order
from poros.kernels.product import product_of

FP32 = torch.float32
SIZES = {"wide": (48, 640), "tall": (640, 48), "square": (192, 192)}


def frozen(kind: str, i: int, o: int, bias: bool) -> Any:
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Linear(i, o, bias=bias).requires_grad_(False)
    from bitsandbytes.nn import Linear4bit

    made = Linear4bit(i, o, bias=bias, compute_dtype=FP32, quant_type="nf4").to("cpu")
    made.compute_type_is_set = True
    return made.requires_grad_(False)


def normal(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


class Case:
    """One layer with what arrives from both sides, and what float64 makes of it."""

    def __init__(self, kind: str, size: str, rank: int, bias: bool, scaling: float) -> None:
        i, o = SIZES[size]
        self.module = frozen(kind, i, o, bias)
        self.scaling = scaling
        self.input, self.arriving = (normal(2, 24, n) for n in (i, o))
        self.a = normal(rank, i, seed=2) / i**0.5
        self.b = normal(o, rank, seed=3) / rank**0.5

    def run(self, order: str, leaves_out: bool = False) -> list[torch.Tensor]:
        given = [each.clone().requires_grad_() for each in (self.input, self.b, self.a)]
        input, b, a = given
        known = product_of(self.module, input, leaves_out=True)
        assert known is not None
        how = Added(self.scaling, 0.0, FP32, rounds=True, keeps_dtype=False)
        if order == "peft":
            sum_ = add_lora(known, input, a, b, how, leaves_out=leaves_out)
        else:
            call = InOrder(order, known, how, leaves_out=leaves_out)
            sum_ = multiply_in_order(call, input, a, b)
        gradients = torch.autograd.grad(sum_, given, self.arriving)
        return [sum_.detach(), *gradients]

    def bounds(self, order: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is exact and by how much each may differ, as in ``run``."""
        known = product_of(self.module, self.input, leaves_out=True)
        assert known is not None
        w, x = known.dense(FP32).double(), self.input.double().flatten(0, -2)
        a, b, g = self.a.double(), self.b.double(), self.arriving.double().flatten(0, -2)
        s, (o, r), (n, i) = self.scaling, b.shape, x.shape
        of_base = 0.0 if known.bias is None else known.bias.double()
        merged = w + s * b @ a
        first, second = order.split(":") if order != "peft" else ("f1", "b1")
        # Of a merged weight, its own rounding, and that of sAB beside it.
        ab = abs(s) * b.abs() @ a.abs()
        off = gamma(2) * merged.abs() + gamma(r + 2) * ab
        if first == "f2":
            size = x.abs() @ (merged.abs() + off).T + abs(of_base)
            forward = gamma(i + 4) * size + x.abs() @ off.T
        else:
            size = x.abs() @ (w.abs() + ab).T + abs(of_base)
            forward = gamma(i + r + 6) * size
        found = [(x @ merged.T + of_base, forward)]
        if second in ("b4", "b5"):
            into = gamma(o) * (g.abs() @ (merged.abs() + off)) + g.abs() @ off
        else:
            into = gamma(o + r + 6) * (g.abs() @ (w.abs() + ab))
        found.append((g @ merged, into))
        depth = gamma(n + i + 3), gamma(n + o + 3)
        of_b = abs(s) * g.abs().T @ x.abs() @ a.abs().T
        of_a = abs(s) * b.abs().T @ g.abs().T @ x.abs()
        found.append((s * g.T @ x @ a.T, depth[0] * of_b))
        found.append((s * b.T @ g.T @ x, depth[1] * of_a))
        return found


def gamma(n: int, unit: float = 2.0**-24) -> float:
    return n * unit / (1 - n * unit)


def excess(case: Case, order: str, found: list[torch.Tensor]) -> list[float]:
    """The largest error of each as a share of its bound."""
    shares = []
    for value, (exact, bound) in zip(found, case.bounds(order), strict=True):
        error = (value.double().reshape(exact.shape) - exact).abs()
        shares.append(float((error / bound.clamp_min(1e-300)).max()))
    return shares
