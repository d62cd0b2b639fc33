"""Liger's kernels on a GPU in replayed and grouped layers; in runs: test_finetune_on_gpu.

Every arm is compared with a resident one in which the same kernels run.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("liger_kernel")

from transformers.models.qwen2 import modeling_qwen2

import poros
from poros.finetune.liger import use_liger
from tests.gpu.models import model_of, same_runs, train
from tests.liger import liger_alone

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3", "qwen3"])
def test_replayed_equals_resident(architecture: str, autocast: bool, tmp_path: Path) -> None:
    modeling = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    with liger_alone(modeling) as applied:
        expected = train(applied(model_of(tmp_path, architecture)), autocast=autocast)
    model = model_of(tmp_path, architecture)
    assert len(use_liger(model.get_base_model())) == (3 if architecture == "gemma3" else 2)
    poros.prepare(model, loss="reference", cuda_graphs=True, slots=2, keep_last=0)
    assert same_runs(train(model, autocast=autocast), expected)
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] == "passed"
    assert runtime.stats()["num_replayed_visits"] > 0
    plain = train(model_of(tmp_path, architecture), autocast=autocast)
    assert not same_runs(plain, expected)  # control


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_grouped_equals_resident(options: dict[str, Any], keep_last: int, tmp_path: Path) -> None:
    """Micro-batches of a step together, in layers that are replayed and in those that are kept."""
    with liger_alone(modeling_qwen2) as applied:
        resident = poros.use_adapter_kernels(applied(model_of(tmp_path, **options)))
        expected = train(resident, size=4, autocast=True)
    model = model_of(tmp_path, **options)
    use_liger(model.get_base_model())
    poros.prepare(model, loss="reference", slots=2, keep_last=keep_last, cuda_graphs=True)
    assert same_runs(train(model, size=4, together=True, autocast=True), expected)
    assert poros.runtime(model).stats()["num_replayed_visits"] > 0
