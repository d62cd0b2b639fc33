"""Micro-batches go together until a step shows that most layers can keep their graph."""

from typing import Any

import pytest

import poros
from poros.gates import tiny
from poros.model.sizing import ResidencyPlan
from tests.unit.simulated import Loop, Prepare, SimulatedMemory, budget, simulated


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    return simulated(monkeypatch)


def accumulated(
    model: Any, memory: SimulatedMemory, length: int, steps: int, number: int = 2
) -> list[bool]:
    """Optimizer steps of so many micro-batches each; whether these went together."""
    runtime = poros.runtime(model)
    loop, found = Loop(model, memory), []
    for _ in range(steps):
        before = 0 if runtime.accumulation is None else runtime.accumulation.num_groups
        batch = tiny.make_batches(1, batch_size=1, num_tokens=length, padded=False)[0]
        memory.num_tokens = length
        poros.accumulate(model, [dict(batch) for _ in range(number)])
        groups = 0 if runtime.accumulation is None else runtime.accumulation.num_groups
        is_together = groups > before
        memory.train(length, together=number if is_together else 1)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        found.append(is_together)
    return found


def test_micro_batches_go_alone_once_most_layers_can_keep_their_graph(
    prepared: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    model, memory = prepared(vram_budget=f"{budget(6, 6, 32)}B", self_check="off")
    went = accumulated(model, memory, 16, 8)
    assert went[0] and not went[-1], "together until a step was measured"
    assert went == sorted(went, reverse=True), "it is decided once"
    assert poros.runtime(model).room == ResidencyPlan(6, 6)
    assert "one after the other" not in caplog.text, "that is no fault to be told of"
    assert poros.runtime(model).stats()["fallbacks"] == []


def test_the_step_in_which_that_is_decided_says_nothing_of_those_that_go_alone(
    prepared: Prepare,
) -> None:
    """It has begun together, with the graphs of all of them."""
    model, memory = prepared(vram_budget=f"{budget(6, 6, 36)}B", self_check="off")
    went = accumulated(model, memory, 12, 10, number=8)
    assert went[0] and not went[-1] and went == sorted(went, reverse=True)
    assert poros.runtime(model).room == ResidencyPlan(6, 6)
    assert max(memory.peaks) <= budget(6, 6, 36)


def test_control_micro_batches_stay_together_where_few_layers_can(prepared: Prepare) -> None:
    model, memory = prepared(vram_budget=f"{budget(6, 0, 48)}B", self_check="off")
    assert all(accumulated(model, memory, 16, 8))


def test_micro_batches_stay_together_where_the_room_is_given(prepared: Prepare) -> None:
    for fixed in ({"slots": 6}, {"keep_last": 6}):
        model, memory = prepared(vram_budget=f"{budget(6, 6, 32)}B", self_check="off", **fixed)
        assert all(accumulated(model, memory, 16, 8)), fixed


def test_a_larger_batch_that_takes_that_room_has_them_go_together_for_good(
    prepared: Prepare,
) -> None:
    model, memory = prepared(vram_budget=f"{budget(6, 6, 32)}B", self_check="off")
    assert not accumulated(model, memory, 16, 8)[-1]
    assert accumulated(model, memory, 56, 8)[-1]
    assert all(accumulated(model, memory, 16, 4)), "room that comes and goes changes nothing more"
