"""Adapters that are combined, and that save other modules, before and after prepare.

A scenario is a list of calls a user makes. It is run on a resident model, and again with
``poros.prepare`` before its first call and half way through; whatever the calls compute has the
same bits. That adapters are added, switched, deleted, loaded and cast: ``test_written_programs``;
passes of the base and of a frozen adapter as references: ``test_trl``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates.reference import Trajectory
from tests.comparing import bits_of, changes, digest
from tests.exact import subjects as S
from tests.loops import Model, Subject, batches, facts_of, run, small_base, streamed

Call = Callable[[Model], object]

OTHER = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}
SAVED = {"modules_to_save": ["lm_head", "input_layernorm"]}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{**OTHER, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


def add(name: str, **options: Any) -> Call:
    def call(model: Model) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(name, config(**options))

    return call


def use(name: str) -> Call:
    return lambda model: model.set_adapter(name)


def train(model: Model) -> Trajectory:
    """A step of the adapters that are active now."""
    before = {name: digest(each) for name, each in model.named_parameters()}
    trajectory = run(model, 1)
    trained = {name for name, each in model.named_parameters() if digest(each) != before[name]}
    assert trained and trained == set(trajectory.steps[0].gradients), "a parameter was missed"
    return trajectory


def look(model: Model) -> object:
    """The outputs in evaluation mode."""
    with torch.no_grad():
        return {"outputs": digest(model.eval()(**batches()[1]).logits)}


def combine(model: Model) -> None:
    model.add_adapter("c", config(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
    model.add_weighted_adapter(["b", "c"], [0.7, 0.3], "sum", combination_type="cat")


def saving_modules() -> Model:
    # A norm in bf16 is too coarse to change in two steps.
    base = small_base(dtype=torch.float32)
    torch.manual_seed(4)
    return get_peft_model(base, config(**SAVED))


SCENARIOS: dict[str, tuple[Subject, list[Call]]] = {
    "a weighted sum": (
        S.PLAIN,
        [add("b"), use("b"), train, combine, use("sum"), look, train, look],
    ),
    "other saved modules": (
        saving_modules,
        [train, add("b", **SAVED), use("b"), train, look, use("default"), look],
    ),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before all calls", "half way"])
@pytest.mark.parametrize("which", SCENARIOS)
def test_a_scenario_is_exact(which: str, is_late: bool) -> None:
    subject, calls = SCENARIOS[which]
    place = len(calls) // 2 if is_late else 0
    resident, model = subject(), subject()
    expected = [call(resident) for call in calls]
    looks = [str(each) for each in expected if isinstance(each, dict)]
    assert len(set(looks)) == len(looks), "it shows something only if what comes out changes"
    found = [call(model) for call in calls[:place]]
    streamed(model)
    found += [call(model) for call in calls[place:]]
    assert changes(facts_of(expected), facts_of(found)) == {}
    assert poros.runtime(model).stats()["num_loads"] > 0
    assert changes(bits_of(resident), bits_of(model)) == {}


def test_control_an_adapter_that_is_not_switched_shows() -> None:
    resident, model = S.PLAIN(), streamed(S.PLAIN())
    for each in (resident, model):
        add("b")(each)
    use("b")(resident)
    assert look(resident) != look(model)
