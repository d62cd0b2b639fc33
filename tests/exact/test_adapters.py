"""Adapters that are combined, and reference passes beside them, before and after prepare.

A scenario is a list of calls a user makes. It is run on a resident model, and again with
``poros.prepare`` before its first call and half way through; whatever the calls compute has the
same bits. That adapters are added, switched, deleted, loaded and cast: ``test_written_programs``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates.reference import Trajectory
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.exact.arms import Bases, Model, Residents, Subject, facts_of, streamed
from tests.snapshots import batches, bf16, bits_of, changes, digest, run

Call = Callable[[Model], object]

OTHER = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{**OTHER, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


# Calls.


def add(name: str, **options: Any) -> Call:
    def call(model: Model) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(name, config(**options))

    return call


def use(name: str) -> Call:
    return lambda model: model.set_adapter(name)


def train(model: Model, **spec: Any) -> Trajectory:
    """A step of the adapters that are active now."""
    before = {name: digest(each) for name, each in model.named_parameters()}
    trajectory = run(model, 1, **spec)
    trained = {name for name, each in model.named_parameters() if digest(each) != before[name]}
    assert trained == set(trajectory.steps[0].gradients), "the optimizer missed a parameter"
    assert trained
    return trajectory


def look(model: Model) -> object:
    """The outputs in evaluation mode."""
    with torch.no_grad():
        return {"outputs": digest(model.eval()(**batches()[1]).logits)}


def combine(model: Model) -> None:
    model.add_adapter("c", config(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
    model.add_weighted_adapter(["b", "c"], [0.7, 0.3], "sum", combination_type="cat")


def logits(model: Model) -> torch.Tensor:
    return model(**batches()[1]).logits  # type: ignore[no-any-return]


def of_the_base(model: Model) -> torch.Tensor:
    """The outputs of the base, as a preference loss needs them."""
    with torch.no_grad(), model.disable_adapter():
        return logits(model)


def of_the_base_under_grad(model: Model) -> torch.Tensor:
    with model.disable_adapter():
        base = logits(model)
    assert not base.requires_grad
    return base


def of_another(model: Model) -> torch.Tensor:
    """What TRL does for a model that comes with an adapter: a frozen copy of its start."""
    with torch.no_grad():
        model.set_adapter("ref")
        base = logits(model)
        model.set_adapter("default")
    return base


def preference(reference: Callable[[Model], torch.Tensor], *, is_first: bool = False) -> Call:
    """One step of a loss against a reference pass before or behind the policy's."""

    def step(model: Model) -> object:
        model.train()
        model.zero_grad()
        torch.manual_seed(5)
        base = reference(model) if is_first else None
        policy = logits(model)
        base = reference(model) if base is None else base
        loss = (policy.log_softmax(-1) - base.log_softmax(-1)).square().mean()
        loss.backward()
        return loss, base, torch.get_rng_state(), P.gradients_now(model)

    return step


def under_autocast(call: Call) -> Call:
    def region(model: Model) -> object:
        with bf16():
            return call(model)

    return region


# Scenarios.

SAVED = {"modules_to_save": ["lm_head", "input_layernorm"]}


def saving_modules(bases: Bases) -> Model:
    # A norm in bf16 is too coarse to change in two steps.
    base = bases.base(dtype=torch.float32)
    torch.manual_seed(4)
    return get_peft_model(base, config(**SAVED))


def scenarios() -> Iterator[tuple[str, list[Call], Subject]]:
    combined = [add("b"), use("b"), train, combine, use("sum"), look, train, look]
    yield "a weighted sum", combined, S.PLAIN
    calls = [train, add("b", **SAVED), use("b"), train, look, use("default"), look]
    yield "other saved modules", calls, saving_modules
    references = {
        "between": preference(of_the_base),
        "before": preference(of_the_base, is_first=True),
        "between, under grad": preference(of_the_base_under_grad),
    }
    for place, (name, step) in enumerate(references.items()):
        # Under autocast or not; "between" is what preference losses do.
        steps = [under_autocast(step) if place % 2 else step, train, step]
        yield f"the base as reference, {name}", steps, S.PLAIN
    step = preference(of_another)
    yield "another as reference", [add("ref"), step, train, step], S.PLAIN


def require_telling(expected: list[object]) -> None:
    """The scenario shows something only if what comes out of it changes."""
    looks = [str(each) for each in expected if isinstance(each, dict)]
    assert len(set(looks)) == len(looks)


SCENARIOS = {name: (calls, subject) for name, calls, subject in scenarios()}


@pytest.mark.parametrize("is_late", [False, True], ids=["before all calls", "half way"])
@pytest.mark.parametrize("which", SCENARIOS)
def test_a_scenario_is_exact(which: str, is_late: bool, bases: Bases) -> None:
    calls, subject = SCENARIOS[which]
    place = len(calls) // 2 if is_late else 0
    resident, model = subject(bases), subject(bases)
    expected = [call(resident) for call in calls]
    require_telling(expected)
    found = [call(model) for call in calls[:place]]
    streamed(model)
    found += [call(model) for call in calls[place:]]
    assert changes(facts_of(expected), facts_of(found)) == {}
    assert poros.runtime(model).stats()["num_loads"] > 0
    assert changes(bits_of(resident), bits_of(model)) == {}


# Controls.


def test_control_disabling_adapters_changes_what_comes_out(bases: Bases) -> None:
    model = streamed(S.PLAIN(bases))
    assert not torch.equal(of_the_base(model), logits(model.eval()))


def test_control_an_adapter_that_is_not_switched_shows(residents: Residents) -> None:
    resident, model = S.PLAIN(residents.bases), streamed(S.PLAIN(residents.bases))
    for each in (resident, model):
        add("b")(each)
    use("b")(resident)
    assert look(resident) != look(model)
