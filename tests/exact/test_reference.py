"""The reference run repeats itself, records what it says, and shows every change."""

from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit

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
def test_small_models_are_repeatable_and_fully_adapted(name: str) -> None:
    model = tiny.make_model(name, dropout=0.05)
    again = tiny.make_model(name, dropout=0.05)
    assert compare_mappings(model.state_dict(), again.state_dict()) == []
    other = tiny.make_model(name, dropout=0.05, seed=1)
    assert len(compare_mappings(model.state_dict(), other.state_dict())) > 100
    layers = model.get_base_model().model.layers
    assert len(layers) == 6 and model.config.model_type == tiny.ARCHITECTURES[name]
    num_linears = {"phi3": 4}.get(name, 7)
    for layer in layers:
        linears = [m for m in layer.modules() if isinstance(m, Linear4bit)]
        assert len(linears) == num_linears
        for linear in linears:
            assert linear.weight.dtype is torch.uint8 and linear.weight.quant_state.nested
            assert linear.support_avx512bf16_for_cpu is False
        trained = [p for p in layer.parameters() if p.requires_grad]
        assert len(trained) == 2 * num_linears and all(bool((p != 0).all()) for p in trained)
    norms = [layer.input_layernorm.weight for layer in layers]
    assert not torch.equal(norms[0], norms[1]), "layers that look alike would hide a mix-up"


def test_batches_are_seeded_and_padded() -> None:
    batches = tiny.make_batches(5)
    for left, right in zip(batches, tiny.make_batches(5), strict=True):
        assert compare_mappings(left, right) == []
    padding = [int((batch["attention_mask"] == 0).sum()) for batch in batches]
    assert padding == [0, 1, 2, 3, 4]
    assert all(int((b["labels"] == -100).sum()) == n for b, n in zip(batches, padding, strict=True))
