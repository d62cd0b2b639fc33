"""A run that was interrupted goes on, and ends with the bits of one that was not."""

import fcntl
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from poros.errors import RunFolderError
from poros.finetune import run as running
from poros.finetune.resuming import inspect_run_dir
from poros.finetune.run import Interrupted
from poros.finetune.tokens import NAMED
from poros.finetune.trainers import Stopping
from poros.recipes.recipe import Recipe
from poros.reporting.events import read_run
from tests.children import run_forked
from tests.damage import tensors
from tests.finetune.subjects import (
    NUM_STEPS,
    Broken,
    Trained,
    at_step,
    break_at,
    in_four_steps,
    recipe_of,
    rows,
    run,
    write_model,
    write_rows,
)


def options_for(model: Path, data: Path, out: Path) -> dict[str, Any]:
    return in_four_steps(model, data / "completions.jsonl") | {"output__folder": out}


@pytest.fixture
def options(model: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    return options_for(model, data, tmp_path / "run")


@pytest.fixture(scope="module")
def expected(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe_of(**options_for(model, data, tmp_path_factory.mktemp("whole") / "run")))


def checkpoints(recipe: Recipe) -> set[str]:
    return {each.name for each in Path(recipe.output.folder or "").glob("checkpoint-*")}


def events(recipe: Recipe) -> list[int]:
    return [each["step"] for each in read_run(Path(recipe.output.folder or "")).logs]


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_a_signal_ends_a_run_with_a_checkpoint(
    strategy: str, options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the end of an epoch would save another one at the same step, there is one."""
    recipe = recipe_of(**options | {"training__save_strategy": strategy})
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted, match="stopped after step 3 of 4") as caught:
            run(recipe)
    assert caught.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (Path(options["output__folder"]) / "adapter").exists()
    found = run(recipe)
    assert "going on after step 3 of 4" in found.said
    assert found.adapter == expected.adapter


def test_no_signal_is_awaited_outside_of_the_main_thread() -> None:
    def listen() -> int:
        with Stopping().listening():
            return 1

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(listen).result() == 1


def test_a_run_that_ended_before_its_adapter_was_there(
    options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    genuine = running._save

    def save(*arguments: Any) -> None:
        genuine(*arguments)
        adapter = Path(options["output__folder"]) / "adapter"
        adapter.rename(adapter.with_name(".adapter.poros.partial"))
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(running, "_save", save)
        run(recipe)
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)
    assert not list(Path(options["output__folder"]).glob("*.partial"))


def test_what_may_change_between_and_what_may_not(
    options: dict[str, Any], expected: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_rows(tmp_path / "own.jsonl", rows("completions"))
    options["data__source"] = own
    recipe = recipe_of(**options)
    break_at(monkeypatch, recipe, 2)
    folder = Path(options["output__folder"])
    for change, what in (
        ({"training__learning_rate": 1e-3}, "training.learning_rate: 0.0002 then, 0.001 now"),
        ({"adapter__r": 8, "training__seed": 1}, "adapter.r: 4 then, 8 now"),
    ):
        with pytest.raises(RunFolderError, match="give another folder") as caught:
            run(recipe_of(**{**options, **change}))
        assert what in str(caught.value)
    write_rows(own, rows("completions", 199))
    with pytest.raises(RunFolderError, match=r"rows of data\.source as tokens: another now"):
        run(recipe)
    write_rows(own, rows("completions"))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="another process"):
            run(recipe)
    found = run(recipe_of(**{**options, "memory__slots": 3}))  # decides no bit
    assert "going on after step 1 of 4" in found.said
    assert found.adapter == expected.adapter
    with pytest.raises(RunFolderError, match="finished one: its adapter is"):
        inspect_run_dir(recipe)


def test_another_run_that_ends_while_rows_become_tokens(
    options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked at an empty folder."""
    recipe = recipe_of(**options)
    folder = Path(options["output__folder"])
    genuine = running.tokenize

    def tokenize(*arguments: Any) -> Any:
        monkeypatch.setattr(running, "tokenize", genuine)
        run(recipe)
        return genuine(*arguments)

    monkeypatch.setattr(running, "tokenize", tokenize)
    with pytest.raises(RunFolderError, match="finished one: its adapter is"):
        run(recipe)
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == expected.adapter
    assert events(recipe) == list(range(1, NUM_STEPS + 1))


def test_a_run_without_a_checkpoint_may_begin_as_another(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has run out of memory, say; nothing of it is gone on with."""
    before = recipe_of(**{**options, "training__save_steps": 50, "training__seed": 1})
    break_at(monkeypatch, before, 2)
    assert checkpoints(before) == set()
    recipe = recipe_of(**{**options, "training__per_device_train_batch_size": 2})
    found = run(recipe)
    assert "without a checkpoint: begins again" in found.said
    elsewhere = {**options, "output__folder": tmp_path / "elsewhere"}
    expected = run(recipe_of(**{**elsewhere, "training__per_device_train_batch_size": 2}))
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)
    assert events(recipe) == list(range(1, NUM_STEPS + 1))
    noted = json.loads((Path(options["output__folder"]) / "run.json").read_text())
    assert noted["recipe"]["training"]["seed"] == 0


@pytest.fixture
def longer(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of two steps an epoch, whose learning rate does not hang on its length."""
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "completions.jsonl", rows("completions", 8))
    options = options_for(model, data, tmp_path / "run")
    del options["training__max_steps"]
    return {
        **options,
        "training__packing": False,
        "training__per_device_train_batch_size": 2,
        "training__gradient_accumulation_steps": 2,
        "training__optim": "adamw_torch",
        "training__lr_scheduler_type": "constant",
    }


def test_a_finished_run_is_trained_further(
    longer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(longer["output__folder"])
    first = run(recipe_of(**longer))
    recipe = recipe_of(**{**longer, "training__num_train_epochs": 2})
    break_at(monkeypatch, recipe, 4)  # and is interrupted once more
    assert (folder / "adapter-2" / "adapter_model.safetensors").read_bytes() == first.adapter
    assert not (folder / "adapter").exists()
    second = run(recipe)
    assert "going on after step 3 of 4" in second.said and "longer" not in second.said
    whole = {**longer, "output__folder": tmp_path / "whole", "training__num_train_epochs": 2}
    expected = run(recipe_of(**whole))
    assert (second.adapter, second.losses) == (expected.adapter, expected.losses)
    assert events(recipe) == list(range(1, 5))
    assert second.adapter != first.adapter
    for same in (1, 2):  # that is finished now, and cannot become shorter
        with pytest.raises(RunFolderError, match="with more --epochs or --steps"):
            run(recipe_of(**{**longer, "training__num_train_epochs": same}))
    for each in checkpoints(recipe):
        shutil.rmtree(folder / each)
    with pytest.raises(RunFolderError, match="a checkpoint to train further from, found none"):
        run(recipe_of(**{**longer, "training__num_train_epochs": 3}))


def test_a_schedule_of_another_length_is_said(longer: dict[str, Any]) -> None:
    """And taken from the first step on: the shorter run has ended at a rate of 0."""
    options = {**longer, "training__lr_scheduler_type": "linear"}
    run(recipe_of(**options))
    with pytest.raises(RunFolderError, match=r"training\.learning_rate: 0.0002 then, 0.1 now"):
        recipe = {**options, "training__num_train_epochs": 2, "training__learning_rate": 0.1}
        run(recipe_of(**recipe))
    found = run(recipe_of(**{**options, "training__num_train_epochs": 2}))
    assert "the run is longer than it was begun" in found.said
    assert "going on after step 2 of 4" in found.said
    rates = read_run(Path(options["output__folder"])).values("learning_rate")
    assert [step for step, _ in rates] == [1, 2, 3, 4]
    assert [rate for _, rate in rates] == pytest.approx([2e-4, 1e-4, 1e-4, 5e-5])


TEMPLATE = NAMED["chatml"][0]


class Begun(NamedTuple):
    """A run of messages that ended at its third step, and what it was begun with."""

    recipe: Recipe
    model: Path
    folder: Path


@pytest.fixture(scope="module")
def begun(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun")
    (folder / "own.jinja").write_text(TEMPLATE)
    model = write_model(folder / "model", layers=2)
    options = options_for(model, data, folder / "run") | {
        "data__source": data / "messages.jsonl",
        "data__chat_template": folder / "own.jinja",
    }
    recipe = recipe_of(**options)
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, recipe, 3)
    return Begun(recipe, model, folder)


OTHER_WEIGHTS = tensors(lambda found: found["model.norm.weight"].add_(1))


def more(text: str) -> Any:
    return lambda file: file.write_text(file.read_text() + text)


def without_digests(file: Path) -> None:
    noted = json.loads(file.read_text())
    old = {"recipe": noted["recipe"], "digests": {}, "versions": noted["versions"]}
    file.write_text(json.dumps(old))


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("own.jinja", more("the slot"), "rows of data.source as tokens: another now"),
        ("model/config.json", more(" "), "configuration of model.source: another now"),
        ("model/model.safetensors", OTHER_WEIGHTS, "configuration of model.source: another now"),
        ("run/run.json", without_digests, "end it with the release that began it"),
    ],
)
def test_what_a_run_is_made_of(file: str, change: Any, named: str, begun: Begun) -> None:
    path = begun.folder / file
    before = path.read_bytes()
    kept = checkpoints(begun.recipe)
    change(path)
    try:
        with pytest.raises(RunFolderError, match="give another folder") as caught:
            run(begun.recipe)
        assert named in str(caught.value)
        assert checkpoints(begun.recipe) == kept
    finally:
        path.write_bytes(before)


def test_other_versions_are_said(begun: Begun) -> None:
    file = begun.folder / "run" / "run.json"
    noted = json.loads(file.read_text())
    noted["versions"] |= {"torch": "2.0.0", "device": "a card"}
    file.write_text(json.dumps(noted))
    found = run(begun.recipe)
    assert "torch 2.0.0 began this run" in found.said and "a card" in found.said
    assert "going on after step 2 of 4" in found.said


def test_rows_that_become_other_tokens(
    begun: Begun, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all files as they were: a template that asks for the time."""
    (tmp_path / "own.jinja").write_text("{{ strftime_now('%f') }}" + TEMPLATE)
    recipe = recipe_of(
        **options_for(begun.model, data, tmp_path / "run")
        | {
            "data__source": data / "messages.jsonl",
            "data__chat_template": tmp_path / "own.jinja",
            "data__loss_on": "all",
        }
    )
    break_at(monkeypatch, recipe, 2)
    with pytest.raises(RunFolderError, match=r"\nrows of data\.source as tokens: another now\n"):
        run(recipe)


KILLED = """
import json, os, signal, sys
import pytest
from tests.finetune.subjects import at_step, recipe_of, run
with pytest.MonkeyPatch.context() as patch:
    at_step(patch, int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(recipe_of(**json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed(step: int, options: dict[str, Any], expected: Trained) -> None:
    ran = run_forked(KILLED, json.dumps(options, default=str), str(step))
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    recipe = recipe_of(**options)
    assert events(recipe) == list(range(1, step + 1))
    assert checkpoints(recipe) == {f"checkpoint-{each}" for each in range(1, step)}
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)
    assert events(recipe) == list(range(1, NUM_STEPS + 1))
    assert ("going on after step 2 of 4" in found.said) == (step == 3)
