"""Orders of the products of LoRA: their cost, which is chosen, and each against float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from poros.config import LORA_ORDERS
from poros.errors import RematerializationError
from poros.kernels.lora import Added, add_lora
from poros.kernels.ordered import InOrder, multiply_in_order
from poros.kernels.paths import LoraShape, Paths, candidates, cheapest, cost
from poros.kernels.product import product_of
from tests.support import same_bits
from tests.unit.lora_case import SIZES, Case, excess

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ORDERS = LORA_ORDERS[1:]
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
        assert candidates(given) == ["peft", "f1:b1", "f1:b2", "f1:b3"]
        assert cheapest(given) in candidates(given)
    assert Paths("f2:b5").order(given) == "f2:b5"


def test_dropout_takes_f1_and_b1_to_b3() -> None:
    given = shape(has_dropout=True)
    assert cheapest(given) in candidates(given) == ["peft", "f1:b1", "f1:b2", "f1:b3"]
    paths = Paths("f2:b5")
    assert paths.order(given) == "peft"
    assert Paths("f1:b2").order(given) == "f1:b2"


# ------------------------------------------------------------------ against float64


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
        assert max(excess(case, order, case.run(order))) <= 1, order


@pytest.mark.parametrize("order", ORDERS)
def test_control_a_wrong_scaling_is_outside_of_the_bound(order: str) -> None:
    case = Case("dense", "square", 8, True, 2.0 / 3.0)
    found = case.run(order)
    case.scaling *= 1 + 1e-3
    assert all(share > 1 for share in excess(case, order, found))


@pytest.mark.parametrize("order", ["f1:b1", "f1:b2", "f1:b3"])
def test_dropout_is_that_of_pefts_order(order: str) -> None:
    case = Case("dense", "tall", 8, True, 0.5)
    how = Added(0.5, 0.3, FP32, rounds=True, keeps_dtype=False)
    found = []
    for which in ("peft", order):
        input, a, b, bias = (
            each.clone().requires_grad_() for each in (case.input, case.a, case.b, case.bias)
        )
        known = product_of(case.module, input, leaves_out=True)
        torch.manual_seed(3)
        if which == "peft":
            sum_ = add_lora(known, input, a, b, bias, how)
        else:
            sum_ = multiply_in_order(InOrder(which, known, how), input, a, b, bias)
        gradients = torch.autograd.grad(sum_, (input, a, b, bias), case.arriving)
        found.append([sum_.detach(), *gradients, torch.get_rng_state()])
    for left, right in zip(*found, strict=True):
        assert torch.allclose(left.double(), right.double(), rtol=1e-4, atol=1e-4)
    assert same_bits(found[0][-1], found[1][-1])


@pytest.mark.parametrize("order", ["f2:b1", "f1:b4", "f1:b5"])
def test_what_is_lost_where_the_merged_weight_is_narrow(order: str) -> None:
    """An update of 2**-12 beside weights of 1 is gone in bfloat16, which has 8 bits."""
    module = nn.Linear(64, 64, bias=False, dtype=BF16).requires_grad_(False)
    module.weight.fill_(1.0)
    # Of rows that sum up to nothing, the base gives nothing beside which the update could be lost.
    sign = torch.cat([torch.ones(32), -torch.ones(32)])
    a, b = 2.0**-6 * sign.expand(8, 64), 2.0**-9 * sign[:, None].expand(64, 8)
    how = Added(1.0, 0.0, FP32, rounds=True, keeps_dtype=False)
    merged = []
    for which in ("f1:b1", order):
        with_it, without = (
            outcome(module, which, sign.to(BF16).expand(4, 64), a, update, how)
            for update in (b, torch.zeros_like(b))
        )
        merged = [same_bits(*pair) for pair in zip(with_it, without, strict=True)]
        if which == "f1:b1":
            assert merged == [False, False]
    assert merged == [order.startswith("f2"), order.endswith(("b4", "b5"))]


def outcome(
    module: Any, order: str, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, how: Added
) -> list[torch.Tensor]:
    """The sum for ``rows``, and the gradient of the input where the same rows arrive."""
    input = rows.clone().requires_grad_()
    known = product_of(module, input, leaves_out=True)
    assert known is not None
    sum_ = multiply_in_order(
        InOrder(order, known, how), input, a.contiguous(), b.contiguous(), None
    )
    return [sum_.detach(), *torch.autograd.grad(sum_, input, rows)]


# ------------------------------------------------------- the product of a frozen module

# That the one node of a product and what LoRA adds has the bits of two is seen in tests/exact.


def test_a_weight_written_to_before_backward_is_an_error() -> None:
    """As it is with plain torch."""
    case = Case("dense", "square", 2, True, 0.7)
    known = product_of(case.module, case.input, leaves_out=False)
    assert known is not None
    how = Added(0.7, 0.0, FP32, rounds=True, keeps_dtype=False)
    sum_ = add_lora(known, case.input.clone().requires_grad_(), case.a, case.b, None, how)
    case.module.weight.mul_(2)
    with pytest.raises(RematerializationError, match="written to in place"):
        sum_.sum().backward()
