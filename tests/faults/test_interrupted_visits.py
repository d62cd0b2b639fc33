"""Ctrl-C at every step of a visit's begin and end.

Whatever it strikes: the model is as at rest when the next step has begun, and that step is exact.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import poros
from poros.errors import SlotStateError
from poros.gates.reference import Trajectory
from poros.self_check.evidence import CallSnapshot, random_states
from poros.self_check.switches import current_settings
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.stream.attention import deterministic_flag, unchanged_flags
from poros.stream.boundary import StreamedLayer, streamed_layer
from poros.stream.visit import Visits, proxy_leaves
from tests.interrupts import Interrupts
from tests.snapshots import NUM_LAYERS, assert_same_run, batches, build, layers_of, run
from tests.support import AdversarialPrepare, prepare_plain

Model = Any
AROUND = (
    "stream/visit.py",
    "stream/body.py",
    "slots/manager.py",
    "contextlib.py",
)
STEP = (
    *("visit", "body", "streamed", "general", "manager", "layer_index"),
    *("stream/state", "proof", "settings", "rng", "check", "contextlib"),
)


def visit_once(runtime: StreamedLayer, phase: Phase) -> None:
    leaves, _ = proxy_leaves(runtime.contents().adapters().places)
    with runtime.visit(phase, leaves):
        pass


def state_of(model: Model) -> dict[str, Any]:
    """What an interrupted visit could leave behind: tables' entries, slots, states of torch."""
    found: dict[str, Any] = {
        "subclasses see calls": torch._C._is_torch_function_enabled(),
        "gradients are taken": torch.is_grad_enabled(),
    }
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, value in getattr(module, kind).items():
                found[f"{name}.{key}"] = id(value)
        if "quant_state" in module.__dict__:
            found[f"{name} quant_state"] = id(module.quant_state)
    for slot in poros.runtime(model).ring.slots:
        found[f"slot {slot.index} is in use"] = slot.state is SlotState.IN_USE
    return found


@pytest.fixture(scope="module")
def resident() -> Trajectory:
    return run(build())


@pytest.fixture(scope="module")
def prepared(resident: Trajectory) -> Model:
    model = prepare_plain(build(), self_check="off", slots=2)
    assert_same_run(resident, run(model))
    return model


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_visit_interrupted_anywhere_leaves_nothing_behind(
    phase: Phase, prepared: Model, resident: Trajectory
) -> None:
    runtimes = [streamed_layer(layer) for layer in layers_of(prepared)]
    before = state_of(prepared)
    num_interrupted = 0
    for number in count(1):
        interrupts = Interrupts(number, AROUND, fine=True)
        runtime = runtimes[number % NUM_LAYERS]
        if interrupts.run(lambda runtime=runtime: visit_once(runtime, phase)):
            num_interrupted += 1
        elif interrupts.num_steps < number:
            break
        assert state_of(prepared) == before, number
    assert num_interrupted > 400
    assert_same_run(resident, run(fresh_adapters(prepared)))


def fresh_adapters(model: Model) -> Model:
    """The adapters that a model was built with, so that it can be compared with a new one."""
    twin = dict(build().named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(twin[name])
    return model


# Primes apart, so that every place of the four visits comes up in one of them.
@pytest.mark.parametrize(
    ("self_check", "apart"),
    [("off", 257), ("strict", 1259), pytest.param("strict", 257, marks=pytest.mark.slow)],
)
def test_a_step_interrupted_anywhere_is_followed_by_exact_ones(self_check: str, apart: int) -> None:
    expected = run(build(num_layers=2), num_steps=1)
    batch = batches()[0]

    def once(model: Model) -> None:
        model.train()
        model(**batch).loss.backward()

    files = tuple(f"{name}.py" for name in STEP)
    model = prepare_plain(build(num_layers=2), self_check=self_check)
    counter = Interrupts(None, files)
    counter.run(lambda: once(model))
    total = counter.num_steps
    assert total > 1000
    for number in range(1, total, apart):
        model = prepare_plain(build(num_layers=2), self_check=self_check)
        Interrupts(number, files).run(lambda model=model: once(model))
        model.zero_grad()
        assert_same_run(expected, run(model, num_steps=1))
        poros.restore(model)


def test_control_a_clean_up_that_is_not_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = prepare_plain(build(), self_check="off", slots=2)
    visit_once(streamed_layer(layers_of(prepared)[0]), Phase.FORWARD)

    def end(self: Visits, note: Any) -> None:
        if note in self._open:
            self._open.remove(note)
            note.undo()

    monkeypatch.setattr(Visits, "end", end)
    before = state_of(prepared)
    runtime = streamed_layer(layers_of(prepared)[0])
    for number in range(1, 4000):
        interrupts = Interrupts(number, AROUND, fine=True)
        interrupts.run(lambda: visit_once(runtime, Phase.FORWARD))
        if state_of(prepared) != before:
            return
    raise AssertionError("no interruption left anything behind")


CONTEXTS: dict[str, Callable[[], Any]] = {
    "state of a forward": lambda: CallSnapshot.state(SURROUNDINGS, CPU),
    "state of a backward": lambda: CallSnapshot.backward_state(SURROUNDINGS, CPU),
    "flags": unchanged_flags,
    "deterministic flag": deterministic_flag,
}
CPU = torch.device("cpu")
SURROUNDINGS: Any = SimpleNamespace(
    rng=random_states(CPU),
    other_rng=(random.getstate(), np.random.get_state()),
    rng_backward=random_states(CPU),
    autocast=[],
    has_cast_cache=True,
    settings=current_settings(),
    layer=torch.nn.Linear(1, 1),
    training=[True],
)


@contextmanager
def by_a_generator() -> Iterator[None]:
    """Puts the flag back whenever it is collected."""
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(True)
        yield
    finally:
        torch.set_grad_enabled(before)


def puts_back_late(make: Callable[[], Any]) -> bool:
    """Whether one that is interrupted somewhere puts an old state back after others set theirs."""
    expected = torch.get_rng_state()

    def use() -> None:
        torch.set_grad_enabled(False)  # as the engine does around a backward
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with make():
                pass
        finally:
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.set_rng_state(expected)

    found = False
    for number in count(1):
        torch.manual_seed(number)
        was_interrupted = Interrupts(number, ("contextlib.py",)).run(use)
        gc.collect()
        found |= not torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled()
        found |= not torch.equal(torch.get_rng_state(), expected)
        if not was_interrupted:
            return found
    raise AssertionError


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_was_interrupted_does_not_put_an_old_state_back_later(name: str) -> None:
    try:
        assert not puts_back_late(CONTEXTS[name])
        assert puts_back_late(by_a_generator), "control"
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("then", ["train", "restore"])
def test_a_visit_that_was_never_left_is_undone_by_what_comes_next(
    then: str, resident: Trajectory
) -> None:
    """Interrupted between two steps of leaving it, and its frame lives on in a traceback."""
    model = prepare_plain(build(), self_check="off", slots=2)
    before = state_of(model)
    layer = streamed_layer(layers_of(model)[0])
    leaves, _ = proxy_leaves(layer.contents().adapters().places)
    left = layer.visit(Phase.FORWARD, leaves)
    left.__enter__()
    inside = state_of(model)
    assert inside != before
    if then == "train":
        model(**batches()[0])
        assert state_of(model) == before
    else:
        poros.restore(model)
        assert all(
            id(value) == before[name]
            for name, value in (*model.named_parameters(), *model.named_buffers())
            if name in before
        )
    assert_same_run(resident, run(model))


def test_a_visit_within_a_visit_is_refused() -> None:
    model = AdversarialPrepare()(build(), slots=NUM_LAYERS)
    runtimes = [streamed_layer(layer) for layer in layers_of(model)]
    before = state_of(model)
    with (
        pytest.raises(SlotStateError, match=r"layers\.0: expected one layer to run at a time"),
        runtimes[0].visit(Phase.FORWARD, ()),
    ):
        visit_once(runtimes[1], Phase.FORWARD)
    assert state_of(model) == before
    assert_same_run(run(build()), run(model))
