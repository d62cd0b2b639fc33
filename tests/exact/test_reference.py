"""The reference run repeats itself, records what it says, and shows every change."""

from typing import Any

import pytest
import torch

from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, compare_steps, train
from tests.comparing import QUANTITIES, compare_mappings, compare_trajectories
from tests.support import make_model


def build(**changes: Any) -> Any:
    options = {"num_layers": 2, "dropout": 0.05, **changes}
    return make_model(**options)


def run(model: Any = None, **changes: Any) -> Trajectory:
    spec = TrainingSpec(**{"num_steps": 3, "accumulation": 2, **changes})
    return train(model or build(), tiny.make_batches(6), spec)


@pytest.fixture(scope="module")
def expected() -> Trajectory:
    return run()


def test_it_repeats_itself_and_records_every_quantity(expected: Trajectory) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = run()
    assert torch.equal(before, torch.get_rng_state()), "the caller's is left alone"
    comparisons = list(compare_steps(expected, again))
    assert all(each.difference is None for each in comparisons)
    num = {q: sum(c.quantity == q for c in comparisons) for q in QUANTITIES}
    num_parameters = 2 * 7 * 2  # layers, projections, A and B
    per_parameter = ("gradients", "adapter weights", "exp_avg", "exp_avg_sq")
    assert num == {
        "loss": 3 * 2,
        "grad norm": 3,
        "RNG end state": 1,
        **dict.fromkeys(per_parameter, 3 * num_parameters),
    }
    assert len({entry.name for entry in expected.entries()}) == len(comparisons)
    for step in expected.steps:
        assert all(bool(gradient.any()) for gradient in step.gradients.values())
        # Gradients are recorded before they are clipped.
        squares = sum(float(g.double().square().sum()) for g in step.gradients.values())
        assert step.grad_norm is not None and float(step.grad_norm) > 1.0, "nothing is clipped"
        assert squares**0.5 == pytest.approx(float(step.grad_norm), rel=1e-5)


CONTROLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, set[str]]] = {
    "seed": ({}, {"seed": 1}, "step 0, loss of micro-batch 0", set(QUANTITIES)),
    # The changed weights have to reach the next loss; no random number is another.
    "learning rate": (
        *({}, {"lr": 1.0001e-3}, "step 0, weight base_model.model.model.layers.0."),
        set(QUANTITIES) - {"RNG end state"},
    ),
    "no dropout": ({"dropout": 0.0}, {}, "step 0, ", {"RNG end state"}),
    "autocast": ({}, {"autocast_dtype": torch.bfloat16}, "step 0, ", {"loss"}),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_control_another_run(which: str, expected: Trajectory) -> None:
    of_model, of_run, first, wanted = CONTROLS[which]
    found = run(build(**of_model), **of_run)
    assert compare_trajectories(expected, found)[0].name.startswith(first)
    quantities = {c.quantity for c in compare_steps(expected, found) if c.difference is not None}
    assert wanted <= quantities and (which != "learning rate" or wanted == quantities)


def test_control_one_more_step_is_reported_as_extra(expected: Trajectory) -> None:
    differences = compare_trajectories(expected, run(num_steps=4))
    extra = [d for d in differences if d.kind == "extra"]
    assert extra and all(d.name.startswith("step 3, ") for d in extra)
    assert {d.name for d in differences} - {d.name for d in extra} == {"end, RNG state of cpu"}
    missing = compare_trajectories(run(num_steps=4), expected)
    assert {d.kind for d in missing} == {"missing", "value"}


# The small models.


@pytest.mark.parametrize("name", ("qwen2", "phi3", "gemma3"))
def test_small_models_are_repeatable_and_no_two_layers_alike(name: str) -> None:
    """All projections are adapted: ``check_not_vacuous`` of ``trainers``."""
    models = [tiny.make_model(name, num_layers=2, seed=seed) for seed in (0, 0, 1)]
    states = [model.state_dict() for model in models]
    assert compare_mappings(*states[:2]) == [] and len(compare_mappings(*states[1:])) > 30
    norms = [each.input_layernorm.weight for each in models[0].get_base_model().model.layers]
    assert not torch.equal(*norms), "layers that look alike would hide a mix-up"
