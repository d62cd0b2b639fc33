"""Recipes that are trained in several ways, whose results have to be equal."""

from pathlib import Path
from typing import Any

from tests.finetune.subjects import SHORT, Trained, recipe_of, run

COMMON = {
    **SHORT,
    "data__chat_template": "chatml",
    "training__per_device_train_batch_size": 2,
    "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 1e-3,
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, packed": ("messages", {"training__packing": True, "training__bf16": True}),
    "sft, padded": ("messages", {"training__packing": False, "training__max_steps": 3}),
    "dpo": ("preferences", {"training__method": "dpo", "training__bf16": True}),
    "kto": (
        "labelled",
        {"training__method": "kto", "training__bf16": True, "training__max_steps": 3},
    ),
    "dora": (
        "completions",
        {"adapter__use_dora": True, "training__max_steps": 3, "training__bf16": True},
    ),
    "lora+": ("text", {"training__lora_plus": 16, "training__max_steps": 3}),
    "schedule-free": ("text", {"training__optim": "schedule_free_adamw", "training__max_steps": 3}),
    "schedule-free, warmed up and evaluated": (
        "text",
        {
            **{"training__optim": "schedule_free_adamw", "training__warmup_steps": 0.5},
            **{"data__validation": 0.04, "training__eval_steps": 1, "training__max_steps": 3},
        },
    ),
    "bfloat16 adapter": ("text", {"adapter__dtype": "bfloat16", "training__max_steps": 3}),
    "bfloat16 adapter, bf16": (
        "text",
        {"adapter__dtype": "bfloat16", "training__max_steps": 3, "training__bf16": True},
    ),
    "dense base": ("text", {"model__quantization": "none", "training__max_steps": 3}),
    "validation": (
        "completions",
        {"data__validation": 0.1, "training__eval_steps": 2, "training__max_steps": 4},
    ),
}


def arm(model: Path, data: Path, out: Path, kind: str, **more: Any) -> Trained:
    form, options = RECIPES[kind]
    said = {**COMMON, **options, **more}
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    return run(recipe_of(**source, output__folder=out, **said))
