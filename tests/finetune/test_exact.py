"""A streamed run gives the bits of the same recipe with the base resident."""

from pathlib import Path
from typing import Any

import pytest

from tests.finetune.subjects import Trained, recipe_of, run

COMMON = {
    "data__chat_template": "chatml",
    "data__max_length": 64,
    "data__pad_to": 16,
    "training__batch_size": 2,
    "training__accumulation": 4,
    "training__learning_rate": 1e-3,
    "adapter__rank": 4,
    "adapter__dropout": 0.1,
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, packed": ("messages", {"data__packing": True}),
    "sft, padded": ("messages", {"data__packing": False}),
    "dpo": ("preferences", {"training__method": "dpo"}),
    "dora": ("completions", {"adapter__kind": "dora", "training__steps": 3}),
    "lora+": ("text", {"training__lora_plus": 16, "training__steps": 3}),
    "schedule-free": ("text", {"training__optimizer": "schedule_free_adamw", "training__steps": 3}),
    "bfloat16 adapter": ("text", {"adapter__dtype": "bfloat16", "training__steps": 3}),
    "dense base": ("text", {"model__quantization": "none", "training__steps": 3}),
    "validation": (
        "completions",
        {"data__validation": 0.1, "output__evaluate_every": 2, "training__steps": 4},
    ),
}


def arm(model: Path, data: Path, out: Path, kind: str, **more: Any) -> Trained:
    form, options = RECIPES[kind]
    said = {**COMMON, **options, **more}
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    return run(recipe_of(**source, output__folder=out, **said))


@pytest.mark.parametrize("kind", RECIPES)
def test_streamed_equals_resident(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    streamed = arm(model, data, tmp_path / "streamed", kind, memory__slots=2)
    resident = arm(model, data, tmp_path / "resident", kind, memory__resident=True)
    assert streamed.losses == resident.losses
    assert streamed.adapter == resident.adapter
    # The first rate of a warmup is 0, so the first two losses of DPO are alike.
    assert len(set(streamed.losses)) >= len(streamed.losses) - 1 >= 2
    assert "going on" not in streamed.said


def test_control_another_seed_gives_other_bits(model: Path, data: Path, tmp_path: Path) -> None:
    kind = "lora+"
    first, second = (
        arm(model, data, tmp_path / str(seed), kind, memory__slots=2, training__seed=seed)
        for seed in (0, 1)
    )
    assert first.adapter != second.adapter and first.losses != second.losses
