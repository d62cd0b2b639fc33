"""LoRA's operator and gated activations on a GPU, to the bit; in models: test_adapters_on_gpu."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from poros.kernels import lora
from poros.kernels.lora import Added, add_lora, add_lora_ref
from poros.kernels.swiglu import swiglu, swiglu_ref
from tests.gpu.models import same

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(3584, 3584, 16), (512, 3584, 8), (18944, 3584, 16), (3584, 18944, 64), (33, 70, 4)]
DTYPES = [(BF16, FP32, FP32), (FP16, FP32, FP32), (FP32, FP32, FP32), (BF16, BF16, BF16)]
KINDS = [(True, False), (False, True)]


def outcome(run: Any, given: list[Any], *how: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    sum_ = run(*given, *how)
    state = torch.cuda.get_rng_state()
    generator = torch.Generator("cuda").manual_seed(1)
    arriving = torch.randn(sum_.shape, device="cuda", generator=generator).to(sum_.dtype)
    wanted = [each for each in given if each is not None]
    return [sum_.detach(), *torch.autograd.grad(sum_, wanted, arriving), state]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize("dropout", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("num_tokens", [7, 512, 2048])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_what_peft_computes(
    shape: tuple[int, int, int], num_tokens: int, dropout: float
) -> None:
    rows, columns, rank = shape
    for (dtype, adapters, middle), (rounds, keeps) in product(DTYPES, KINDS):
        given = [
            normal(2, num_tokens, rows, dtype=dtype),
            normal(2, num_tokens, columns, dtype=dtype),
            normal(rank, columns, dtype=adapters),
            normal(rows, rank, dtype=adapters),
        ]
        how = Added(2 / 3, dropout, middle, rounds, keeps)
        found, expected = (outcome(run, given, how) for run in (add_lora, add_lora_ref))
        assert all(map(same, found, expected)), (dtype, adapters, rounds)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_what_dropout_gave_is_made_again(dtype: torch.dtype) -> None:
    """For rates whose quotients round differently in float32 and float64."""
    input = torch.randn(64, 3001, device="cuda").to(dtype)
    differing = 0
    for percent in range(1, 100):
        p = percent / 100
        dropped, mask = torch.native_dropout(input, p, True)
        assert same(lora.drop(input, mask, p, dtype, dtype), dropped), p
        backward = torch.ops.aten.native_dropout_backward(input, mask, 1 / (1 - p))
        assert same(lora.drop(input, mask, p, dtype, dtype, is_gradient=True), backward), p
        differing += not same(backward, dropped)
    assert dtype is not FP32 or differing > 0


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "activation", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()], ids=str
)
def test_swiglu_equals_what_models_compute(activation: nn.Module, dtype: torch.dtype) -> None:
    """In several parts: see ``poros.kernels.swiglu``."""
    given = [normal(3, 1024, 18944, dtype=dtype) for _ in "ab"]
    assert all(map(same, *(outcome(run, given, activation) for run in (swiglu, swiglu_ref))))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_silu_of_every_gate(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    for scale in (0.0, 1e-6, 1.0, 1.0, 1.0, 1e4):
        up, arriving = (
            (scale * torch.randn(2**16, device="cuda", generator=generator)).to(dtype) for _ in "ab"
        )
        both = []
        for run in (swiglu, swiglu_ref):
            given = [each.clone().requires_grad_() for each in (every, up)]
            product_ = run(*given, nn.SiLU())
            gradients = torch.autograd.grad(product_, given, arriving)
            both.append([product_.detach(), *gradients])
        for found, expected in zip(*both, strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            assert same(found.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_a_hundred_times_the_same() -> None:
    given = [normal(512, 3584, dtype=BF16), normal(512, 18944, dtype=BF16)]
    given += [normal(16, 18944, dtype=FP32), normal(3584, 16, dtype=FP32)]
    how = Added(0.5, 0.05, FP32, True, False)
    expected = outcome(add_lora, given, how)
    for _ in range(100):
        assert all(map(same, outcome(add_lora, given, how), expected))
