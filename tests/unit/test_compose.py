"""DoRA's composition: references, tiers, and the kernels in Triton's interpreter.

How near the sums are to exact arithmetic, and to PEFT, is seen in ``test_dora_node``.
The interpreter rounds float32 and float16 as a GPU does, but not bfloat16: that is for tests/gpu.
"""

from math import prod
from typing import Any

import pytest
import torch

from poros.kernels import compose as module
from poros.kernels.compose import (
    compose,
    compose_backward,
    compose_backward_ref,
    compose_ref,
)
from tests.support import interpreted, same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
U = 2.0**-24
SHAPES = [(2, 7, 48), (20, 300), (33, 1), (5,), (0, 8), (2, 0, 5)]
SCALING = 2 / 3
CPU = torch.device("cpu")


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype, lora_dtype: torch.dtype = FP32, near: float = 1e-3
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(shape))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    exact = FP64 if FP64 in (dtype, lora_dtype) else FP32
    return {
        "result": normal(*shape).to(dtype),
        "base": normal(*shape).to(dtype),
        "lora": normal(*shape).to(lora_dtype),
        "g": (1 + near * normal(shape[-1])).to(exact),
        "bias": normal(shape[-1]).to(dtype),
    }


def forms(given: dict[str, Any]) -> list[dict[str, Any]]:
    """With a base; without, with a bias; and without either."""
    return [{**given, "bias": None}, {**given, "base": None}, {**given, "base": None, "bias": None}]


def arriving(result: torch.Tensor) -> torch.Tensor:
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(9)).to(result.dtype)


def run(given: dict[str, Any], tier: str, wants_inner: bool = True) -> list[torch.Tensor | None]:
    """The sum, inner and gradients."""
    is_eager = tier == "eager"
    forward = compose_ref if is_eager else compose
    sum_, inner = forward(**given, scaling=SCALING, wants_inner=wants_inner)
    backward = (compose_backward_ref if is_eager else compose_backward)(
        *(arriving(given["result"]), given["g"], SCALING, inner),
        has_base=given["base"] is not None,
        result_dtype=given["result"].dtype,
        lora_dtype=given["lora"].dtype,
    )
    return [sum_, inner, *backward]


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return same_bits(left, right)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, which the operators take for tensors of a CPU too."""
    kernels = interpreted("poros.kernels.compose_gpu")
    monkeypatch.setattr(module, "runs_triton", lambda device: True)
    return kernels


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP32), (FP16, FP16), (FP32, FP16)])
def test_tiers_have_the_same_bits(
    gpu: Any, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    for given in forms(tensors(shape, *dtypes)):
        expected, found = run(given, "eager"), run(given, "fused")
        assert all(map(same, found[:4], expected[:4]))
        assert found[4] is not None and expected[4] is not None
        assert found[4].dtype == expected[4].dtype == FP32
        assert found[4].shape == expected[4].shape
        # Sums of the same products in two orders: each is off by n u of their sizes at most.
        assert expected[1] is not None
        sizes = arriving(given["result"]).double().abs() * expected[1].double().abs()
        sizes = sizes.reshape(prod(shape[:-1]), shape[-1])
        allowed = 2 * (len(sizes) + 1) * U * sizes.sum(0)
        assert bool(((found[4].double() - expected[4].double()).abs() <= allowed).all())
        plain = run(given, "fused", wants_inner=False)
        assert plain[1] is plain[4] is None
        assert same(plain[0], expected[0]) and all(map(same, plain[2:4], expected[2:4]))


@pytest.mark.parametrize("step", ["g", "scaling", "bias", "inner"])
def test_control_a_step_left_out_is_seen(gpu: Any, step: str) -> None:
    given = {**tensors((2, 7, 48), FP32), "base": None}
    expected = run(given, "eager")
    if step == "inner":
        assert not same(expected[1], run({**given, "bias": None}, "fused")[1])
        return
    changed = {
        "g": {**given, "g": torch.ones(48)},
        "scaling": {**given, "lora": given["lora"] * 1.0001},
        "bias": {**given, "bias": None},
    }
    assert not same(expected[0], run(changed[step], "fused")[0])


# ------------------------------------------------------------------- tiers


def test_a_kernel_does_not_depend_on_whether_gradients_are_wanted(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    for name in ("compose", "backward"):
        genuine = getattr(gpu, name)
        note = lambda *args, name=name, run=genuine: (launched.append(name), run(*args))[1]  # noqa: E731
        monkeypatch.setattr(gpu, name, note)
    given, outcomes = tensors((15, 1), FP32), []
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        for wants in (False, True):
            launched.clear()
            for each in given.values():
                each.requires_grad_(wants and mode is not torch.inference_mode)
            with mode():
                outcomes.append(run({**given, "base": None}, "fused"))
            assert launched == ["compose", "backward"]
    assert all(all(map(same, each, outcomes[0])) for each in outcomes)


def test_what_a_kernel_cannot_read_is_left_to_pytorch(gpu: Any) -> None:
    given = {**tensors((6, 8), FP32), "base": None}
    expected = run(given, "eager")
    strided = {**given, "lora": given["lora"].t().contiguous().t()}
    assert all(map(same, run(strided, "fused")[:4], expected[:4]))
    double = {**given, "g": given["g"].double()}
    assert compose(**double, scaling=SCALING)[0].dtype == FP32
