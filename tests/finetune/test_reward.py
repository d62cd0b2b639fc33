"""``method: reward``: a reward model with the bits of TRL's ``RewardTrainer`` on a resident one."""

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification as SCORE
from transformers import AutoTokenizer

from poros.errors import DataFormatError, UnsupportedModelError
from tests.command import poros_command, text
from tests.comparing import compare_mappings
from tests.finetune.arms import COMMON, streamed_as_resident
from tests.finetune.subjects import TEMPLATE, announced, recipe_of, rows, write_model, write_rows
from tests.finetune.trl_runs import by_poros, by_trl


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
        for name, text in row.items()
    }


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "tiny", template=TEMPLATE)


def plain(out: Path, model: Path, made: list[dict[str, Any]], **fields: Any) -> Any:
    return by_trl(
        *(out, model, trl.RewardTrainer, trl.RewardConfig, Dataset.from_list(made)),
        AutoTokenizer.from_pretrained(model),
        auto_class=SCORE,
        num_labels=1,
        adapter=LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="SEQ_CLS"
        ),
        fields=fields,
    )


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_streamed_equals_trl_on_a_resident_model(
    form: str, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are too long are left out by both; control: another coefficient, other bits."""
    made = rows("preferences", 24)
    made[3]["chosen"] = "too long " * 80
    if form == "messages":
        made = [as_messages(row) for row in made]
    source = {"model__source": chat, "data__source": write_rows(tmp_path / "rows.jsonl", made)}
    said = {**source, "training__method": "reward"}
    found = by_poros(monkeypatch, tmp_path / "streamed", **said)
    expected = plain(tmp_path / "trl", chat, made)
    assert (found.losses, found.adapter) == (expected.losses, expected.adapter)
    assert len(found.losses) == 3 and "1 left out" in found.said
    with safe_open(tmp_path / "streamed" / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        assert any("score" in name for name in names)
        # Not the losses: on some processors bfloat16 rounds all of them to the same.
        assert any(file.get_tensor(name).any() for name in names if "lora_B" in name)
    config = json.loads((tmp_path / "streamed" / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    if form == "texts":
        other = {"training__center_rewards_coefficient": 0.5}
        control = by_poros(monkeypatch, tmp_path / "control", **said, **other)
        assert control.adapter != expected.adapter
        with_it = plain(tmp_path / "trl control", chat, made, center_rewards_coefficient=0.5)
        assert control.adapter == with_it.adapter


@pytest.mark.gpu
def test_on_a_gpu_streamed_equals_resident(chat: Path, data: Path, tmp_path: Path) -> None:
    source = {"model__source": chat, "data__source": data / "preferences.jsonl"}
    more = {"training__method": "reward", "training__max_steps": 6}
    streamed_as_resident(tmp_path, **source, **{**COMMON, **more})


def test_what_cannot_be_trained_is_refused_before_the_base_is_loaded(
    data: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "tiny", architecture="gemma4")
    options = {"training__method": "reward", "output__folder": tmp_path / "run"}
    source = {"model__source": model, "data__source": data / "preferences.jsonl"}
    with pytest.raises(UnsupportedModelError, match="AutoModelForSequenceClassification, found"):
        announced(recipe_of(**source, **options))
    with pytest.raises(DataFormatError, match=r"rows for reward \(chosen, rejected\)"):
        announced(recipe_of(**{**source, "data__source": data / "text.jsonl"}, **options))
    assert not (tmp_path / "run").exists()


def test_the_command_merges_it(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows("preferences", 8))
    short = ("--method", "reward", "--steps", "1", "--max-length", "64", "--merged", "merged")
    result = poros_command("finetune", str(chat), "rows.jsonl", "--out", "run", *short)
    assert result.exit_code == 0 and "poros chat" not in text(result), text(result)
    assert "3 blocks on the device at a time" in " ".join(text(result).split()), "it is planned"
    reader: Any = AutoPeftModelForSequenceClassification
    adapted = reader.from_pretrained("run/adapter", num_labels=1).merge_and_unload()
    merged = SCORE.from_pretrained("merged")
    assert merged.config.num_labels == 1
    assert compare_mappings(adapted.state_dict(), merged.state_dict()) == []
