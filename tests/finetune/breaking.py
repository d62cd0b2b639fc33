"""Runs that end at a step of their own accord, as if their process had gone."""

from typing import Any

import pytest

from poros.finetune.progress import Progress
from poros.recipes.recipe import Recipe
from tests.finetune.subjects import run


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Do something once a step has been logged."""
    genuine = Progress.on_log

    def on_log(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        genuine(self, args, state, control, **kwargs)
        if state.global_step == step:
            act()

    monkeypatch.setattr(Progress, "on_log", on_log)


class Broken(RuntimeError):
    pass


def break_at(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, step: int) -> None:
    """Leave a run that ended at a step, as if its process had gone."""

    def act() -> None:
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        at_step(patch, step, act)
        run(recipe)
