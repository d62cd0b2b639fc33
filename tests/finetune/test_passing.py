"""Settings that are passed on to TRL and PEFT: each acts, and streamed gives the resident bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from poros.errors import RecipeError
from poros.finetune.trainers import _OURS
from poros.recipes import passing
from poros.recipes.recipe import METHODS, settings
from tests.covers import with_slow
from tests.finetune.subjects import (
    SHORT,
    Trained,
    break_at,
    recipe_of,
    run,
    write_rows,
)

COMMON: dict[str, Any] = {
    **SHORT,
    "training__packing": "auto",
    "training__per_device_train_batch_size": 2,
    "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 1e-2,
    "training__warmup_steps": 0,
    "training__max_steps": 2,
}
# Form of the rows, and what is set.
TRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "noise on the embedding": ("text", {"neftune_noise_alpha": 5}),
    "schedule with arguments": (
        "text",
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    ),
    "warm-up by steps": ("text", {"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"}),
    "moments": ("text", {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3}),
    "grouped adapters": ("text", {"adapter_kernels": "grouped"}),
    "weight decay": ("text", {"weight_decay": 0.5}),
    "clipping": ("text", {"max_grad_norm": 0.01}),
    "another optimizer": ("text", {"optim": "adafactor"}),
    "arguments of an optimizer": ("text", {"optim": "rmsprop", "optim_args": "momentum=0.5"}),
    "another order": ("text", {"data_seed": 7}),
    "rows of like length": (
        "text",
        {"train_sampling_strategy": "group_by_length", "packing": False},
    ),
    "rows in their order": ("text", {"train_sampling_strategy": "sequential"}),
    "losses of preferences": (
        "preferences",
        {"method": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.5]},
    ),
    "smoothed preferences": (
        "preferences",
        {"method": "dpo", "loss_type": "robust", "label_smoothing": 0.3},
    ),
    "weights of good and bad": ("labelled", {"method": "kto", "desirable_weight": 2}),
    "without a KL term": ("labelled", {"method": "kto", "loss_type": "apo_zero_unpaired"}),
    "several at once": (
        "text",
        {
            **{"neftune_noise_alpha": 5, "weight_decay": 0.5},
            **{"optim": "rmsprop", "optim_args": "momentum=0.5"},
            **{"lr_scheduler_type": "cosine_with_restarts"},
            "lr_scheduler_kwargs": {"num_cycles": 2},
        },
    ),
}
SLOW = (
    *("noise on the embedding", "weight decay", "arguments of an optimizer"),
    "schedule with arguments",
    *("warm-up by steps", "moments", "clipping", "another optimizer", "rows in their order"),
    *("smoothed preferences", "another order", "rows of like length"),
    *("weights of good and bad", "without a KL term", "losses of preferences"),
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "biases": {"bias": "all"},
    "bias of B": {"lora_bias": True},
    "another start": {"init_lora_weights": "gaussian"},
    "a start that is not the base": {"init_lora_weights": False},
    "some layers": {"target_modules": "q_proj,v_proj", "layers_to_transform": [0, 2]},
    "ranks of their own": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}},
    "but some modules": {"exclude_modules": ["down_proj"]},
    "a matrix by name": {
        **{"target_modules": "q_proj", "target_parameters": ["mlp.up_proj.weight"]},
        "lora_dropout": 0,  # PEFT has none for parameters
    },
    "head and norms": {"target_modules": "q_proj", "modules_to_save": ["lm_head", "norm"]},
    "some tokens": {"target_modules": "q_proj", "trainable_token_indices": [5, 6]},
    "rank-stabilized DoRA": {"use_dora": True, "use_rslora": True},
    "several at once": {
        **{"bias": "all", "init_lora_weights": "gaussian"},
        **{"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}},
    },
}
SLOW_ADAPTERS = (
    "biases",
    "another start",
    "ranks of their own",
    "bias of B",
    "a start that is not the base",
    "but some modules",
    "some layers",
    *("rank-stabilized DoRA", "a matrix by name"),
)


def trained(model: Path, data: Path, out: Path, form: str = "text", **more: Any) -> Trained:
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    return run(recipe_of(**source, output__folder=out, **{**COMMON, **more}))


def both(model: Path, data: Path, out: Path, form: str = "text", **more: Any) -> Trained:
    """The streamed run; asserts that the resident one has its bits."""
    streamed = trained(model, data, out / "streamed", form, memory__slots=2, **more)
    resident = trained(model, data, out / "resident", form, memory__resident=True, **more)
    assert streamed.losses == resident.losses
    assert streamed.adapter == resident.adapter
    return streamed


@pytest.fixture(scope="module")
def without(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that set nothing, by the form of their rows."""
    found: dict[str, Trained] = {}

    def get(form: str) -> Trained:
        if form not in found:
            method = {"preferences": "dpo", "labelled": "kto"}.get(form, "sft")
            out = tmp_path_factory.mktemp("without")
            options = {"training__method": method, "memory__slots": 2}
            found[form] = trained(model, data, out, form, **options)
        return found[form]

    return get


@pytest.mark.parametrize("case", with_slow(TRAINING, SLOW))
def test_training(case: str, model: Path, data: Path, without: Any, tmp_path: Path) -> None:
    form, said = TRAINING[case]
    options = {f"training__{name}": value for name, value in said.items()}
    found = both(model, data, tmp_path, form, **options)
    assert found.adapter != without(form).adapter  # it acts


@pytest.mark.parametrize("case", with_slow(ADAPTERS, SLOW_ADAPTERS))
def test_adapters(case: str, model: Path, data: Path, without: Any, tmp_path: Path) -> None:
    options = {f"adapter__{name}": value for name, value in ADAPTERS[case].items()}
    found = both(model, data, tmp_path, **options)
    assert found.adapter != without("text").adapter
    saved = json.loads((tmp_path / "streamed" / "adapter" / "adapter_config.json").read_text())
    for name in ADAPTERS[case].keys() - {"target_modules", "exclude_modules"}:
        assert saved[name] == ADAPTERS[case][name]


WATCHING: dict[str, dict[str, Any]] = {
    "loaded by others, and kept at the end": {
        **{"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1},
        **{"dataloader_persistent_workers": True, "save_strategy": "epoch"},
        "torch_empty_cache_steps": 2,
    },
    "counted": {
        **{"include_num_input_tokens_seen": "all", "logging_steps": 2, "run_name": "mine"},
        **{"log_level": "error", "tf32": False},
    },
}


@pytest.mark.parametrize("case", WATCHING)
def test_what_decides_no_bit(
    case: str, model: Path, data: Path, without: Any, tmp_path: Path
) -> None:
    options = {f"training__{name}": value for name, value in WATCHING[case].items()}
    found = trained(model, data, tmp_path / "run", memory__slots=2, **options)
    assert found.adapter == without("text").adapter


def test_the_best_checkpoint_is_the_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    """What is validated on is unlike what is learnt: the best is neither the last nor removed."""
    unlike = write_rows(tmp_path / "unlike.jsonl", [{"text": "QZ XJ KV " * 3}] * 4)
    options = {
        "data__validation": unlike,
        "training__max_steps": 5,
        "training__learning_rate": 0.5,
        "training__lr_scheduler_type": "constant",
        "training__eval_steps": 1,
        "training__save_steps": 1,
        "training__load_best_model_at_end": True,
    }
    folder = tmp_path / "run"
    found = trained(model, data, folder, memory__slots=2, **options)
    state = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
    history = [line for line in state["log_history"] if "eval_loss" in line]
    best = min(history, key=lambda line: line["eval_loss"])
    assert best["step"] < 4
    kept = folder / f"checkpoint-{best['step']}" / "adapter_model.safetensors"
    assert found.adapter == kept.read_bytes()
    assert len(list(folder.glob("checkpoint-*"))) == 3


def test_a_run_that_becomes_no_better_ends(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was interrupted while it did not."""
    unlike = write_rows(tmp_path / "unlike.jsonl", [{"text": "QZ XJ KV " * 3}] * 4)
    options: dict[str, Any] = {
        "model__source": model,
        "data__source": data / "text.jsonl",
        "data__validation": unlike,
        **COMMON,
        "memory__slots": 2,
        "training__max_steps": 12,
        "training__learning_rate": 0.5,
        "training__lr_scheduler_type": "constant",
        "training__eval_steps": 1,
        "training__save_steps": 1,
        "training__early_stopping_patience": 3,
    }
    expected = run(recipe_of(**options, output__folder=tmp_path / "whole"))
    number = len(expected.losses)
    assert number < 12
    recipe = recipe_of(**options, output__folder=tmp_path / "run")
    break_at(monkeypatch, recipe, number - 1)
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)


def test_reports_go_where_they_are_asked_for(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
            logged.append({"name": args.run_name, **logs})

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Report)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    options = {"training__report_to": "tensorboard", "training__run_name": "mine"}
    found = trained(model, data, tmp_path / "run", memory__slots=2, **options)
    assert [each["loss"] for each in logged if "loss" in each] == found.losses
    assert logged[0]["name"] == "mine" and "poros/h2d_gb" in logged[0]


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
        {
            **{"training__method": "dpo", "training__packing": "auto"},
            "adapter__target_modules": "q_proj,lm_head",
        },
        "found the head; leave it out",
    ),
    "modules that are not there": (
        {"adapter__modules_to_save": ["score"]},
        "found 'score', which match none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_goes_not_together_is_refused_before_the_base_is_loaded(
    case: str, model: Path, data: Path, tmp_path: Path
) -> None:
    options, what = REFUSED[case]
    form = "preferences" if options.get("training__method") == "dpo" else "text"
    with pytest.raises(RecipeError, match=what):
        trained(model, data, tmp_path / "run", form, memory__slots=2, **options)
    assert not (tmp_path / "run").exists()


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
        known = passing.kinds(section, method)
        assert names == known.keys() | {
            name for name in names if passing.refused(section, name, method)
        }
        # What cannot be read is not offered.
        assert [name for name, kind in known.items() if "nothing" in kind.expects] == []
        # Ours have the names of theirs.
        own = {
            key.split(".")[1]
            for key, each in settings().items()
            if key.startswith(section) and method in each.methods
        }
        assert own - {*_OURS, "dtype"} <= known.keys()
    tables = (*passing._TRAINING.values(), *passing._ADAPTER.values())
    every = set().union(*fields.values())
    if Version(transformers.__version__) >= Version("5.23"):  # some are younger than the oldest
        assert {name for each in tables for name in each.split()} <= every
