"""Grouped adapters on a GPU: within their bounds, and streamed equals resident."""

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from tests.gpu.models import gradients, model_of, run, same, same_runs
from tests.unit.grouped_case import Case, exact_case, gradient_shares, result_shares

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
GROUPED: dict[str, Any] = {"adapter_kernels": "grouped", "loss": "reference"}
POLICIES: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 2, "cuda_graphs": True},
    {"slots": 4, "keep_last": 4},
    {"slots": 2, "block_size": 2, "offload_boundaries": True, "cuda_graphs": False},
]


@pytest.fixture
def _one_rounding() -> Any:
    """Products are written once: no parts of them are reduced in 16 bits, and none is in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision
    matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision = False, "ieee"
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision = before


@pytest.mark.usefixtures("_one_rounding")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_results_and_gradients_are_within_their_bounds(dtype: torch.dtype) -> None:
    case, exact = Case.random(dtype, "cuda"), exact_case(dtype, "cuda")
    results, found = case.run()
    assert max(result_shares(case, results)) <= 1
    assert max(gradient_shares(case, found)) <= 1
    assert result_shares(exact, exact.run()[0]) == [0.0]
    off = exact._replace(scalings=[each * (1 + 2.0**-6) for each in exact.scalings])
    assert min(result_shares(exact, off.run()[0])) > 1  # a control


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_streamed_equals_resident(
    dtype: torch.dtype, quantize: bool, autocast: bool, tmp_path: Path
) -> None:
    model = model_of(tmp_path, dtype=dtype, dropout=0.0, quantize=quantize)
    plain = gradients(model, autocast)
    poros.use_adapter_kernels(model, "grouped")
    expected = gradients(model, autocast)
    # A 4-bit weight that multiplies in float32 is not what autocast multiplies in; without it,
    # adapters in float32 multiply in that.
    is_known = not (quantize and dtype is FP32) if autocast else dtype is FP32
    assert poros.kernel_stats(model)["num_grouped_adapters"] == 4 * 7 * is_known
    assert same(expected["random"], plain["random"])
    poros.restore(model)
    for policy in POLICIES:
        poros.prepare(model, **GROUPED, **policy)
        # With recorded visits: a checked step, two counted ones, a compared one, replays.
        for _ in range(6):
            found = gradients(model, autocast)
            assert found.keys() == expected.keys()
            assert [name for name in expected if not same(found[name], expected[name])] == []
        stats = poros.runtime(model).stats()
        assert stats["num_replayed_visits"] > 0 or policy.get("cuda_graphs") is not True
        poros.restore(model)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16, autocast", "fp32"])
@pytest.mark.parametrize(
    "policy", [{"slots": 2}, {"slots": 4, "keep_last": 4}, {"offload_boundaries": True}], ids=str
)
def test_micro_batches_together(policy: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    def made() -> Any:
        return model_of(tmp_path, dtype=dtype, dropout=0.0)

    autocast = dtype is BF16
    expected = run(poros.use_adapter_kernels(made(), "grouped"), False, autocast=autocast)
    model = poros.prepare(made(), **GROUPED, **{"slots": 2, "keep_last": 0, **policy})
    assert same_runs(run(model, True, autocast=autocast), expected)
    stats = poros.runtime(model).stats()
    assert stats["num_groups"] == 8 and stats["num_replayed_visits"] > 0
    assert stats["num_grouped_adapters"] > 0
