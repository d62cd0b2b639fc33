"""Liger's kernels on a GPU: in ``poros finetune``, and in replayed and grouped layers.

Every arm is compared with a resident one in which the same kernels run.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("liger_kernel")
pytest.importorskip("trl", reason="poros finetune needs TRL")

from peft import get_peft_model
from transformers import set_seed
from transformers.models.qwen2 import modeling_qwen2

import poros
from poros.finetune import run as runs
from poros.finetune.adapters import adapter_config
from poros.finetune.liger import use_liger
from poros.gates import tiny
from poros.recipes.recipe import Recipe
from tests.finetune.arms import COMMON, RECIPES, arm
from tests.finetune.subjects import at_step, recipe_of, rows, run, write_model, write_rows
from tests.gpu import models
from tests.gpu.models import model_of, same_runs, train
from tests.liger import liger_alone, names_of_liger
from tests.support import AS_PLAIN

pytestmark = pytest.mark.gpu

Model = Any
KINDS = ("sft, packed", "sft, padded", "dpo")
ADAPTERS = {"lora": {}, "dora": {"adapter__use_dora": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "preferences"):
        write_rows(folder / f"{form}.jsonl", rows(form))
    return folder


def base_of(recipe: Recipe) -> Model:
    base = tiny.load_base(recipe.model.source, dtype=torch.bfloat16, device="cuda")
    base.config.use_cache = False
    return base


def adapted(base: Model, recipe: Recipe) -> Model:
    set_seed(recipe.training.seed)
    return get_peft_model(base, adapter_config(recipe))


@pytest.mark.parametrize("has_liger", [True, False], ids=["liger", "plain"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_equals_trl_alone(
    kind: str,
    adapter: str,
    has_liger: bool,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same trainer on a model without Poros that Liger's own function has changed."""

    def streamed(recipe: Recipe, *args: Any) -> Model:
        base = base_of(recipe)
        if has_liger:
            assert len(use_liger(base)) == 3
        return poros.prepare(adapted(base, recipe), slots=2, **AS_PLAIN)

    form, options = RECIPES[kind]
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    said = {**source, **COMMON, **options, **ADAPTERS[adapter], "training__max_steps": 4}
    # The plain model has nothing that could be logged of streaming.
    monkeypatch.setattr(runs, "log_streaming", lambda *args, **options: None)
    with liger_alone(modeling_qwen2) as applied, monkeypatch.context() as patch:
        changed = applied if has_liger else lambda model: model
        patch.setattr(runs, "_model", lambda recipe, *_: changed(adapted(base_of(recipe), recipe)))
        expected = run(recipe_of(**said, output__folder=tmp_path / "resident"))
    monkeypatch.setattr(runs, "_model", streamed)
    found = run(recipe_of(**said, output__folder=tmp_path / "streamed"))
    assert found.losses == expected.losses and len(set(found.losses)) >= 3
    assert found.adapter == expected.adapter


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_default(
    kind: str,
    adapter: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is on; streamed gives the resident bits; and nothing is left of it, or seen meanwhile."""
    names: list[str] = []
    at_step(monkeypatch, 2, lambda: names.extend(names_of_liger()))
    more: dict[str, Any] = {**ADAPTERS[adapter], "training__max_steps": 6}
    few = {"memory__slots": 2}
    off = {"training__use_liger_kernel": False}
    before = arm(model, data, tmp_path / "before", kind, **more, **few, **off)
    streamed = arm(model, data, tmp_path / "streamed", kind, **more, **few)
    budget = arm(model, data, tmp_path / "budget", kind, **more, memory__vram="2GiB")
    resident = arm(model, data, tmp_path / "resident", kind, **more, memory__resident=True)
    after = arm(model, data, tmp_path / "after", kind, **more, **few, **off)
    assert "Liger's feed-forwards, norms, rotary embeddings" in streamed.said
    assert "Liger's are off" in before.said
    for found in (streamed, budget):
        assert (found.losses, found.adapter) == (resident.losses, resident.adapter)
    assert (before.losses, before.adapter) == (after.losses, after.adapter)
    assert before.adapter != streamed.adapter  # control
    assert names == names_of_liger() == []
    assert "could not be estimated" not in caplog.text


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3", "qwen3"])
def test_replayed_equals_resident(architecture: str, autocast: bool, tmp_path: Path) -> None:
    modeling = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    with liger_alone(modeling) as applied:
        expected = train(applied(model_of(tmp_path, architecture)), autocast=autocast)
    model = model_of(tmp_path, architecture)
    assert len(use_liger(model.get_base_model())) == 3
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
        expected = models.run(resident, together=False, autocast=True)
    model = model_of(tmp_path, **options)
    use_liger(model.get_base_model())
    poros.prepare(model, loss="reference", slots=2, keep_last=keep_last, cuda_graphs=True)
    assert same_runs(models.run(model, together=True, autocast=True), expected)
    assert poros.runtime(model).stats()["num_replayed_visits"] > 0


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gemma4"])
def test_what_takes_some_of_them(architecture: str, tmp_path: Path) -> None:
    """Experts keep their own forward, and Gemma 4 its rotary embeddings."""
    found = []
    for streams in (False, True):
        model = model_of(tmp_path, architecture, target_modules=["q_proj", "o_proj"])
        assert len(use_liger(model.get_base_model())) == 2
        if streams:
            poros.prepare(model, loss="reference", slots=2, keep_last=0)
        found.append(train(model))
    assert same_runs(*found)
