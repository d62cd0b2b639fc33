"""Runs of TRL's own trainers with the settings of a recipe, on a model of transformers alone."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import get_peft_model
from transformers import set_seed

from poros.config import StreamingPolicy
from poros.finetune import run as runs
from tests.finetune.subjects import Trained, plain_base, recipe_of, run
from tests.support import AS_PLAIN
from tests.trainers import trainer_arguments

SETTINGS: dict[str, Any] = {
    "max_length": 64,
    "pad_to_multiple_of": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": 3,
}
"""What both set; all else are the recipe's defaults, which TRL is told below."""


def prepare_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs prepare models with the loss and the kernels whose bits are the plain ones."""
    genuine = runs.prepare_with

    def prepare(model: Any, policy: StreamingPolicy, **given: Any) -> Any:
        return genuine(model, policy.override(**AS_PLAIN), **given)

    monkeypatch.setattr(runs, "prepare_with", prepare)


def by_poros(monkeypatch: pytest.MonkeyPatch, out: Path, **said: Any) -> Trained:
    """Train as ``poros finetune`` does, streamed, with kernels whose bits are the plain ones."""
    settings = {f"training__{name}": value for name, value in SETTINGS.items()}
    adapter = {"adapter__r": 4, "adapter__lora_dropout": 0.1, "memory__slots": 2}
    with monkeypatch.context() as patch:
        prepare_as_plain(patch)
        return run(recipe_of(output__folder=out, **{**settings, **adapter, **said}))


def by_trl(
    out: Path,
    source: Path,
    trainer_class: Any,
    config_class: Any,
    rows: Dataset,
    processing: Any,
    *,
    auto_class: Any,
    adapter: Any,
    fields: dict[str, Any],
    **options: Any,
) -> Trained:
    """Train with TRL, resident; ``options`` are those of ``from_pretrained``.

    TRL casts adapters of a 4-bit base to bfloat16; a recipe keeps them in float32.
    """
    set_seed(0)
    base = plain_base(source, auto_class, **options)
    base.config.use_cache = False
    set_seed(0)
    model = get_peft_model(base, adapter)
    before = {name: each.data for name, each in model.named_parameters() if each.requires_grad}
    options = {"lr_scheduler_type": "cosine", "bf16": False, "gradient_checkpointing": False}
    options |= {"use_cpu": True, "dataloader_pin_memory": False, **SETTINGS, **fields}
    arguments = trainer_arguments(out, config_class, **options)
    trainer = trainer_class(model, arguments, train_dataset=rows, processing_class=processing)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = before[name]
    trainer.train()
    model.save_pretrained(out / "adapter")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    weights = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    return Trained(weights, losses, "")
