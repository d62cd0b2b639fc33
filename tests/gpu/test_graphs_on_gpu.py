"""Visits recorded as CUDA graphs: the bits of eager ones and of a resident run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.replay.graphs import CudaRecorder
from tests.gpu.models import model_of, same_runs, train, trained

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
Model = Any


def replayed(model: Model, *args: Any, policy: Any = None, **kwargs: Any) -> list[torch.Tensor]:
    poros.prepare(
        model, loss="reference", cuda_graphs=True, **{"slots": 2, "keep_last": 0, **(policy or {})}
    )
    found = train(model, *args, **kwargs)
    runtime = poros.runtime(model)
    print(runtime.context.captures.num_replays, dict(runtime.context.captures.eager))
    assert runtime.self_check["status"] == "passed"
    assert runtime.stats()["num_replayed_visits"] > 0
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_replayed_equals_resident(
    dtype: torch.dtype, dropout: float, autocast: bool, accumulation: int, tmp_path: Path
) -> None:
    options: Any = {"dtype": dtype, "dropout": dropout}
    expected = train(model_of(tmp_path, **options), 8, accumulation, autocast)
    found = replayed(model_of(tmp_path, **options), 8, accumulation, autocast)
    assert same_runs(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3", "qwen3"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    expected = train(model_of(tmp_path, architecture))
    assert same_runs(replayed(model_of(tmp_path, architecture)), expected)


@pytest.mark.parametrize(
    "policy",
    [{"slots": 4}, {"block_size": 2}, {"offload_boundaries": True}, {"adapter_kernels": "peft"}],
    ids=str,
)
def test_every_policy(policy: dict[str, Any], tmp_path: Path) -> None:
    expected = train(model_of(tmp_path))
    assert same_runs(replayed(model_of(tmp_path), policy=policy), expected)


def test_dora(tmp_path: Path) -> None:
    resident = poros.use_adapter_kernels(model_of(tmp_path, use_dora=True))
    expected = train(resident)
    assert same_runs(replayed(model_of(tmp_path, use_dora=True)), expected)


def evaluate(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8, device="cuda")[None])
    model.train()


def swap(model: Model, number: int) -> None:
    if number == 5:
        for each in trained(model):
            each.data = each.data * 1.5


@pytest.mark.parametrize("between", [evaluate, swap])
def test_what_comes_between(between: Callable[[Model, int], None], tmp_path: Path) -> None:
    expected = train(model_of(tmp_path), between=between)
    assert same_runs(replayed(model_of(tmp_path), between=between), expected)


@pytest.mark.parametrize("is_held", [True, False])
def test_what_a_recording_holds_stays_while_earlier_ones_are_replayed(is_held: bool) -> None:
    """Its control: memory that it shares with theirs is overwritten."""
    device = torch.device("cuda")
    recorder = CudaRecorder(device)
    source, result = torch.ones(2**20, device=device), torch.empty(2**20, device=device)
    held = []
    earlier = recorder.record(lambda: torch.add(source.mul(7), 1, out=result))
    holding = recorder.record(lambda: held.append(source.mul(3)), is_held=is_held)
    holding.replay()
    earlier.replay()
    assert bool((held[0] == 3).all()) == is_held
