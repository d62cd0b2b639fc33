"""Grouped adapters: finite differences, elementwise error bounds, and a result left out."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import GELUTanh

from poros.kernels.grouped import project
from poros.kernels.lazy_tensor import LazyTensor
from poros.kernels.swiglu import forget_parts, swiglu
from tests.support import same_bits
from tests.unit.grouped_case import (
    BF16,
    FP32,
    FP64,
    ROWS,
    Case,
    exact_case,
    gradient_shares,
    result_shares,
)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_results_and_gradients_are_within_their_bounds(dtype: torch.dtype) -> None:
    case = Case.random(dtype)
    results, gradients = case.run()
    assert [each.dtype for each in (*results, *gradients)] == [dtype] * 10
    assert max(result_shares(case, results)) <= 1
    assert max(gradient_shares(case, gradients)) <= 1
    exact = exact_case(dtype)
    assert result_shares(exact, exact.run()[0]) == [0.0]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_control_a_wrong_scale_is_out_of_the_bounds(dtype: torch.dtype) -> None:
    case, exact = Case.random(FP32), exact_case(dtype)
    wrong = 1 + 2.0**-6
    off = exact._replace(scalings=[each * wrong for each in exact.scalings])
    assert min(result_shares(exact, off.run()[0])) > 1
    off = case._replace(scalings=[each * wrong for each in case.scalings])
    results, gradients = off.run()
    assert min(result_shares(case, results)) > 1
    assert min(gradient_shares(case, gradients)) > 1


def flat(case: Case, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return project(case.with_trained(leaves).projections(), leaves[0])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradients_are_those_of_finite_differences(number: int) -> None:
    sizes: dict[str, Any] = {"rows": ROWS[:number], "columns": 12}
    case = Case.random(FP64, base_bias=True, **sizes)
    case = case._replace(
        input=case.input[:1, :3],
        all_a=[each[:2] for each in case.all_a],
        all_b=[each[:, :2] for each in case.all_b],
    )
    leaves = [each.contiguous().requires_grad_() for each in case.trained()]
    assert torch.autograd.gradcheck(lambda *given: flat(case, given), leaves, fast_mode=True)


@pytest.mark.parametrize("activation", [nn.SiLU(), GELUTanh()], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_left_out_is_computed_of_gate_and_up(
    dtype: torch.dtype, activation: nn.Module
) -> None:
    case = Case.random(dtype, rows=(64, 64))
    behind = Case.random(dtype, rows=(32,), columns=64)
    leaves = [each.detach().requires_grad_() for each in (*case.trained(), *behind.trained()[1:])]
    case = case.with_trained(leaves[:5])
    behind = behind._replace(all_a=[leaves[5]], all_b=[leaves[6]])
    gate, up = case.projections()
    (down,) = behind.projections()
    found = []
    for leaves_out in (False, True):
        torch.manual_seed(3)
        product = swiglu(*project([gate, up], case.input), activation)
        (result,) = project([down], product, leaves_out=leaves_out)
        assert isinstance(result, LazyTensor) == leaves_out
        forget_parts(product)
        del product
        result = result + 0  # reads it
        gradients = torch.autograd.grad(result, leaves, behind.arriving[0])
        found.append([result.detach(), *gradients, torch.get_rng_state()])
    assert all(map(same_bits, *found))
