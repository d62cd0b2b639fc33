"""What the logs of a run say of each step."""

import gc
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from poros.finetune.trainers import Sft, logging_steps
from poros.reporting.events import read_run
from tests.covers import with_slow
from tests.finetune.arms import arm
from tests.finetune.subjects import at_step, recipe_of, rows, run, write_rows

Model = Any
UNFREEZE = gc.unfreeze


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_tokens_are_counted(
    form: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Python's collector passes over what was there before, until the run has ended."""
    frozen: list[int] = []
    at_step(monkeypatch, 1, lambda: frozen.append(gc.get_freeze_count()))
    recipe = recipe_of(
        model__source=model,
        data__source=write_rows(tmp_path / "rows.jsonl", rows("completions", 40)),
        training__max_length=128,
        training__pad_to_multiple_of=32,
        training__packing=form == "packed",
        training__per_device_train_batch_size=2,
        training__gradient_accumulation_steps=5,
        memory__slots=2,
        output__folder=tmp_path / "run",
    )
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    gc.unfreeze()  # as the tests do not have it, but processes of users
    trained = run(recipe)
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
    gc.freeze()
    found = [each["num_tokens"] for each in read_run(tmp_path / "run").logs]
    assert found == sorted(set(found))
    announced = re.search(r"([\d,]+) tokens", trained.said)
    assert announced is not None
    num_tokens = int(announced[1].replace(",", ""))
    if form == "padded":
        assert found[-1] == num_tokens
    else:
        # What fills up rows is a token like any other.
        assert num_tokens <= found[-1] < num_tokens + 32 * len(found) * 10
    assert num_tokens > 500


@pytest.mark.parametrize("added", with_slow((float("nan"), float("inf")), [float("inf")]))
def test_a_loss_that_is_no_number_is_logged_as_it_is_and_once(
    added: float, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are fine; so are the losses behind it."""

    def compute_loss(self: Any, model: Model, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["use_cache"] = False
        loss = Trainer.compute_loss(self, model, inputs, *args, **kwargs)
        return loss + added if self.state.global_step == 1 else loss

    short: Any = {"memory__slots": 2, "training__max_steps": 3}
    expected = arm(model, data, tmp_path / "expected", "sft, packed", **short)
    monkeypatch.setattr(Sft, "compute_loss", compute_loss)
    arm(model, data, tmp_path / "run", "sft, packed", **short)
    losses = [each["loss"] for each in read_run(tmp_path / "run").logs]
    assert not math.isfinite(losses[1])
    assert [*losses[:1], *losses[2:]] == [*expected.losses[:1], *expected.losses[2:]]


def test_logs_of_a_long_run_are_some_steps_apart() -> None:
    """20 of a run, if it has as many steps: each makes the host wait for the device."""
    assert [logging_steps(each) for each in (1, 39, 40, 100, 199, 5000)] == [1, 1, 2, 5, 9, 10]
