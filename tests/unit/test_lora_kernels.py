"""``add_lora`` and ``swiglu`` have their references' bits: on a CPU, in the interpreter, on a GPU.

The interpreter rounds float32 and float16 as a GPU does, but not bfloat16.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from poros.kernels import lora
from poros.kernels.lora import Added, Call, add_lora, add_lora_ref
from poros.kernels.swiglu import swiglu, swiglu_ref
from tests.gpu.models import same
from tests.support import interpreted, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Sizes = tuple[int, int, int]
"""Rows, columns and rank."""
SMALL: Sizes = (48, 80, 8)
LARGE: list[Sizes] = [(3584, 3584, 16), (512, 3584, 8), (18944, 3584, 16), (3584, 18944, 64)]


def added(
    dtype: torch.dtype, dropout: float = 0.0, *, rounds: bool = True, keeps: bool = False
) -> Added:
    return Added(2.0 / 3.0, dropout, dtype, rounds, keeps)


def ours(*given: Any) -> torch.Tensor:
    *tensors, how = given
    return add_lora(*tensors, Call(how))


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device=device)
    return values.to(dtype).requires_grad_()


def tensors(
    dtype: torch.dtype,
    adapters: torch.dtype,
    sizes: Sizes = SMALL,
    num_tokens: int = 7,
    device: str = "cpu",
) -> list[torch.Tensor]:
    rows, columns, rank = sizes
    forms = [
        ((2, num_tokens, rows), dtype),
        ((2, num_tokens, columns), dtype),
        ((rank, columns), adapters),
        ((rows, rank), adapters),
    ]
    return [
        normal(*shape, dtype=kind, device=device, seed=seed)
        for seed, (shape, kind) in enumerate(forms)
    ]


def outcome(
    run: Callable[..., torch.Tensor], given: list[torch.Tensor], *how: Any
) -> list[torch.Tensor]:
    """The sum, all gradients, and the random state behind it."""
    device = given[0].device
    torch.manual_seed(3)
    sum_ = run(*given, *how)
    state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    generator = torch.Generator(device).manual_seed(1)
    arriving = torch.randn(sum_.shape, generator=generator, device=device).to(sum_.dtype)
    wanted = [each for each in given if each.requires_grad]
    return [sum_.detach(), *torch.autograd.grad(sum_, wanted, arriving), state]


def differing(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[int]:
    return [number for number, pair in enumerate(zip(left, right, strict=True)) if not same(*pair)]


# The dtypes of a model, of its adapters, and of what dropout sees.
DTYPES = [(BF16, FP32, FP32), (FP16, FP32, FP32), (FP32, FP32, FP32), (BF16, BF16, BF16)]
AS_PEFT = {"4-bit": {"rounds": True, "keeps": False}, "dense": {"rounds": False, "keeps": True}}


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("num_tokens", [7, 512, 2048])
@pytest.mark.parametrize("sizes", [*LARGE, (33, 70, 4)], ids=str)
def test_equals_what_peft_computes_on_a_gpu(sizes: Sizes, num_tokens: int, dropout: float) -> None:
    for (dtype, adapters, middle), kind in product(DTYPES, AS_PEFT.values()):
        given = tensors(dtype, adapters, sizes, num_tokens, "cuda")
        how = added(middle, dropout, **kind)
        found, expected = (outcome(run, given, how) for run in (ours, add_lora_ref))
        assert differing(found, expected) == [], (dtype, adapters, kind)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", (3, 5, 80)), pytest.param("cuda", (3, 1024, 18944), marks=pytest.mark.gpu)],
)
def test_swiglu_equals_what_models_compute(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Whichever part is frozen."""
    for frozen in ([], [0], [1]):
        given = [normal(*shape, dtype=dtype, device=device, seed=seed) for seed in range(2)]
        for place in frozen:
            given[place].requires_grad_(False)
        both = [outcome(run, given) for run in (swiglu, swiglu_ref)]
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
    product_ = swiglu_ref(*leaves)
    expected = [product_.detach(), *torch.autograd.grad(product_, leaves, gradient)]
    found = [gpu.silu_mul(gate, up), *gpu.silu_mul_backward(gradient, gate, up)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=2**-20)
    assert not torch.equal(found[1], gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_silu_of_every_gate(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(dtype)
    for seed, scale in enumerate((0.0, 1e-6, 1.0, 1.0, 1.0, 1e4)):
        up, gradient = (
            scale * normal(2**16, dtype=dtype, device="cuda", seed=each).detach()
            for each in (seed, seed + 100)
        )
        both = []
        for run in (swiglu, swiglu_ref):
            given = [each.clone().requires_grad_() for each in (every, up)]
            product_ = run(*given)
            both.append([product_.detach(), *torch.autograd.grad(product_, given, gradient)])
        for found, expected in zip(*both, strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            assert same_bits(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_what_dropout_gave_is_made_again(dtype: torch.dtype) -> None:
    """For rates whose quotients round differently in float32 and float64."""
    input = torch.randn(64, 3001, device="cuda").to(dtype)
    differing = 0
    for percent in range(1, 100):
        p = percent / 100
        dropped, mask = torch.native_dropout(input, p, True)
        assert same_bits(lora.drop(input, mask, p, dtype, dtype), dropped), p
        backward = torch.ops.aten.native_dropout_backward(input, mask, 1 / (1 - p))
        assert same_bits(lora.drop(input, mask, p, dtype, dtype, is_gradient=True), backward), p
        differing += not same_bits(backward, dropped)
    assert dtype is not FP32 or differing > 0
