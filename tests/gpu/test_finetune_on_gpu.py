"""``poros finetune`` and what comes after it, on a GPU."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="poros finetune needs TRL")
pytest.importorskip("liger_kernel")

from peft import get_peft_model
from transformers import set_seed
from transformers.models.qwen2 import modeling_qwen2

import poros
from poros.cli.conversation import Chat
from poros.finetune import run as runs
from poros.finetune.adapters import adapter_config
from poros.finetune.liger import use_liger
from poros.gates import tiny
from poros.merging.saved_adapter import SavedAdapter
from poros.recipes.recipe import Recipe
from tests.command import poros_command
from tests.finetune.arms import COMMON, RECIPES, arm
from tests.finetune.subjects import at_step, recipe_of, rows, run, write_model, write_rows
from tests.liger import liger_alone, names_of_liger
from tests.support import AS_PLAIN

pytestmark = pytest.mark.gpu

Model = Any
KINDS = ("sft, packed", "sft, padded", "dpo")
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"adapter__use_dora": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "text", "preferences"):
        write_rows(folder / f"{form}.jsonl", rows(form))
    return folder


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some steps."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    settings = {
        "model__source": model,
        "data__source": data / "text.jsonl",
        "training__max_length": 64,
        "training__max_steps": 12,
        "memory__slots": 2,
        "output__folder": folder,
    }
    run(recipe_of(**settings))
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


@pytest.mark.parametrize(
    ("kind", "adapter"), [*product(KINDS, ADAPTERS), ("bfloat16 adapter", "lora")]
)
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


def test_the_summary_forecasts_how_long_it_takes(model: Path, data: Path, tmp_path: Path) -> None:
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    found = run(recipe_of(**source, training__max_steps=2, output__folder=tmp_path / "run"))
    assert "published rates" in found.said or "known after the first steps" in found.said


def test_a_report_has_the_memory_of_the_gpu(finished: Path) -> None:
    done = poros_command("report", str(finished))
    assert done.exit_code == 0, done.output
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "there was no GPU" not in page


def test_a_chat_says_what_the_resident_model_says(finished: Path) -> None:
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    base = config["base_model_name_or_path"]
    talk = Chat(SavedAdapter(finished / "adapter"), base, vram="64MiB", max_new_tokens=8)
    other = Chat(SavedAdapter(finished / "adapter"), base, max_new_tokens=8)
    assert talk.answer("the slot", lambda text: None) == other.answer("the slot", lambda text: None)
