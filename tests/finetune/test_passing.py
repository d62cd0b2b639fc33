"""Settings that are passed on to TRL and PEFT, or refused; that they act is seen in test_exact."""

import dataclasses
import json
import os
import signal
from array import array
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from packaging.version import Version
from peft import LoraConfig

from poros.errors import RecipeError
from poros.finetune import run as running
from poros.finetune.tokens import Tokens
from poros.finetune.trainers import _OURS, require_metric
from poros.recipes import passing
from poros.recipes.recipe import METHODS, Recipe, TrainingPart, named, settings
from tests.finetune import arms
from tests.finetune.arms import arm
from tests.finetune.subjects import Broken, Trained, at_step, break_at, recipe_of, run, write_rows


def becoming_worse(folder: Path, max_steps: int) -> dict[str, Any]:
    """Of a run that is validated on what is unlike what it learns, at each step."""
    return {
        "data__validation": write_rows(folder / "unlike.jsonl", [{"text": "QZ XJ KV " * 3}] * 4),
        "memory__slots": 2,
        "training__max_steps": max_steps,
        "training__learning_rate": 0.5,
        "training__lr_scheduler_type": "constant",
        "training__eval_steps": 1,
        "training__save_steps": 1,
    }


def test_the_best_checkpoint_is_the_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    """Which is neither the last nor removed."""
    folder, options = tmp_path / "run", becoming_worse(tmp_path, 5)
    found = arm(model, data, folder, "text", **options, training__load_best_model_at_end=True)
    state = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
    history = [line for line in state["log_history"] if "eval_loss" in line]
    best = min(history, key=lambda line: line["eval_loss"])
    assert best["step"] < 4
    kept = folder / f"checkpoint-{best['step']}" / "adapter_model.safetensors"
    assert found.adapter == kept.read_bytes()
    assert len(list(folder.glob("checkpoint-*"))) == 3


class Ended(NamedTuple):
    """A run that early stopping has ended, and its settings."""

    options: dict[str, Any]
    whole: Trained


@pytest.fixture(scope="module")
def ended(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("ended")
    options = arms.settings(model, data, "text") | becoming_worse(folder, 12)
    options["training__early_stopping_patience"] = 2
    return Ended(options, run(recipe_of(**options, output__folder=folder / "whole")))


def test_a_run_that_becomes_no_better_ends(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was interrupted while it did not."""
    expected = ended.whole
    number = len(expected.losses)
    assert number < 12
    recipe = recipe_of(**ended.options, output__folder=tmp_path / "run")
    break_at(monkeypatch, recipe, number - 1)
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)


def test_a_run_that_early_stopping_has_ended_is_over(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a signal came in its last step, if no adapter was written, and if it may be longer."""
    options, expected = {**ended.options, "output__folder": tmp_path / "run"}, ended.whole
    last = len(expected.losses)
    recipe = recipe_of(**options)

    def save(*arguments: Any) -> Path:
        raise Broken

    # A second one would kill: steps are logged twice, with their loss and with a validation's.
    send = cache(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with monkeypatch.context() as patch, pytest.raises(Broken):
        at_step(patch, last - 1, send)
        patch.setattr(running, "_save", save)
        run(recipe)
    for steps in (12, 24):
        found = run(recipe_of(**{**options, "training__max_steps": steps}))
        assert f"ended by early stopping after step {last} of {steps}" in found.said
        assert (found.adapter, found.losses) == (expected.adapter, expected.losses)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a package that is not there": ({"training__report_to": "comet_ml"}, "comet_ml is not there"),
    "another package": ({"training__optim": "adamw_torch_4bit"}, "torchao"),
    "a schedule without its argument": (
        {"training__lr_scheduler_type": "warmup_stable_decay"},
        "num_decay_steps",
    ),
    "arguments of another schedule": (
        {"training__lr_scheduler_kwargs": {"power": 2}},
        "unexpected keyword argument 'power'",
    ),
    "a best one that is not saved": (
        {
            **{"training__load_best_model_at_end": True, "data__validation": 0.1},
            **{"training__eval_steps": 2, "training__save_steps": 3},
        },
        "round multiple",
    ),
    "layers of all-linear": ({"adapter__layers_to_transform": [0]}, "PEFT refuses .*target_mod"),
    "an adapter on the head that preferences would not train": (
        {"training__method": "dpo", "adapter__target_modules": "q_proj,lm_head"},
        "found the head; leave it out",
    ),
    "modules that are not there": (
        {"adapter__modules_to_save": ["score"]},
        "found 'score', which match none",
    ),
    "modules to leave out that are not there": (
        {"adapter__exclude_modules": ["q_proj", "q_prj"]},
        "adapter.exclude_modules: .*found 'q_prj', which match none",
    ),
    "a rank for modules that are not there": (
        {"adapter__rank_pattern": {"q_prj": 8, "k_proj": 8}},
        r"adapter: .*rank_pattern .*\['q_prj'\]",
    ),
    "an alpha for modules without an adapter": (
        {"adapter__alpha_pattern": {"v_proj": 8}, "adapter__target_modules": "q_proj"},
        r"adapter: .*alpha_pattern .*\['v_proj'\]",
    ),
    "tokens that the embedding does not have": (
        {"adapter__trainable_token_indices": [5, 4000]},
        r"adapter.trainable_token_indices: expected .* 0 to 511, .*found \[4000\]",
    ),
    "margins of one answer": (
        {
            **{"training__method": "kto", "data__validation": 0.005},
            "training__metric_for_best_model": "eval_rewards/margins",
        },
        "training.metric_for_best_model: .*bad and good answers; add such rows to data.validation",
    ),
    "parameters that are not there": (
        {"adapter__target_parameters": ["q_prj.weight"]},
        r"adapter: .*target_parameters=\['q_prj.weight'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_goes_not_together_is_refused_before_the_base_is_loaded(
    case: str, model: Path, data: Path, tmp_path: Path
) -> None:
    options, what = REFUSED[case]
    kind = options.get("training__method", "text")
    with pytest.raises(RecipeError, match=what):
        arm(model, data, tmp_path / "run", kind, memory__slots=2, **options)
    assert not (tmp_path / "run").exists()


# A metric, the labels of the rows to validate on, rows of a batch, and what is missed.
METRICS = {
    "good answers": ("rewards/chosen", [1, 1, 0], 1, None),
    "no good answer": ("eval_rewards/chosen", [0, 0], 2, "hold good answers"),
    "no bad answer": ("logits/rejected", [1, 1], 2, "hold bad answers"),
    "both, but apart": ("rewards/margins", [1, 1, 0, 0], 2, "a batch of 2 has to hold bad and"),
    "both": ("rewards/margins", [1, 1, 0, 0], 3, None),
    "what every row has": ("kl", [1], 1, None),
}


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_of_kto_needs_its_answers(case: str) -> None:
    metric, labels, size, missed = METRICS[case]
    given: dict[str, Any] = {"metric_for_best_model": metric, "per_device_eval_batch_size": size}
    recipe = Recipe(training=TrainingPart(method="kto", more=given))
    held_out = Tokens(columns={"label": [array("i", [each]) for each in labels]})
    with nullcontext() if missed is None else pytest.raises(RecipeError, match=missed):
        require_metric(recipe, held_out)


def test_every_field_is_passed_on_or_refused_with_a_reason() -> None:
    """A field that a release adds is passed on; one that it removes has no reason left here."""
    fields = {
        ("adapter", "sft"): {each.name for each in dataclasses.fields(LoraConfig)},
        **{
            ("training", method): {
                each.name for each in dataclasses.fields(passing.config_of(method))
            }
            for method in METHODS
        },
    }
    for (section, method), names in fields.items():
        known = passing.types_of(section, method)
        assert names == known.keys() | {
            name for name in names if passing.refused(section, name, method)
        }
        # What cannot be read is not offered.
        assert [name for name, hint in known.items() if hint is None] == []
        # Ours have the names of theirs.
        own = {
            key.split(".")[1]
            for key in settings()
            if key.startswith(section) and (method == "sft" or key != "training.packing")
        }
        assert own - {*_OURS, "dtype"} <= known.keys()
        # Of the others none has a name that is known as one of ours, or of another tool.
        assert [name for name in known.keys() - own if named(name)] == []
    tables = (*passing._TRAINING.values(), *passing._ADAPTER.values())
    every = set().union(*fields.values())
    if Version(transformers.__version__) >= Version("5.23"):  # some are younger than the oldest
        assert {name for each in tables for name in each.split()} <= every
