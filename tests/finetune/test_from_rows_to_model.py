"""What a recipe may ask for when a run has ended: a merged model, and an adapter on the hub.

The recipe is the one of docs/how-to/settings.md; only the names of model and data are replaced.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from poros.errors import RecipeError
from tests.command import poros_command, text
from tests.comparing import compare_mappings
from tests.finetune.subjects import SHORT, TEMPLATE, recipe_of, rows, write_model

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
    config = json.loads(Path("runs/mine/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)  # found from any folder
    (events,) = Path("runs/mine").rglob("events.out.tfevents.*")
    assert b"train/loss" in events.read_bytes() and b"poros/h2d_gb" in events.read_bytes()
    merged = AutoModelForCausalLM.from_pretrained("merged/mine")
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(plain, "runs/mine/adapter").merge_and_unload()
    assert compare_mappings(adapted.state_dict(), merged.state_dict()) == []
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert compare_mappings(plain.state_dict(), merged.state_dict())


def settings_for(model: Path, data: Path, out: Path) -> dict[str, Any]:
    return {
        **SHORT,
        **{"model__source": model, "data__source": data / "text.jsonl", "output__folder": out},
        **{"training__max_steps": 1, "memory__slots": 2},
    }


def test_a_folder_that_is_there_is_no_place_for_a_merged_model(
    model: Path, data: Path, tmp_path: Path
) -> None:
    options = settings_for(model, data, tmp_path / "run")
    with pytest.raises(RecipeError, match=r"--merged: .*it is there already"):
        recipe_of(**options, output__merged=tmp_path)


@pytest.fixture(scope="module")
def ended(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended and its merged model, and the recipe of both."""
    folder = tmp_path_factory.mktemp("ended")
    options = settings_for(model, data, Path("run"))
    (folder / "recipe.yaml").write_text(recipe_of(**options, output__merged="merged").as_yaml())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = poros_command("finetune", "recipe.yaml")
    assert result.exit_code == 0 and (folder / "merged" / "config.json").is_file(), text(result)
    return folder


# What follows a recipe whose run has ended: the exit code, and what is said.
AFTERWARDS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "dry": (("--dry-run",), 0, "finished after step 1 of 1"),
    "rows are shown": (("--show", "1"), 0, "text.jsonl:1: "),
    "rows of another run are shown": (("--show", "1", "--lr", "1"), 0, "text.jsonl:1: "),
    "merged where nothing is": (("--merged", "other"), 0, "merged:  other"),
    "merged, but by another recipe": (("--merged", "other", "--lr", "1"), 2, "0.0002 then, 1.0"),
    "again": ((), 2, "to renew it, move it away"),
    "trained further": (("--steps", "2"), 2, "to renew it, move it away"),
    "the recipe is printed": (("--print-recipe",), 0, "merged: merged"),
}


@pytest.mark.parametrize("case", AFTERWARDS)
def test_a_run_that_has_ended(
    case: str, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, code, wanted = AFTERWARDS[case]
    monkeypatch.chdir(shutil.copytree(ended, tmp_path / "copy"))
    result = poros_command("finetune", "recipe.yaml", *options)
    assert result.exit_code == code and wanted in text(result), text(result)
    assert [each.name for each in Path("run").glob("adapter*")] == ["adapter"]
    expected = Path("merged", "model.safetensors").read_bytes()
    assert all(each.read_bytes() == expected for each in Path("other").glob("model.*"))


def test_the_adapter_is_sent(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    class Hub:
        is_gone = False

        def create_repo(self, name: str, **options: Any) -> Any:
            asked.append(("made", name, options["private"]))
            return SimpleNamespace(repo_id=f"me/{name}")

        def create_branch(self, name: str, **options: Any) -> None:
            asked.append(("branch", name, options["branch"]))

        def upload_folder(self, **options: Any) -> None:
            if self.is_gone:
                raise ConnectionError("gone")
            assert (options["folder_path"] / "adapter_model.safetensors").is_file()
            assert options["ignore_patterns"] == ["README.md"]  # it names a base on this machine
            asked.append(("sent", options["repo_id"], options["revision"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    fields = ("push_to_hub=true", "hub_private_repo=true", "hub_revision=first")
    command = (
        *("finetune", str(model), str(data / "text.jsonl"), "--steps", "1", "--max-length", "64"),
        *("--slots", "2", *(f"--set=training.{each}" for each in fields)),
    )
    refused = poros_command(*command, "--out", str(tmp_path / "run"))
    assert refused.exit_code == 2 and not (tmp_path / "run").exists()
    assert "expected a token" in text(refused) and "hf auth login" in text(refused)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_abc")
    dry = poros_command(*command, "--out", str(tmp_path / "run"), "--dry-run")
    assert (dry.exit_code, asked) == (0, [])
    done = poros_command(*command, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0 and "on the hub: me/run" in text(done), text(done)
    assert asked == [
        *(("made", "run", True), ("branch", "me/run", "first")),
        ("sent", "me/run", "first"),
    ]
    monkeypatch.setattr(Hub, "is_gone", True)
    other = str(tmp_path / "other")
    failed = poros_command(*command, "--out", other, "--set=training.hub_model_id=mine")
    assert failed.exit_code == 2 and "gone" in text(failed)
    assert "the same command sends it" in " ".join(text(failed).split())
    monkeypatch.setattr(Hub, "is_gone", False)
    again = poros_command(*command, "--out", other, "--set=training.hub_model_id=mine")
    assert again.exit_code == 0 and "on the hub: me/mine" in text(again), text(again)
