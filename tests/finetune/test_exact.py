"""A streamed run gives the bits of the same recipe resident, and those of plain transformers.

Settings that are passed on to TRL and PEFT act: without them the bits are others.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from peft import get_peft_model
from safetensors import safe_open
from transformers import set_seed

from poros.finetune import run as runs
from poros.finetune.adapters import adapter_config
from poros.recipes.recipe import Recipe
from tests.covers import with_slow
from tests.finetune.arms import FAST, RECIPES, arm, both
from tests.finetune.subjects import Trained, plain_base, write_model
from tests.finetune.trl_runs import prepare_as_plain


@pytest.fixture(scope="module")
def without(
    model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """Runs that set no more than their method, by the form of their rows."""
    found: dict[str, Trained] = {}

    def get(form: str) -> Trained:
        if form not in found:
            method = {"preferences": "dpo", "labelled": "kto"}.get(form, "sft")
            more = {"data__source": data / f"{form}.jsonl", "training__method": method}
            out = tmp_path_factory.mktemp("without")
            found[form] = arm(model, data, out, "text", memory__slots=2, **more)
        return found[form]

    return get


@pytest.mark.parametrize("kind", with_slow(RECIPES, RECIPES.keys() - set(FAST)))
def test_streamed_equals_resident(
    kind: str, model: Path, data: Path, without: Callable[[str], Trained], tmp_path: Path
) -> None:
    found = both(model, data, tmp_path, kind)
    assert "going on" not in found.said
    form, options = RECIPES[kind]
    assert (found.adapter == without(form).adapter) == (kind == "text")  # it acts
    if kind == "grouped adapters":
        fused = {"training__adapter_kernels": "fused", "memory__slots": 2}
        assert arm(model, data, tmp_path / "fused", kind, **fused).adapter != found.adapter
    saved = json.loads((tmp_path / "streamed" / "adapter" / "adapter_config.json").read_text())
    of_peft = {name.removeprefix("adapter__"): value for name, value in options.items()}
    for name in of_peft.keys() & saved.keys() - {"target_modules", "exclude_modules"}:
        assert saved[name] == of_peft[name]
    if options.get("training__warmup_steps") == 0.5:  # of three steps
        (file,) = (tmp_path / "streamed").rglob("checkpoint-3/trainer_state.json")
        history = json.loads(file.read_text())["log_history"]
        rates = [line["learning_rate"] for line in history if "learning_rate" in line]
        assert rates == pytest.approx([0, 5e-3, 1e-2])


def plain(recipe: Recipe, *_: Any) -> Any:
    """The base in 4 bit by transformers alone, resident, with none of Poros in it."""
    base = plain_base(recipe.model.source)
    base.config.use_cache = False
    set_seed(recipe.training.seed)
    return get_peft_model(base, adapter_config(recipe, base))


KINDS = ("sft, packed", "sft, padded", "dpo", "kto")


@pytest.mark.parametrize("kind", with_slow(KINDS, ["sft, padded", "kto"]))
def test_streamed_equals_plain(
    kind: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss and the kernels whose bits are the plain ones."""
    # The plain model has nothing that could be logged of streaming.
    monkeypatch.setattr(runs, "log_streaming", lambda *args, **options: None)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_model", plain)
        expected = arm(model, data, tmp_path / "plain", kind)
    prepare_as_plain(monkeypatch)
    found = arm(model, data, tmp_path / "streamed", kind, memory__slots=2)
    assert found.losses == expected.losses and len(set(found.losses)) == 2
    assert found.adapter == expected.adapter


OF_NO_BIT: dict[str, Any] = {
    # Rows are loaded by other processes, and kept at the end.
    **{"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1},
    **{"dataloader_persistent_workers": True, "save_strategy": "epoch"},
    **{"torch_empty_cache_steps": 2, "dataset_num_proc": 2},
    **{"include_num_input_tokens_seen": "all", "logging_steps": 2, "run_name": "mine"},
    **{"log_level": "error", "tf32": False},
}


def test_what_decides_no_bit(
    model: Path, data: Path, without: Callable[[str], Trained], tmp_path: Path
) -> None:
    options = {f"training__{name}": value for name, value in OF_NO_BIT.items()}
    found = arm(model, data, tmp_path / "run", "text", memory__slots=2, **options)
    assert found.adapter == without("text").adapter
    (file,) = (tmp_path / "run").glob("checkpoint-*/training_args.bin")
    given = torch.load(file, weights_only=False)
    assert {name: getattr(given, name) for name in OF_NO_BIT} == OF_NO_BIT


def test_the_lengths_of_all_rows_are_known_to_batches_of_like_ones(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Sampler(transformers.trainer.LengthGroupedSampler):
        def __init__(self, *args: Any, lengths: Any, **options: Any) -> None:
            given.append(lengths)
            super().__init__(*args, lengths=lengths, **options)

    monkeypatch.setattr(transformers.trainer, "LengthGroupedSampler", Sampler)
    for kind in ("rows of like length", "pairs of like length"):
        arm(model, data, tmp_path / kind, kind, memory__slots=2, training__max_steps=1)
        assert len(given[-1]) == 200 and len(set(given[-1])) > 5
    assert len(given) == 2


@pytest.mark.parametrize("vision", with_slow(("keep", "drop"), ["keep"]))
def test_a_model_with_a_vision_tower(vision: str, data: Path, tmp_path: Path) -> None:
    """Its adapter is on the language model alone, by the names of the whole model.

    Beside what a user excludes.
    """
    model = write_model(tmp_path / "tiny", architecture="qwen3_vl")
    options = {"model__vision": vision, "adapter__exclude_modules": ["down_proj"]}
    both(model, data, tmp_path, "lora+", **options)
    (file,) = (tmp_path / "streamed").rglob("adapter/adapter_model.safetensors")
    with safe_open(file, "pt") as saved:
        names = list(saved.keys())
    assert names and all(".model.language_model.layers." in name for name in names)
    assert not any("down_proj" in name for name in names)
