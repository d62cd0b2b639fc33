"""What is shown: the summary before a run, the progress while it trains, the recipes."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from poros.errors import RecipeError, VRAMBudgetError
from poros.finetune import summary
from poros.finetune.trainers import num_warmup_steps
from poros.planning.cost_model import CostModel
from poros.recipes.reading import read_recipe
from poros.reporting.events import read_run
from poros.utils import devices
from tests.command import poros_command, text
from tests.finetune.subjects import announced, recipe_of, run, write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dry(model: Path, data: Path, tmp_path: Path) -> Callable[..., str]:
    """Says what is shown before a run of texts, with such changes."""

    def look(**changes: object) -> str:
        source = {"model__source": model, "data__source": data / "text.jsonl"}
        common = {**source, "training__max_length": 64, "output__folder": tmp_path / "run"}
        said = announced(recipe_of(**{**common, **changes}))
        assert not (tmp_path / "run").exists()
        return said

    return look


PACKED: dict[str, Any] = {"data__validation": 0.05, "memory__vram": "1GiB"}
WARMING_UP = {"training__warmup_steps": 20, "training__gradient_accumulation_steps": 1}
# Settings, rows that are padded or 200 that are packed, and what is said; of updates no more.
SUMMARIES: dict[str, tuple[dict[str, Any], int | None, tuple[str, ...]]] = {
    "packed": (
        PACKED,
        None,
        (
            *("190 rows", "89 % of them trained on", "packed into rows of 64", "10 held out"),
            *("fits: ", "of 1.07 GB", "3 of 3 blocks", " for the base"),
            *("4 steps of 8 rows", "few updates of the adapter: 4", "lora, rank 16, alpha 32"),
        ),
    ),
    "long": (
        {"training__max_length": 4096},
        None,
        ("rows are cut at the model's 256 positions", "updates of the adapter"),
    ),
    "as many updates as wanted": ({}, 400, ("50 steps of 8 rows",)),
    "one": ({}, 8, ("1 step of 8 rows", "few updates of the adapter: 1")),
    "few": ({}, 80, ("10 steps of 8 rows", "few updates of the adapter: 10", "--accumulation")),
    "warming up": (WARMING_UP, 12, ("12 steps in all, within the warm-up of 20", "--warmup")),
}


@pytest.mark.parametrize("case", SUMMARIES)
def test_the_summary_before_a_run(case: str, dry: Callable[..., str], tmp_path: Path) -> None:
    options, number, wanted = SUMMARIES[case]
    if number is not None:
        source = write_rows(tmp_path / "rows.jsonl", "text", number)
        options = {"data__source": source, "training__packing": False, **options}
    said = dry(**options)
    assert [each for each in wanted if each not in said] == [], said
    is_noted = len(wanted) > 1
    assert ("updates of the adapter" in said or "warm-up" in said) == is_noted


@pytest.mark.parametrize(
    ("memory", "expected"),
    [({}, 2**30), ({"memory__vram": "64MiB"}, 2**26), ({"memory__slots": 2}, None)],
)
def test_the_free_memory_of_the_gpu_is_the_budget_if_none_is_given(
    memory: dict[str, Any],
    expected: int | None,
    model: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "free_budget", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3090")
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    recipe = recipe_of(**source, **memory)
    size = summary.Size(row_length=64, num_rows=8, num_steps=1, num_validation=0)
    config = AutoConfig.from_pretrained(model)
    adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    planner = summary.planner_of(recipe, config, adapter)
    plan = summary.planned(recipe, size, planner, torch.device("cuda"))
    assert not isinstance(plan, str) and plan.vram_budget == expected


def test_an_adapter_on_the_embedding_is_noted(
    model: Path, data: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """In words of ours, and before a run: what is saved, and what is not merged."""
    tied = write_model(tmp_path / "tied", architecture="gemma3_text")
    options = (str(data / "text.jsonl"), "--max-length", "64", "--target-modules", "embed_tokens")
    out = ("--out", str(tmp_path / "run"))
    result = poros_command("finetune", str(tied), *options, *out, "--dry-run")
    said = " ".join(text(result).split())
    assert result.exit_code == 0 and "`poros merge` does not merge it" in said, said
    merged = ("--merged", str(tmp_path / "merged"))
    result = poros_command("finetune", str(tied), *options, *out, *merged)
    assert result.exit_code == 2 and "--merged: output.merged: expected" in text(result)
    assert not (tmp_path / "run").exists()
    result = poros_command("finetune", str(model), *options, *out, *merged, "--steps", "1")
    said = " ".join(text(result).split())
    assert result.exit_code == 0 and "PEFT saves that with it, as a whole" in said, said
    assert "does not merge it" not in said and (tmp_path / "merged").is_dir()
    assert [each for each in recwarn if "peft" in each.filename] == []


WRITTEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "completions": (
        {"prompt": "\x1b[2J\u540d\u202e", "completion": "ab\nc"},
        ["row: \\x1b[2J\u540d\\u202e[[ab\\nc<eos>]]"],
    ),
    "preferences": (
        {"prompt": "\x1b[2J\u540d\u202e", "chosen": "ab\nc", "rejected": "xyz"},
        ["chosen: \\x1b[2J\u540d\\u202e[[ab\\nc<eos>]]", "rejected: ", "[[xyz<eos>]]"],
    ),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_rows_are_shown_with_what_is_learnt(form: str, model: Path, tmp_path: Path) -> None:
    """And no row can move the cursor; those of which nothing is learnt are left out."""
    row, wanted = WRITTEN[form]
    empty = {**row, "prompt": "the slot " * 60} if form == "completions" else row
    write_rows(tmp_path / "rows.jsonl", [empty, row, row, row])
    command = (
        *("finetune", str(model), str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "run")),
        *("--max-length", "64", "--method", "dpo" if form == "preferences" else "sft"),
    )
    result = poros_command(*command, "--show", "2")
    assert result.exit_code == 0, result.output
    said = text(result)
    first = 2 if form == "completions" else 1
    assert f"rows.jsonl:{first}: " in said and f"rows.jsonl:{first + 1}: " in said
    assert "rows.jsonl:4" not in said and "steps of 8 rows" not in said
    for each in wanted:
        assert said.count(each) == 2, said
    assert not (tmp_path / "run").exists()


def test_a_run_of_one_step_learns(model: Path, tmp_path: Path) -> None:
    """Its warm-up would have been all of it, at a rate of 0."""
    recipe = recipe_of(
        model__source=model,
        data__source=write_rows(tmp_path / "rows.jsonl", "text", 1),
        training__max_length=64,
        training__packing=False,
        training__gradient_accumulation_steps=1,
        memory__slots=2,
        output__folder=tmp_path / "run",
    )
    run(recipe)
    assert read_run(tmp_path / "run").values("learning_rate") == [(1, 2e-4)]
    assert [num_warmup_steps(recipe, steps) for steps in (1, 33, 34, 100)] == [0, 0, 2, 3]


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_run_takes_its_costs_from_the_summary(
    is_alike: bool, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a model with another adapter than was planned is counted anew."""
    made: list[object] = []

    def make(recipe: Any) -> CostModel:
        made.append(recipe)
        return CostModel(recipe)

    monkeypatch.setattr("poros.planning.planner.CostModel", make)
    if not is_alike:
        planner_of, other = summary.planner_of, LoraConfig(r=2, target_modules="all-linear")
        monkeypatch.setattr(summary, "planner_of", lambda *given: planner_of(*given[:2], other))
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    options = {"training__max_length": 64, "training__max_steps": 1, "memory__vram": "1GiB"}
    run(recipe_of(**source, **options, output__folder=tmp_path / "run"))
    assert len(made) == (1 if is_alike else 2)


def targets(names: str, what: str) -> tuple[dict[str, Any], type[Exception], str]:
    settings = {"adapter__target_modules": names, "memory__resident": True}
    return settings, RecipeError, rf"{what}.*--target-modules"


def attention(name: str, what: str) -> tuple[dict[str, Any], type[Exception], str]:
    return {"model__attention": name}, RecipeError, what


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a budget that is too small": (
        {"memory__vram": "1MiB", "training__per_device_train_batch_size": 64},
        *(VRAMBudgetError, "What would make it fit"),
    ),
    "a step that does not come": (
        {"output__trace_step": 6, "training__max_steps": 5},
        *(RecipeError, "--trace-step.*: expected one of the run's 5 steps, found 6; lower it"),
    ),
    "targets that match nothing": targets("q_prj", "found 'q_prj'.*q_proj, up_proj"),
    "targets of which some match nothing": targets(
        "q_proj,v_prj,k_prj", "found 'k_prj, v_prj'.*q_proj, up_proj"
    ),
    "targets of no adapter": targets(
        "q_proj,input_layernorm", "is not supported(?!.*q_proj, up_proj)"
    ),
    "no such attention": attention("flash", "expected one of eager, .*flash_attention_2"),
    # A kernel of the hub is code of a stranger.
    "attention of a stranger": attention("me/kernel", "found 'me/kernel'"),
    "attention that is not installed": attention("flash_attention_2", "--attention.*installed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_it_is_loaded(case: str, dry: Callable[..., str]) -> None:
    options, error, what = REFUSED[case]
    if find_spec("flash_attn") and "flash" in options.get("model__attention", ""):
        pytest.skip("flash attention is installed")
    with pytest.raises(error, match=what):
        dry(**options)


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward", "images"])
def test_the_example_recipes_can_be_read(name: str) -> None:
    draft = read_recipe(ROOT / "examples" / "recipes" / f"{name}.yaml", {})
    assert draft.problems == []
    assert draft.recipe().training.method == ("sft" if name == "images" else name)
