"""A streamed run gives the bits of the same recipe with the base resident."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.covers import with_slow
from tests.finetune.arms import RECIPES, arm
from tests.finetune.subjects import rows, write_model, write_rows


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for recipes without a number of steps: one pass over them is a few."""
    folder = tmp_path_factory.mktemp("few")
    for form, count in {"messages": 16, "preferences": 12}.items():
        write_rows(folder / f"{form}.jsonl", rows(form, count))
    return folder


SLOW = (
    *("schedule-free", "lora+", "validation", "bfloat16 adapter", "dense base"),
    *("bfloat16 adapter, bf16", "sft, packed", "sft, padded", "kto"),
)
"""What they have others have, or the tests below."""


@pytest.mark.parametrize("kind", with_slow(RECIPES, SLOW))
def test_streamed_equals_resident(
    kind: str, model: Path, data: Path, few: Path, tmp_path: Path
) -> None:
    source = data if "training__max_steps" in RECIPES[kind][1] else few
    streamed = arm(model, source, tmp_path / "streamed", kind, memory__slots=2)
    resident = arm(model, source, tmp_path / "resident", kind, memory__resident=True)
    assert streamed.losses == resident.losses
    assert streamed.adapter == resident.adapter
    # The first rate of a warmup is 0, so the first two losses of DPO are alike.
    assert len(set(streamed.losses)) >= len(streamed.losses) - 1 >= 2
    assert "going on" not in streamed.said


@pytest.mark.slow
def test_the_warmup_of_a_schedule_free_optimizer(model: Path, data: Path, tmp_path: Path) -> None:
    found = []
    for warmup in (0.0, 0.5):
        out = tmp_path / str(warmup)
        more = {"training__warmup_steps": warmup, "training__max_steps": 3, "memory__slots": 2}
        found.append(arm(model, data, out, "schedule-free", **more))
        (state,) = out.rglob("checkpoint-3/optimizer.pt")
        groups = torch.load(state, weights_only=True)["param_groups"]
        assert [each["warmup_steps"] for each in groups] == [2 if warmup else 0] * len(groups)
    assert found[0].losses[0] == found[1].losses[0] and found[0].adapter != found[1].adapter


@pytest.mark.parametrize("vision", with_slow(("keep", "drop"), ["keep"]))
def test_a_model_with_a_vision_tower(vision: str, data: Path, tmp_path: Path) -> None:
    """Its adapter is on the language model alone, by the names of the whole model.

    Beside what a user excludes.
    """
    model = write_model(tmp_path / "tiny", architecture="qwen3_vl")
    options: Any = {"model__vision": vision, "training__max_steps": 2}
    options["adapter__exclude_modules"] = ["down_proj"]
    streamed = arm(model, data, tmp_path / "streamed", "lora+", memory__slots=2, **options)
    resident = arm(model, data, tmp_path / "resident", "lora+", memory__resident=True, **options)
    assert streamed.losses == resident.losses and streamed.adapter == resident.adapter
    (file,) = (tmp_path / "streamed").rglob("adapter/adapter_model.safetensors")
    with safe_open(file, "pt") as saved:
        names = list(saved.keys())
    assert names and all(".model.language_model.layers." in name for name in names)
    assert not any("down_proj" in name for name in names)
