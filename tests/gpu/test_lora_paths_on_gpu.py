"""``lora_paths`` on a GPU: each order within its bound, streamed equals resident."""

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.config import LORA_ORDERS
from tests.gpu.models import gradients, model_of, same
from tests.unit.lora_case import SIZES, Case, excess

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 2, "cuda_graphs": True},
    {"slots": 4, "keep_last": 4},
    {"slots": 2, "block_size": 2, "offload_boundaries": True, "cuda_graphs": False},
]


@pytest.mark.parametrize(("bias", "scaling"), [(False, 1.0), (True, 2.0 / 3.0)])
@pytest.mark.parametrize("rank", [8, 64, 512])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_every_order_is_within_its_bound(
    kind: str, size: str, rank: int, bias: bool, scaling: float
) -> None:
    case = Case(kind, size, rank, bias, scaling, device="cuda")
    for order in LORA_ORDERS:
        assert max(excess(case, order, case.run(order))) <= 1, order


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("paths", ["flops", "f1:b1", "f1:b3", "f2:b4", "f2:b5"])
def test_streamed_equals_resident(
    paths: str,
    dtype: torch.dtype,
    dropout: float,
    quantize: bool,
    autocast: bool,
    tmp_path: Path,
) -> None:
    model = model_of(tmp_path, dtype=dtype, dropout=dropout, quantize=quantize)
    poros.use_adapter_kernels(model, lora_paths=paths)
    expected = gradients(model, autocast)
    poros.restore(model)
    for policy in POLICIES:
        poros.prepare(model, loss="reference", lora_paths=paths, **policy)
        # With recorded visits: a checked step, two counted ones, a compared one, replays.
        for _ in range(6):
            found = gradients(model, autocast)
            assert found.keys() == expected.keys()
            assert [name for name in expected if not same(found[name], expected[name])] == []
        stats = poros.runtime(model).stats()
        # A 4-bit module gives back the dtype of its input, here float32, as autocast does not.
        assert stats["lora_paths"]["chosen"] or dropout or (autocast and quantize)
        is_replayed = stats["num_replayed_visits"] > 0
        assert policy.get("cuda_graphs") is not True or is_replayed or autocast
        poros.restore(model)
