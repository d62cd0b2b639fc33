"""DoRA's composition: kernels have their reference's bits, in Triton's interpreter and on a GPU.

How near the sums are to PEFT's is seen in ``test_dora_node``.
The interpreter rounds float32 and float16 as a GPU does, but not bfloat16.
"""

from itertools import product
from typing import Any

import pytest
import torch

from poros.kernels import compose as module
from poros.kernels.compose import compose, compose_backward, compose_backward_ref, compose_ref
from tests.covers import cover, with_slow
from tests.gpu.models import same
from tests.support import interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
U, OF_INNER = 2.0**-24, {BF16: 2.0**-8, FP16: 2.0**-11}
SCALING = 2 / 3
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of a model, and of what LoRA gives."""
Point = tuple[str, Dtypes, tuple[int, ...]]

ON_CPU: list[Point] = list(
    product(
        ["cpu"],
        [(FP32, FP32), (FP16, FP32), (FP16, FP16), (FP32, FP16)],
        [(2, 7, 48), (20, 300), (33, 1), (5,), (0, 8), (2, 0, 5)],
    )
)
FEW = cover(ON_CPU, 1)
ON_GPU = product(
    ["cuda"],
    [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32), (FP32, BF16)],
    [(2, tokens, rows) for tokens in (7, 512, 2048) for rows in (3584, 512, 18944, 33)],
)
POINTS = [
    *with_slow(ON_CPU, [each for place, each in enumerate(ON_CPU) if place not in FEW]),
    *(pytest.param(each, marks=pytest.mark.gpu) for each in ON_GPU),
]


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype, lora_dtype: torch.dtype = FP32, device: str = "cpu"
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(len(shape))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    return {
        "result": normal(*shape).to(dtype),
        "base": normal(*shape).to(dtype),
        "lora": normal(*shape).to(lora_dtype),
        "g": 1 + 1e-3 * normal(shape[-1]),
        "bias": normal(shape[-1]).to(dtype),
    }


def forms(given: dict[str, Any]) -> list[dict[str, Any]]:
    """With a base; without, with a bias; and without either."""
    return [{**given, "bias": None}, {**given, "base": None}, {**given, "base": None, "bias": None}]


def arriving(result: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(result.device).manual_seed(9)
    return torch.randn(result.shape, generator=generator, device=result.device).to(result.dtype)


def run(
    given: dict[str, Any], is_reference: bool = False, wants_inner: bool = True
) -> list[torch.Tensor | None]:
    forward = compose_ref if is_reference else compose
    sum_, inner = forward(**given, scaling=SCALING, wants_inner=wants_inner)
    backward = (compose_backward_ref if is_reference else compose_backward)(
        *(arriving(given["result"]), given["g"], SCALING, inner),
        has_base=given["base"] is not None,
        result_dtype=given["result"].dtype,
        lora_dtype=given["lora"].dtype,
    )
    return [sum_, inner, *backward]


def all_same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(map(same, left, right))


def take_kernels(device: str, patch: pytest.MonkeyPatch) -> str:
    """Have the operators take their kernels there: on a CPU the interpreter's."""
    if device == "cpu":
        interpreted("poros.kernels.compose_gpu")
        patch.setattr(module, "runs_triton", lambda device: True)
    return device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return take_kernels(request.param, monkeypatch)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_kernel_has_the_bits_of_its_reference(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the sum over n tokens there is a bound: n u of the sizes of its products."""
    device, dtypes, shape = point
    take_kernels(device, monkeypatch)
    for given in forms(tensors(shape, *dtypes, device)):
        expected, found = run(given, is_reference=True), run(given)
        assert all_same(found[:4], expected[:4]) and expected[1] is not None
        terms = arriving(given["result"]).double() * expected[1].double()
        terms = terms.reshape(-1, shape[-1])
        bound = 1.01 * len(terms) * U * terms.abs().sum(0)
        for of_g in (found[4], expected[4]):
            assert of_g is not None and (of_g.dtype, of_g.shape) == (FP32, shape[-1:])
            assert bool(((of_g.double() - terms.sum(0)).abs() <= bound).all())
            # Certain to be seen: a token more or less.
            off = (of_g.double() - terms[1:].sum(0)).abs()
            assert not len(terms) or not bool((off <= bound).all())
        plain = run(given, wants_inner=False)
        assert plain[1] is plain[4] is None
        assert all_same([plain[0], *plain[2:4]], [expected[0], *expected[2:4]])


@pytest.mark.parametrize("step", ["g", "scaling", "bias", "inner"])
def test_control_a_step_left_out_is_seen(device: str, step: str) -> None:
    given = {**tensors((2, 7, 48), FP32, device=device), "base": None}
    expected = run(given, is_reference=True)
    changed = {
        "g": {**given, "g": torch.ones_like(given["g"])},
        "scaling": {**given, "lora": given["lora"] * 1.0001},
        "bias": {**given, "bias": None},
        "inner": {**given, "bias": None},
    }
    place = 1 if step == "inner" else 0
    assert not same(expected[place], run(changed[step])[place])


def test_what_a_kernel_cannot_read_is_left_to_pytorch(device: str) -> None:
    given = {**tensors((6, 8), FP32, device=device), "base": None}
    expected = run(given, is_reference=True)
    strided = {**given, "lora": given["lora"].t().contiguous().t()}
    assert all_same(run(strided)[:4], expected[:4])
    double = {**given, "g": given["g"].double()}
    assert compose(**double, scaling=SCALING)[0].dtype == FP32


# On a GPU alone.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_near_one_the_stable_form_is_closer_than_the_naive(dtype: torch.dtype) -> None:
    given = tensors((2, 512, 3584), dtype, device="cuda")
    given["g"] = 1 + 2.0**-12 * torch.randn(3584, device="cuda")
    given["lora"] *= 2.0**-12
    base, term = given["base"].double(), SCALING * given["lora"].double()
    expected = (given["g"].double() - 1) * base + given["g"].double() * term
    zero = torch.zeros_like(given["result"])
    found, _ = compose(zero, given["base"], given["lora"], given["g"], SCALING)
    parts = (given["g"].double() - 1).abs() * base.abs() + (given["g"].double() * term).abs()
    bound = (8 * U + OF_INNER[dtype]) * 1.01 * parts + 2.0**-25
    low = (SCALING * given["lora"]).to(dtype)
    naive = given["g"].to(dtype) * (low + given["base"]) - given["base"]
    assert bool(((found.double() - expected).abs() <= bound).all())
    assert not bool(((naive.double() - expected).abs() <= bound).all())


@pytest.mark.gpu
def test_of_more_elements_than_32_bits_can_count() -> None:
    rows, tokens = 18944, 120_000
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("expected 40 GB of free memory on the device")
    g = 1 + 1e-2 * torch.randn(rows, device="cuda")
    ones = torch.ones(tokens, rows, device="cuda", dtype=BF16)
    sum_, inner = compose(ones, None, ones, g, SCALING, wants_inner=True)
    how: dict[str, Any] = {"has_base": False, "result_dtype": BF16, "lora_dtype": BF16}
    backward = compose_backward(ones, g, SCALING, inner, **how)
    assert inner is not None and backward[2] is not None
    # Every row of a tensor of ones is the same.
    for each in (sum_, inner, *backward[:2]):
        assert torch.equal(each[-1], each[0]) and torch.equal(each[tokens // 2], each[0])
    expected = tokens * float(inner[0, 0].float())
    assert bool(((backward[2] - expected).abs() < 1e-3 * expected).all())
