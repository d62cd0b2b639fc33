"""The gate under the HF Trainer: what it records, what it accepts, what it rejects."""

from pathlib import Path
from typing import Any

import pytest
import torch

from poros.gates import tiny
from poros.gates.reference import Trajectory
from tests.comparing import compare_mappings, compare_trajectories
from tests.exact.faulty import flip_nibble
from tests.support import make_model
from tests.trainer_parity import (
    ADAPTER_FILES,
    EVALUATION_LOSS,
    run_trainer_parity,
    train_with_trainer,
    trainer_arguments,
)


def build() -> Any:
    return make_model(num_layers=2, dropout=0.05)


def rows(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    batches = tiny.make_batches(num_rows, batch_size=1, seed=seed)
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


def run(output_dir: Path, resume_from: Path | None = None, **overrides: Any) -> Trajectory:
    arguments = trainer_arguments(output_dir, **{"max_steps": 4, **overrides})
    return train_with_trainer(build(), arguments, rows(12, seed=0), resume_from=resume_from)


def test_trainer_gate_compares_evaluation_and_saved_files_too() -> None:
    report = run_trainer_parity(
        build,
        rows(12, seed=0),
        lambda model: model,
        is_control=True,
        eval_dataset=rows(4, seed=1),
        max_steps=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    assert report.exact, report.verdict()
    num = {quantity: tally.num_tensors for quantity, tally in report.tallies.items()}
    num_parameters = 2 * 7 * 2  # layers, projections, A and B
    assert num.pop("start bytes") > num_parameters
    assert num.pop("RNG end state") >= 1  # one more for each GPU
    per_parameter = ("gradients", "adapter weights", "exp_avg", "exp_avg_sq")
    assert num == {
        "loss": 4 * 2,
        "grad norm": 4,
        EVALUATION_LOSS: 2,
        ADAPTER_FILES: 2,  # weights and configuration
        **dict.fromkeys(per_parameter, 4 * num_parameters),
    }


def test_trainer_gate_rejects_one_flipped_nibble() -> None:
    report = run_trainer_parity(build, rows(12, seed=0), flip_nibble, is_control=True, max_steps=2)
    assert not report.exact and report.resident_repeats is True
    assert report.tallies[ADAPTER_FILES].num_differing_tensors == 1
    assert report.differences[0].name.startswith("step 0, ")


def test_gradients_are_recorded_before_the_trainer_clips(tmp_path: Path) -> None:
    for step in run(tmp_path, max_steps=2).steps:
        squares = sum(float(g.double().square().sum()) for g in step.gradients.values())
        assert step.grad_norm is not None and float(step.grad_norm) > 1.0
        assert squares**0.5 == pytest.approx(float(step.grad_norm), rel=1e-5)


def test_gradients_are_recorded_when_the_trainer_does_not_clip(tmp_path: Path) -> None:
    (step,) = run(tmp_path, max_steps=1, max_grad_norm=0.0).steps
    (clipped,) = run(tmp_path, max_steps=1).steps
    assert compare_mappings(step.gradients, clipped.gradients) == []
    assert compare_mappings(step.exp_avg, clipped.exp_avg) != []


def test_a_resumed_run_equals_the_straight_one_from_there_on(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", save_strategy="steps", save_steps=2)
    resumed = run(tmp_path / "resumed", tmp_path / "straight" / "checkpoint-2")
    assert [step.index for step in resumed.steps] == [2, 3]
    differences = compare_trajectories(straight, resumed)
    assert differences and all(d.kind == "missing" for d in differences)
    assert {d.name.split(",")[0] for d in differences} == {"step 0", "step 1"}


def test_the_callers_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(tmp_path, max_steps=1)
    assert torch.equal(before, torch.get_rng_state())
