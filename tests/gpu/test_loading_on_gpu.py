"""Models of ``poros.load`` train on a GPU as resident ones do, wherever their base lies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, train
from tests.comparing import compare_trajectories
from tests.gpu.models import write_layers
from tests.support import prepare_plain

pytestmark = pytest.mark.gpu

SPEC = TrainingSpec(num_steps=3, accumulation=2)
BATCHES = tiny.make_batches(6, num_tokens=64)
NUM_LAYERS = 6


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    """Attention's fastest kernels are not deterministic in backward."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_layers(folder, NUM_LAYERS, intermediate_size=8192)


def with_lora(model: Any) -> Any:
    return tiny.attach(model, rank=16, dropout=0.05)


def resident(checkpoint: Path) -> Trajectory:
    return train(with_lora(poros.load(checkpoint).to("cuda")), BATCHES, SPEC)


@pytest.mark.parametrize("num_in_memory", [0, 2, NUM_LAYERS])
def test_streaming_from_a_store(checkpoint: Path, tmp_path: Path, num_in_memory: int) -> None:
    expected = resident(checkpoint)
    whole = poros.load(checkpoint, store=tmp_path / "store")
    prepared = prepare_plain(with_lora(whole), slots=2)
    layer = poros.runtime(prepared).stats()["host_num_bytes"] // NUM_LAYERS
    del whole, prepared
    budget = num_in_memory * (layer + 2**16)
    model = prepare_plain(with_lora(poros.load(tmp_path / "store", host_budget=budget)), slots=2)
    assert compare_trajectories(expected, train(model, BATCHES, SPEC)) == []
    stats = poros.runtime(model).stats()
    if num_in_memory == NUM_LAYERS:
        assert stats["pinned_num_bytes"] == stats["host_num_bytes"]
    assert (stats["disk_num_bytes"] > 0) == (num_in_memory < NUM_LAYERS)
    assert poros.runtime(model).self_check["status"] == "passed"
