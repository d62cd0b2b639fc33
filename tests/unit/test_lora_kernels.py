"""``add_lora`` and ``swiglu`` against their references, bit for bit: a CPU and the interpreter.

The interpreter rounds float32 and float16 as a GPU does, but not bfloat16: that is for tests/gpu.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from poros.kernels import lora
from poros.kernels.lora import Added, add_lora, add_lora_ref
from poros.kernels.swiglu import swiglu, swiglu_ref
from tests.support import interpreted, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, RANK = 48, 80, 8


def added(
    dtype: torch.dtype,
    dropout: float = 0.0,
    *,
    rounds: bool = True,
    keeps: bool = False,
    scaling: float = 2.0 / 3.0,
) -> Added:
    return Added(scaling, dropout, dtype, rounds, keeps)


def tensors(dtype: torch.dtype, adapters: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator)
        return values.to(dtype).requires_grad_()

    return [
        normal(2, 7, ROWS, dtype=dtype),
        normal(2, 7, COLUMNS, dtype=dtype),
        normal(RANK, COLUMNS, dtype=adapters),
        normal(ROWS, RANK, dtype=adapters),
    ]


def outcome(
    run: Callable[..., torch.Tensor], given: list[torch.Tensor], how: Any
) -> list[torch.Tensor]:
    """The sum, all gradients, and the random state behind it."""
    torch.manual_seed(3)
    sum_ = run(*given, how)
    state = torch.get_rng_state()
    arriving = torch.randn(sum_.shape, generator=torch.Generator().manual_seed(1)).to(sum_.dtype)
    wanted = [each for each in given if each.requires_grad]
    return [sum_.detach(), *torch.autograd.grad(sum_, wanted, arriving), state]


def differing(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[int]:
    return [
        number for number, pair in enumerate(zip(left, right, strict=True)) if not same_bits(*pair)
    ]


# The dtypes of a model, of its adapters, and of what dropout sees.
DTYPES = [(BF16, FP32, FP32), (FP16, FP32, FP32), (FP32, FP32, FP32), (BF16, BF16, BF16)]
AS_PEFT = {"4-bit": {"rounds": True, "keeps": False}, "dense": {"rounds": False, "keeps": True}}
# Under autocast PEFT's dense modules cast before dropout, and 4-bit ones not at all.
AUTOCAST = [
    ((FP32, BF16, FP32), {"rounds": False, "keeps": True}),
    ((BF16, BF16, FP32), {"rounds": False, "keeps": True}),
    ((FP32, BF16, FP32), {"rounds": False, "keeps": False}),
    ((BF16, FP16, BF16), {"rounds": False, "keeps": False}),
]
CASES = [*product(DTYPES, AS_PEFT.values()), *AUTOCAST]


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize(("dtypes", "kind"), CASES)
def test_equals_what_peft_computes(
    dtypes: tuple[torch.dtype, ...], kind: dict[str, bool], dropout: float
) -> None:
    how = added(dtypes[2], dropout, **kind)
    given = tensors(*dtypes[:2])
    expected = outcome(add_lora_ref, given, how)
    assert differing(outcome(add_lora, given, how), expected) == []
    assert lora.sum_dtype(*dtypes[:2], how) == expected[0].dtype


ACTIVATIONS = [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()]


def gate_and_up(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 5, COLUMNS, generator=generator).to(dtype).requires_grad_() for _ in "ab"
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_swiglu_equals_what_models_compute(activation: nn.Module, dtype: torch.dtype) -> None:
    """Whichever part is frozen."""
    for frozen in ([], [0], [1]):
        given: list[torch.Tensor] = []
        for number, part in enumerate(gate_and_up(dtype)):
            given.append(part.requires_grad_(number not in frozen))
        both = [outcome(run, given, activation) for run in (swiglu, swiglu_ref)]
        assert differing(*both) == []


# ------------------------------------------------------------------- kernels


@pytest.fixture
def gpu() -> Any:
    return interpreted("poros.kernels.lora_gpu")


def values(dtype: torch.dtype, num: int = 5000) -> torch.Tensor:
    found = torch.randn(num, generator=torch.Generator().manual_seed(num)).to(dtype)
    found[:3] = torch.tensor([float("inf"), float("-inf"), -0.0]).to(dtype)
    return found


@pytest.mark.parametrize(("dtype", "of_added"), [(FP32, FP32), (FP16, FP32), (FP16, FP16)])
@pytest.mark.parametrize("kind", AS_PEFT)
def test_kernels_add_scaled_and_scale(
    gpu: Any, dtype: torch.dtype, of_added: torch.dtype, kind: str
) -> None:
    how = added(FP32, **AS_PEFT[kind])
    result, term = values(dtype), values(of_added, 5001)[:5000]
    expected = lora.add_scaled(result, term.clone(), how)
    dtype = lora.sum_dtype(result.dtype, term.dtype, how)
    found = gpu.add_scaled(result, term.clone(), how.scaling, how.rounds, dtype)
    assert same_bits(found, expected)
    gradient = values(FP16)
    assert same_bits(gpu.scale(gradient, 2 / 3, FP32), lora.scale(gradient, 2 / 3, FP32))


@pytest.mark.parametrize("dtypes", [(FP16, FP32, FP32), (FP32, FP32, FP16), (FP16, FP16, FP16)])
def test_kernel_masked(gpu: Any, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    dtype, middle, wanted = dtypes
    given = values(dtype)
    mask = torch.rand(given.shape, generator=torch.Generator().manual_seed(5)) < 0.9
    mask[:1] = False  # what is infinite becomes NaN
    found = gpu.masked(given, mask, 1 / 0.9, middle, wanted)
    expected = lora.drop(given, mask, 0.1, middle, wanted, is_gradient=True)
    finite = ~found.isnan()
    assert torch.equal(finite, ~expected.isnan()) and not finite.all()
    assert same_bits(found[finite], expected[finite])


def test_kernels_of_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To one unit in the last place: the interpreter has neither CUDA's exponential nor fma."""
    gpu = interpreted("poros.kernels.swiglu_gpu")
    monkeypatch.setattr(gpu, "libdevice", gpu.tl)
    gate, up, gradient = (values(FP16, num)[3:5000] for num in (5000, 5001, 5002))
    leaves = [each.clone().requires_grad_() for each in (gate, up)]
    product_ = swiglu_ref(*leaves, nn.SiLU())
    expected = [product_.detach(), *torch.autograd.grad(product_, leaves, gradient)]
    found = [gpu.silu_mul(gate, up), *gpu.silu_mul_backward(gradient, gate, up)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=2**-20)
    assert not torch.equal(found[1], gradient)
