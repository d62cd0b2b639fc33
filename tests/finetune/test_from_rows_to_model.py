"""What a recipe may ask for when a run has ended: a merged model, and an adapter on the hub.

The recipe is the one of docs/how-to/settings.md; only the names of model and data are replaced.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from poros.errors import RecipeError, StoreWriteError
from tests.command import poros_command, text
from tests.finetune.subjects import SHORT, TEMPLATE, announced, recipe_of, rows, run, write_model
from tests.support import same_bits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "settings.md"


def test_from_a_checkpoint_to_a_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX", reason="TensorBoard's files need a package of it")
    monkeypatch.chdir(tmp_path)
    base = write_model(tmp_path / "base", template=TEMPLATE)
    spoken = [
        {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
        for a, b in ((row["prompt"], row["completion"]) for row in rows("completions", 12))
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps(spoken))
    (written,) = re.findall(r"```yaml\n(model: [^`]*merged: [^`]*)```", PAGE.read_text())
    assert len(written.splitlines()) <= 8
    Path("recipe.yaml").write_text(re.sub(r"model: \S+", "model: ./base", written))
    result = poros_command("finetune", "recipe.yaml")
    assert result.exit_code == 0, text(result)
    assert "ShareGPT conversations, 12" in text(result) and "merged:  merged/mine" in text(result)
    (events,) = Path("runs/mine").rglob("events.out.tfevents.*")
    assert b"train/loss" in events.read_bytes() and b"poros/h2d_gb" in events.read_bytes()
    merged = AutoModelForCausalLM.from_pretrained("merged/mine")
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(plain, "runs/mine/adapter").merge_and_unload()
    for name, expected in adapted.state_dict().items():
        assert same_bits(merged.state_dict()[name], expected)
    assert not all(
        same_bits(value, merged.state_dict()[name])
        for name, value in AutoModelForCausalLM.from_pretrained(base).state_dict().items()
    )


def settings_for(model: Path, data: Path, out: Path) -> dict[str, Any]:
    return {
        **SHORT,
        **{"model__source": model, "data__source": data / "text.jsonl", "output__folder": out},
        **{"training__max_steps": 1, "memory__slots": 2, "training__push_to_hub": True},
    }


def test_a_folder_that_is_there_is_no_place_for_a_merged_model(
    model: Path, data: Path, tmp_path: Path
) -> None:
    options = settings_for(model, data, tmp_path / "run")
    with pytest.raises(RecipeError, match=r"--merged: .*there is something already"):
        recipe_of(**options, output__merged=tmp_path)


def test_a_dry_run_sends_nothing_and_no_checkpoint_is_sent(
    model: Path, data: Path, tmp_path: Path
) -> None:
    options = settings_for(model, data, tmp_path / "run")
    announced(recipe_of(**options))
    with pytest.raises(RecipeError, match="once the run has ended"):
        recipe_of(**options, training__hub_strategy="every_save")


def test_the_adapter_is_sent(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            asked.append(("made", (name, options["private"])))
            return SimpleNamespace(repo_id=f"me/{name}")

        def create_branch(self, name: str, **options: Any) -> None:
            asked.append(("branch", (name, options["branch"])))

        def upload_folder(self, **options: Any) -> None:
            assert (options["folder_path"] / "adapter_model.safetensors").is_file()
            asked.append(("sent", (options["repo_id"], options["revision"])))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    options = settings_for(model, data, tmp_path / "run")
    more = {"training__hub_private_repo": True, "training__hub_revision": "first"}
    run(recipe_of(**options, **more))
    assert asked == [
        *(("made", ("run", True)), ("branch", ("me/run", "first"))),
        ("sent", ("me/run", "first")),
    ]

    def fail(self: Hub, **options: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(Hub, "upload_folder", fail)
    options["output__folder"] = tmp_path / "other"
    with pytest.raises(StoreWriteError, match=r"gone.*`hf upload me/mine .*other/adapter` sends"):
        run(recipe_of(**options, training__hub_model_id="mine"))
    assert (tmp_path / "other" / "adapter").is_dir()
