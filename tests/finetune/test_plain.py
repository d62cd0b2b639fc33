"""A run gives the bits of plain transformers and PEFT, with none of Poros in the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import set_seed

import poros
from poros.finetune import run as runs
from poros.finetune.adapters import adapter_config
from poros.recipes.recipe import Recipe
from tests.covers import with_slow
from tests.finetune.subjects import SHORT, plain_base, recipe_of, run
from tests.support import AS_PLAIN

COMMON = {
    **SHORT,
    "data__chat_template": "chatml",
    "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 1e-3,
    "training__max_steps": 3,
}


def plain(recipe: Recipe, device: torch.device, run: object = None) -> Any:
    """The base in 4 bit by transformers alone, resident."""
    base = plain_base(recipe.model.source)
    base.config.use_cache = False
    set_seed(recipe.training.seed)
    return get_peft_model(base, adapter_config(recipe))


def streamed(recipe: Recipe, device: torch.device, run: object = None) -> Any:
    """As ``poros finetune`` does, with the loss and the kernels whose bits are the plain ones."""
    base = poros.load(recipe.model.source)
    base.config.use_cache = False
    set_seed(recipe.training.seed)
    return poros.prepare(get_peft_model(base, adapter_config(recipe)), slots=2, **AS_PLAIN)


@pytest.mark.parametrize("kind", with_slow(("packed", "padded", "dpo", "kto"), ("padded",)))
def test_streamed_equals_plain(
    kind: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"dpo": "preferences", "kto": "labelled"}.get(kind, "messages")
    more: dict[str, Any] = {}
    if kind in ("dpo", "kto"):
        more["training__method"] = kind
    else:
        more["training__packing"] = more["training__bf16"] = kind == "packed"
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    found = []
    for name, make in (("plain", plain), ("streamed", streamed)):
        monkeypatch.setattr(runs, "_model", make)
        # The plain model has nothing that could be logged of streaming.
        monkeypatch.setattr(runs, "log_streaming", lambda *args, **options: None)
        recipe = recipe_of(**source, output__folder=tmp_path / name, **{**COMMON, **more})
        found.append(run(recipe))
    assert found[0].losses == found[1].losses and len(found[0].losses) == 3
    assert found[0].adapter == found[1].adapter
