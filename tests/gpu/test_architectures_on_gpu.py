"""Promised architectures, and some others, in five ways on a GPU: 0 bits differ."""

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny
from tests.gpu.models import model_of, run, same_runs

pytestmark = pytest.mark.gpu

OTHERS = ("olmo2", "granite", "starcoder2", "stablelm")
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "two slots": (False, {"slots": 2}),
    "blocks of two, offloaded": (False, {"block_size": 2, "offload_boundaries": True}),
    "three kept": (False, {"slots": 4, "keep_last": 3}),
    "grouped": (True, {"slots": 2}),
    "grouped, kept and dense": (True, {"slots": 4, "keep_last": 2, "share_dense": True}),
}
"""Whether four micro-batches go through the blocks together, and the policy."""

ALONE = ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
"""Their layers hand on more than hidden states, so micro-batches run one after the other."""

Resident = dict[str, list[torch.Tensor]]


@pytest.fixture(scope="module")
def resident() -> Resident:
    return {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", [*tiny.ARCHITECTURES, *OTHERS])
def test_equals_resident(
    architecture: str, way: str, resident: Resident, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    is_grouped, policy = WAYS[way]
    # PEFT has no dropout for adapters of fused experts.
    dropout = 0.0 if architecture in ALONE[2:] else 0.05
    if architecture not in resident:
        resident[architecture] = run(model_of(folder, architecture, dropout=dropout), False)
    model = model_of(folder, architecture, dropout=dropout)
    poros.prepare(model, loss="reference", **policy)
    assert same_runs(run(model, is_grouped), resident[architecture])
    stats = poros.runtime(model).stats()
    print({key: stats[key] for key in ("num_groups", "num_replayed_visits", "fallbacks")})
    assert (stats["num_groups"] > 0) == (is_grouped and architecture not in ALONE)
