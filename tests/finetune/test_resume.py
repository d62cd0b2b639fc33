"""A run that was interrupted goes on, and ends with the bits of one that was not."""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import PorosError, RunFolderError
from poros.finetune import run as running
from poros.finetune.panel import Panel
from poros.finetune.resuming import look_at
from poros.finetune.run import Interrupted
from poros.recipes.recipe import Recipe
from tests.finetune.subjects import Trained, recipe_of, rows, run, write_rows
from tests.loading.checkpoints import run_python

NUM_STEPS, SAVE_EVERY = 7, 2


def options_for(model: Path, data: Path, out: Path) -> dict[str, Any]:
    return {
        "model__source": model,
        "data__source": data / "completions.jsonl",
        "data__max_length": 64,
        "data__pad_to": 16,
        "adapter__rank": 4,
        "adapter__dropout": 0.1,
        "training__steps": NUM_STEPS,
        "training__accumulation": 3,
        "training__optimizer": "schedule_free_adamw",
        "memory__slots": 2,
        "output__save_every": SAVE_EVERY,
        "output__folder": out,
    }


@pytest.fixture
def options(model: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    return options_for(model, data, tmp_path / "run")


@pytest.fixture(scope="module")
def expected(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run that nobody interrupted."""
    torch.set_num_threads(1)
    return run(recipe_of(**options_for(model, data, tmp_path_factory.mktemp("whole") / "run")))


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Do something once a step has been logged."""
    genuine = Panel.on_log

    def on_log(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        genuine(self, args, state, control, **kwargs)
        if state.global_step == step:
            act()

    monkeypatch.setattr(Panel, "on_log", on_log)


class Broken(RuntimeError):
    pass


def break_at(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, step: int) -> None:
    """Leave a run that ended at a step, as if its process had gone."""

    def act() -> None:
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        at_step(patch, step, act)
        run(recipe)


def checkpoints(recipe: Recipe) -> set[str]:
    return {each.name for each in Path(recipe.output.folder or "").glob("checkpoint-*")}


def events(recipe: Recipe) -> list[int]:
    lines = (Path(recipe.output.folder or "") / "events.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return [event["step"] for event in logged if event["event"] == "log"]


def test_going_on_gives_the_same_bits(
    options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    break_at(monkeypatch, recipe, 5)
    assert checkpoints(recipe) == {"checkpoint-2", "checkpoint-4"}
    assert events(recipe) == [1, 2, 3, 4, 5]
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)
    assert "going on after step 4 of 7" in found.said
    assert events(recipe) == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("damage", ["cut", "unmarked", "changed"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    damage: str, options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    break_at(monkeypatch, recipe, 5)
    newest = Path(options["output__folder"]) / "checkpoint-4"
    state = newest / "optimizer.pt"
    if damage == "cut":
        os.truncate(state, state.stat().st_size // 2)
    elif damage == "unmarked":
        (newest / "whole.json").unlink()
    else:
        content = bytearray(state.read_bytes())
        content[-200] ^= 1
        state.write_bytes(content)
    found = run(recipe)
    assert "going on after step 2 of 7" in found.said
    assert found.adapter == expected.adapter


def test_a_signal_ends_a_run_with_a_checkpoint(
    options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted, match="stopped after step 4 of 7") as caught:
            run(recipe)
    assert caught.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (Path(options["output__folder"]) / "adapter").exists()
    found = run(recipe)
    assert "going on after step 4 of 7" in found.said
    assert found.adapter == expected.adapter


def test_a_run_that_ended_before_its_adapter_was_there(
    options: dict[str, Any], expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    genuine = running._save

    def save(*arguments: Any) -> None:
        genuine(*arguments)
        adapter = Path(options["output__folder"]) / "adapter"
        adapter.rename(adapter.with_name("adapter.part"))
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(running, "_save", save)
        run(recipe)
    found = run(recipe)
    assert (found.adapter, found.losses) == (expected.adapter, expected.losses)
    assert not list(Path(options["output__folder"]).glob("*.part"))


def test_what_may_change_between_and_what_may_not(
    options: dict[str, Any], expected: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_rows(tmp_path / "own.jsonl", rows("completions"))
    options["data__source"] = own
    recipe = recipe_of(**options)
    break_at(monkeypatch, recipe, 3)
    folder = Path(options["output__folder"])
    for change, what in (
        ({"training__learning_rate": 1e-3}, "training.learning_rate: 0.0002 then, 0.001 now"),
        ({"adapter__rank": 8, "training__seed": 1}, "adapter.rank: 4 then, 8 now"),
    ):
        with pytest.raises(RunFolderError, match="give another folder") as caught:
            run(recipe_of(**{**options, **change}))
        assert what in str(caught.value)
    write_rows(own, rows("completions", 199))
    with pytest.raises(RunFolderError, match="files have changed"):
        run(recipe)
    write_rows(own, rows("completions"))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="another process"):
            run(recipe)
    found = run(recipe_of(**{**options, "memory__slots": 3}))  # decides no bit
    assert "going on after step 2 of 7" in found.said
    assert found.adapter == expected.adapter
    with pytest.raises(RunFolderError, match="finished one: its adapter is"):
        look_at(recipe, {})


def test_a_damaged_note_of_what_was_started(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(**options)
    break_at(monkeypatch, recipe, 3)
    (Path(options["output__folder"]) / "run.json").write_text("{")
    with pytest.raises(PorosError, match="cannot be read"):
        run(recipe)


KILLED = """
from tests.finetune.kills import main
import sys
sys.argv = ["kills", "--rounds", "{rounds}", "--seed", "5", "--kind", "{kind}"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("packed", 1),
        *(pytest.param(each, 10, marks=pytest.mark.slow) for each in ("padded", "dpo")),
    ],
)
def test_runs_that_are_killed(kind: str, rounds: int) -> None:
    ran = run_python(KILLED.format(rounds=rounds, kind=kind))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"{rounds} of {rounds}"
