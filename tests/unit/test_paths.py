"""Orders of the products of LoRA: their cost, which is chosen, and each against float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from poros.config import LORA_ORDERS
from poros.kernels.lora import Added, Call, add_lora
from poros.kernels.paths import LoraShape, candidates, cheapest, cost, multiply_in_order
from poros.kernels.product import product_of
from tests.unit.rounding import exact, gamma, shares, sizes

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ORDERS = LORA_ORDERS[1:]
UNMERGED = ["peft", "f1:b1", "f1:b2", "f1:b3"]
STEPS = ("f1", "f2", "b1", "b2", "b3", "b4", "b5")


def by_the_paper(n: int, i: int, o: int, r: int) -> dict[str, int]:
    """Table 1, with n for the tokens."""
    return {
        "f1": 2 * n * (i * o + r * i + o * r),
        "f2": 2 * (i * o * r + n * o * i),
        "b1": 2 * n * (2 * o * r + 3 * i * r + o * i),
        "b2": 2 * n * (o * r + 2 * i * r + 2 * i * o) + 2 * i * o * r,
        "b3": 2 * n * (2 * i * o + o * r + i * r) + 4 * i * r * o,
        "b4": 2 * (2 * n * i * o + 3 * i * o * r),
        "b5": 2 * n * (2 * o * r + 2 * i * r + o * i) + 2 * i * o * r,
    }


@pytest.mark.parametrize("sizes", [(1, 2, 3, 5), (7, 64, 48, 8), (34816, 768, 2560, 256)])
def test_flops_are_those_of_table_1(sizes: tuple[int, int, int, int]) -> None:
    given = shape(*sizes)
    assert {step: cost(step, given).flop for step in STEPS} == by_the_paper(*sizes)


def shape(n: int = 4096, i: int = 768, o: int = 768, r: int = 64, **others: Any) -> LoraShape:
    return LoraShape(n, i, o, r, **{"base": FP32, "adapters": FP32, **others})


def test_what_is_chosen() -> None:
    assert cheapest(shape()) == "f2:b5"
    assert cheapest(shape(n=64)) in ("peft", "f1:b1")
    assert cheapest(shape(n=34816, r=512)).startswith("f2:")
    # The ties go to the first.
    nothing = LoraShape(0, 0, 0, 0, FP32, FP32)
    assert cheapest(nothing) == "peft"
    assert cost("f1:b1", shape(n=1)).flop > cost("peft", shape(n=1)).flop


@pytest.mark.parametrize("base", [BF16, torch.float16])
@pytest.mark.parametrize("adapters", [FP32, BF16])
def test_a_narrow_base_never_merges_unless_asked(base: torch.dtype, adapters: torch.dtype) -> None:
    for n, i, r in product((1, 512, 51200), (64, 1024, 4096), (8, 128, 512)):
        given = shape(n, i, i, r, base=base, adapters=adapters)
        assert candidates(given) == UNMERGED
        assert cheapest(given) in candidates(given)


def test_with_dropout_nothing_is_merged() -> None:
    assert cheapest(shape(has_dropout=True)) in candidates(shape(has_dropout=True)) == UNMERGED


# ------------------------------------------------------------------ against float64

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

    def __init__(
        self, kind: str, size: str, rank: int, bias: bool, scaling: float, dropout: float = 0.0
    ) -> None:
        i, o = SIZES[size]
        self.module = frozen(kind, i, o, bias)
        self.scaling, self.dropout = scaling, dropout
        self.input, self.arriving = (normal(2, 24, n) for n in (i, o))
        self.a = normal(rank, i, seed=2) / i**0.5
        self.b = normal(o, rank, seed=3) / rank**0.5
        torch.manual_seed(4)
        self.mask = nn.functional.dropout(torch.ones_like(self.input), dropout)

    def run(self, order: str) -> list[torch.Tensor]:
        given = [each.clone().requires_grad_() for each in (self.input, self.b, self.a)]
        input, b, a = given
        known = product_of(self.module, input)
        assert known is not None
        how = Added(self.scaling, self.dropout, FP32, rounds=True, keeps_dtype=False)
        call = Call(how, known)
        torch.manual_seed(4)
        if order == "peft":
            sum_ = add_lora(None, input, a, b, call)
        else:
            sum_ = multiply_in_order(order, input, a, b, call)
        gradients = torch.autograd.grad(sum_, given, self.arriving)
        return [sum_.detach(), *gradients]

    def excess(self, order: str, found: list[torch.Tensor]) -> list[float]:
        """The largest error of each of ``run`` as a share of its bound."""
        known = product_of(self.module, self.input)
        assert known is not None
        weight = known.dense(FP32)
        bias = torch.zeros(len(weight)) if known.bias is None else known.bias
        given = (self.input, self.b, self.a), (weight, bias, torch.tensor(self.scaling), self.mask)
        given = *given, (self.arriving,)
        # Of a merged weight, too: each element is a sum of as many products as there are ranks.
        depth = sum(weight.shape) + len(self.a) + self.input[..., 0].numel() + 8
        bounds = [gamma(depth) * each for each in sizes(formula, *given)]
        return shares(found, exact(formula, *given), bounds)


def formula(
    input: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scaling: torch.Tensor,
    mask: torch.Tensor,
) -> list[torch.Tensor]:
    return [input @ weight.T + scaling * (mask * input) @ (b @ a).T + bias]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize(("bias", "scaling"), [(False, 1.0), (True, 2.0 / 3.0), (True, 16.0)])
@pytest.mark.parametrize("rank", [8, 64, 512])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_every_order_is_within_its_bound(
    kind: str, size: str, rank: int, bias: bool, scaling: float
) -> None:
    case = Case(kind, size, rank, bias, scaling)
    for order in LORA_ORDERS:
        assert max(case.excess(order, case.run(order))) <= 1, order


@pytest.mark.parametrize("order", UNMERGED)
def test_with_dropout_it_is_within_its_bound(order: str) -> None:
    case = Case("dense", "square", 8, True, 16.0, dropout=0.3)
    found = case.run(order)
    assert max(case.excess(order, found)) <= 1
    case.mask = torch.ones(())
    assert all(share > 1 for share in case.excess(order, found))


@pytest.mark.parametrize("order", ORDERS)
def test_control_a_wrong_scaling_is_outside_of_the_bound(order: str) -> None:
    case = Case("dense", "square", 8, True, 2.0 / 3.0)
    found = case.run(order)
    case.scaling *= 1 + 1e-3
    assert all(share > 1 for share in case.excess(order, found))
