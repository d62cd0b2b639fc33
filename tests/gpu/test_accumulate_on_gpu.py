"""Micro-batches that go through the blocks together, on a GPU: the bits of one after the other."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.kernels import dequantize
from tests.comparing import compare_trajectories
from tests.exact.trainer_arms import FULL, Arms
from tests.gpu.models import BF16, model_of, run, same_runs
from tests.support import prepare_plain

pytestmark = pytest.mark.gpu

FP32 = torch.float32


def check(folder: Path, policy: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    of_run = {key: options.pop(key) for key in ("size", "autocast", "lengths") if key in options}
    expected = run(model_of(folder, **options), False, **of_run)
    model = model_of(folder, **options)
    poros.prepare(model, **{"slots": 2, "keep_last": 0, "loss": "reference", **(policy or {})})
    found = run(model, True, **of_run)
    stats = poros.runtime(model).stats()
    print({key: stats[key] for key in ("num_groups", "num_replayed_visits", "fallbacks")})
    assert same_runs(found, expected)
    assert poros.runtime(model).self_check["status"] in ("passed", "off")
    assert not [line for line in stats["fallbacks"] if line.startswith("micro-batches")]
    assert stats["num_groups"] == 8
    return stats


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_equals_one_after_the_other(
    dtype: torch.dtype, dropout: float, graphs: bool, tmp_path: Path
) -> None:
    stats = check(tmp_path, {"cuda_graphs": graphs}, dtype=dtype, dropout=dropout)
    assert (stats["num_replayed_visits"] > 0) == graphs


def test_one_load_serves_all(tmp_path: Path) -> None:
    # 4 layers, 2 slots; the check would load some again.
    # The first micro-batch goes alone.
    assert check(tmp_path, {"self_check": "off"})["num_loads"] == 6 + 8 * 4


POLICIES: list[dict[str, Any]] = [
    {"slots": 4},
    {"slots": 4, "keep_last": 2},
    {"slots": 4, "keep_last": 4},
    {"block_size": 2},
    {"offload_boundaries": True},
    {"adapter_kernels": "peft"},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy(policy: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, policy)


def test_autocast_and_eight(tmp_path: Path) -> None:
    check(tmp_path, dtype=FP32, autocast=True, size=8)


def test_slices_of_the_head(tmp_path: Path) -> None:
    policy: Any = {"slots": 2, "keep_last": 0, "stream_head": True, "stream_embedding": True}
    expected = run(poros.prepare(model_of(tmp_path), **policy), False)
    model = poros.prepare(model_of(tmp_path), **policy)
    assert same_runs(run(model, True), expected)
    assert poros.runtime(model).stats()["num_groups"] == 8


@pytest.mark.parametrize("adapters", ["fused", "exact"])
@pytest.mark.parametrize("keep_last", [0, 4])
def test_shared_dense_weights(
    keep_last: int, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is made dense once a pass and group, also by visits that are replayed."""
    num_fills = 0
    genuine = dequantize.dequantize_into

    def counted(*args: Any) -> None:
        nonlocal num_fills
        num_fills += 1
        genuine(*args)

    monkeypatch.setattr(dequantize, "dequantize_into", counted)
    policy = {"slots": 4, "keep_last": keep_last, "adapter_kernels": adapters}
    stats = check(tmp_path, {**policy, "share_dense": True})
    assert stats["num_replayed_visits"] > 0
    # Seven matrices. The first group's forwards are discarded where dropout was not known yet, and
    # it may run one after the other then. Four micro-batches, each for itself, would make four
    # times as many.
    per_layer, rest = divmod(num_fills, 7)
    once = 2 * 4 - 1  # four layers, the last one's are there at the turn
    assert rest == 0 and 7 * once <= per_layer < 2 * 8 * once
    before = num_fills
    check(tmp_path, {**policy, "share_dense": False})
    assert num_fills == before


def test_the_trainer(tmp_path: Path) -> None:
    arms = Arms.make(tmp_path, FP32, "cuda")
    options: Any = {**FULL, "gradient_accumulation_steps": 4}
    expected = arms.run("resident", **options)
    together = partial(prepare_plain, slots=2)
    found = arms.run("together", together, trainer_class=poros.PorosTrainer, **options)
    assert compare_trajectories(expected, found) == []
    assert arms.log_history("together") == arms.log_history("resident")
    assert poros.runtime(arms.model).stats()["num_groups"] > 0
