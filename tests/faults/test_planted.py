"""Every fault of ``planted`` is noticed by all that must; without one, all of them pass.

The parity gate runs with the self-check off, so a fault has to change what is trained: catching one
that does not would show nothing. The self-check has to name it before the optimizer's first step.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import poros
from poros.errors import ParityError
from poros.gates.arms import run_parity
from poros.gates.reference import TrainingSpec, train
from poros.gates.report import ParityReport
from poros.slots.schedule import Phase
from poros.stream import attention
from tests.comparing import bits_of, changes
from tests.faults.planted import (
    AUTOCAST,
    FAULTS,
    NUM_LAYERS,
    QWEN2,
    SHARED_STATES,
    Cell,
    Fault,
    Patch,
    detach_what_is_beside,
    lose_autocast,
    unguarded,
)
from tests.journal import training_visits, walk
from tests.loops import batches, behind
from tests.support import AdversarialPrepare, poison_what_is_released, same_bits
from tests.unsteady import Noise, always, make_unsteady

CELLS = dict.fromkeys(fault.cell for fault in FAULTS.values())


def having(catcher: str) -> Any:
    """The faults that this one has to catch."""
    names = [name for name, fault in FAULTS.items() if getattr(fault, catcher) is not None]
    return pytest.mark.parametrize("name", names)


@pytest.fixture
def fault(name: str, monkeypatch: Patch) -> Fault:
    """The one of this name; what it changes of the code is changed."""
    found = FAULTS[name]
    if found.plant is not None:
        found.plant(monkeypatch)
    return found


def built(fault: Fault) -> Any:
    model = fault.cell.build()
    if fault.user is not None:
        fault.user(model)
    return model


def spoiled(fault: Fault, model: Any, prepare: AdversarialPrepare, **policy: Any) -> Any:
    prepare(model, **policy)
    if fault.spoil is not None:
        fault.spoil(model)
    return model


def spec(fault: Fault) -> TrainingSpec:
    return TrainingSpec(num_steps=fault.num_steps, autocast_dtype=fault.cell.autocast)


def gate(
    fault: Fault, prepare: AdversarialPrepare | None = None, *, watched: bool = False
) -> ParityReport:
    """What the parity gate finds, with the self-check off."""
    arm = prepare or AdversarialPrepare()

    with arm.watching() if watched else nullcontext():
        return run_parity(
            lambda: built(fault),
            batches(),
            spec(fault),
            lambda model: spoiled(fault, model, arm),
            repeat_resident=False,
        )


def require_said(pattern: str, report: ParityReport) -> None:
    """The gate has failed, and says this first: of a difference, or of an error."""
    assert not report.exact, "nothing is noticed"
    text = str(report.differences[0]) if report.differences else str(report.error)
    assert re.search(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_control_without_a_fault_gate_and_self_check_pass(cell: Cell, monkeypatch: Patch) -> None:
    unguarded()(monkeypatch)
    prepare, whole = AdversarialPrepare(), Fault(cell=cell, num_steps=2)
    report = gate(whole, prepare, watched=cell in (QWEN2, AUTOCAST))
    assert report.exact, report.verdict()
    # In a backward a block is held to be recomputed with, and to be read.
    visits = [
        visit
        for visit in training_visits(NUM_LAYERS, 2)
        for _ in range(2 if visit[1] is Phase.BACKWARD else 1)
    ]
    assert prepare.journal == list(walk(visits, NUM_LAYERS, 2))
    assert prepare.streams.num_copies == 6 + 4
    once = replace(whole, num_steps=1)
    model = spoiled(once, built(once), AdversarialPrepare(), self_check="strict")
    train(model, batches(), spec(once))
    assert poros.runtime(model).self_check["status"] == "passed"


def test_control_where_there_is_no_autocast_none_is_missed(monkeypatch: Patch) -> None:
    lose_autocast(monkeypatch)
    assert gate(Fault(cell=Cell(dtype=AUTOCAST.dtype))).exact


def test_control_where_released_slots_are_poisoned_nothing_differs() -> None:
    assert gate(Fault(spoil=poison_what_is_released)).num_differences == 0


@having("gate")
def test_it_changes_what_is_trained_and_the_gate_says_so(fault: Fault) -> None:
    report = gate(fault)
    require_said(fault.gate or "", report)
    differing = {name for name, tally in report.tallies.items() if tally.num_differing_tensors}
    assert fault.differing <= differing


@having("self_check")
def test_the_self_check_names_it_before_the_first_step(fault: Fault, monkeypatch: Patch) -> None:
    steps: list[None] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(None))
    model = spoiled(fault, built(fault), AdversarialPrepare(), self_check="strict")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    start = [parameter.detach().clone() for parameter in trained]
    with pytest.raises(fault.error, match=fault.self_check):
        train(model, batches(), spec(fault))
    assert not steps and start
    assert all(map(same_bits, start, trained))


def test_a_caught_fault_leaves_a_model_that_comes_back_whole(monkeypatch: Patch) -> None:
    model = AdversarialPrepare()(SHARED_STATES.build(), self_check="strict")
    with monkeypatch.context() as patch:
        detach_what_is_beside(patch)
        with pytest.raises(ParityError):
            model.train()(**batches()[1]).loss.backward()
    model.zero_grad()
    assert changes(bits_of(SHARED_STATES.build()), bits_of(poros.restore(model))) == {}
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())


# Attention whose backward does not repeat itself: proved all the same, and faults still found. On a
# CPU it does repeat itself. So it is replaced by one that does not, unless PyTorch's deterministic
# flag is on and not "warn only", as on a GPU.


def only_at_first(number: int) -> bool:
    """One streamed backward and no other: all resident runs happen to agree."""
    return number == 0


@pytest.fixture
def flags_stay() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def checked_run(fault: Fault | None = None, **policy: Any) -> dict[str, Any]:
    """Train under the self-check; what it said."""
    fault = fault or Fault()
    model = spoiled(fault, built(fault), AdversarialPrepare(), self_check="strict", **policy)
    try:
        train(model, batches(), spec(fault))
    except ParityError:
        assert poros.runtime(model).self_check["status"] == "failed"
        raise
    return poros.runtime(model).self_check


def never_the_same(is_steady: Callable[[], bool]) -> Callable[[Any], None]:
    """The output of layer 1 is another one at each call, unless ``is_steady``."""
    calls: list[None] = []

    def change(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return output if is_steady() else output + 2.0 ** -(5 + len(calls) % 3)

    return behind(change, "layers.1.mlp")


class Unsteady(NamedTuple):
    """What does not repeat itself, and the layers that are not provable then."""

    noise: Noise | None = always
    policy: dict[str, Any] | None = None
    obeys: bool = True
    """Whether attention repeats itself while the deterministic flag is on."""
    user: Callable[[Any], None] | None = None
    layers: str = ""


# Outputs as of sums by atomic additions: nothing can be proved, and nothing is accused.
OUTPUTS = never_the_same(torch.are_deterministic_algorithms_enabled)
UNSTEADY = {
    "control": Unsteady(None),
    "always": Unsteady(),
    "at first": Unsteady(only_at_first),
    "inputs on the host": Unsteady(policy={"offload_boundaries": True}),
    "blocks of two, at first": Unsteady(only_at_first, {"block_size": 2}),
    "whatever the flag": Unsteady(obeys=False, layers="0123"),
    "outputs without the flag": Unsteady(user=OUTPUTS, layers="1"),
}


@pytest.mark.usefixtures("flags_stay")
@pytest.mark.parametrize("case", UNSTEADY)
def test_what_repeats_itself_with_deterministic_attention_is_proved_and_the_rest_named(
    case: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    noise, policy, obeys, user, layers = UNSTEADY[case]
    if noise is not None:
        make_unsteady(monkeypatch, noise, obeys)
    with caplog.at_level(logging.WARNING, logger="poros"):
        found = checked_run(Fault(user=user), **(policy or {}))
    assert (found["status"], found["message"]) == ("unproven" if layers else "passed", None)
    assert "".join(name[-1] for name in found["not_provable"]) == layers
    assert caplog.text.count("cannot prove") == len(layers)
    if not layers:
        assert bool(found["proved_with_deterministic_attention"]) == (noise is not None)
        said = caplog.text.count("With deterministic attention on both sides")
        assert said == (noise is not None)


@pytest.mark.usefixtures("flags_stay")
@having("unsteady")
def test_a_fault_is_found_behind_unsteady_attention(fault: Fault, monkeypatch: Patch) -> None:
    make_unsteady(monkeypatch)
    with pytest.raises(ParityError, match=fault.unsteady):
        checked_run(fault)


@pytest.mark.usefixtures("flags_stay")
@pytest.mark.parametrize("is_unsteady", [True, False])
def test_outputs_that_never_repeat_themselves_are_an_error(
    is_unsteady: bool, monkeypatch: Patch
) -> None:
    """They depend on something that a recomputation does not see; streaming is not blamed."""
    if is_unsteady:
        make_unsteady(monkeypatch)
    with pytest.raises(ParityError, match=r"layers\.1: resident does not equal itself"):
        checked_run(Fault(user=never_the_same(lambda: False)))


@pytest.mark.usefixtures("flags_stay")
def test_the_flag_is_put_back_if_the_backward_of_attention_fails() -> None:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="on purpose"), attention.unchanged_flags():
        with attention.AttentionKernels(True):
            output = torch.nn.functional.scaled_dot_product_attention(query, query, query)

        def fail(_: Any) -> None:
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("on purpose")

        output.grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        output.sum().backward()
