"""One number decides slots and kept layers, at the first step, and changes no bit."""

from typing import Any

import pytest
import torch
from snapshots import layers_of
from support import AdversarialPrepare

import poros
from poros.api import prepare_with
from poros.errors import PolicyError, VRAMBudgetError
from poros.gates import tiny
from poros.gates.reference import (
    TrainingSpec,
    Trajectory,
    compare_trajectories,
    hash_digests,
    start_digests,
    train,
)
from poros.streams import EagerStreams

NUM_LAYERS = 6
SPEC = TrainingSpec(num_steps=3, accumulation=2)
BATCHES = tiny.make_batches(6, num_tokens=16, padded=False)
SHAPE = {"batch_size": 2, "seq_len": 16, "accumulation": 2}


def build(**options: Any) -> Any:
    wanted = {"num_layers": NUM_LAYERS, "hidden_size": 64, "dropout": 0.05, **options}
    return tiny.make_model("qwen2", **wanted)


def floor() -> int:
    return poros.plan(build(), **SHAPE).total_num_bytes


def full() -> int:
    return poros.plan(build(), **SHAPE, num_slots=NUM_LAYERS, keep_last=NUM_LAYERS).total_num_bytes


@pytest.fixture(scope="module")
def resident() -> Trajectory:
    return train(build(), BATCHES, SPEC)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_budgets_change_no_bit(share: float, resident: Trajectory) -> None:
    budget = int(floor() + share * (full() - floor()))
    model = poros.prepare(build(), device="cpu", vram_budget=budget)
    assert poros.runtime(model).plan is None
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    runtime = poros.runtime(model)
    assert runtime.plan is not None and runtime.plan.total_num_bytes <= budget
    assert runtime.self_check["status"] == "passed"
    in_ring = runtime.num_blocks - runtime.num_streamed_blocks + runtime.num_slots
    assert (in_ring, runtime.plan.keep_last) == (runtime.plan.num_slots, runtime.plan.keep_last)
    if share == 0.0:
        assert (runtime.plan.num_slots, runtime.plan.keep_last) == (2, 0)
    if share == 1.0:
        assert (runtime.num_streamed_blocks, runtime.plan.keep_last) == (0, NUM_LAYERS)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_budgets_change_no_bit_under_adversarial_streams(
    share: float, resident: Trajectory
) -> None:
    budget = int(floor() + share * (full() - floor()))
    with AdversarialPrepare().watching() as prepare:
        model = prepare(build(), vram_budget=budget)
        assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []


def test_a_warm_step_loads_what_was_planned() -> None:
    budget = poros.plan(build(), **SHAPE, num_slots=4).total_num_bytes
    model = poros.prepare(build(), device="cpu", vram_budget=budget).train()
    runtime = poros.runtime(model)
    for _ in range(2):
        before = runtime.stats()["h2d_num_bytes"]
        model(**BATCHES[0]).loss.backward()
    assert runtime.plan is not None and runtime.plan.bytes_per_step > 0
    assert runtime.stats()["h2d_num_bytes"] - before == runtime.plan.bytes_per_step


def test_a_budget_below_the_floor_is_refused_before_anything_is_trained() -> None:
    model = poros.prepare(build(), device="cpu", vram_budget=floor() - 1).train()
    before = hash_digests(start_digests(model))
    random_state = torch.get_rng_state()
    with pytest.raises(VRAMBudgetError, match=r"the floor for 2 slots(.|\n)*workspace"):
        model(**BATCHES[0])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert hash_digests(start_digests(model)) == before
    with torch.no_grad():
        model(**BATCHES[0])
    poros.restore(model)
    model(**BATCHES[0]).loss.backward()


def test_a_batch_that_grows_is_planned_again() -> None:
    budget = poros.plan(build(), **{**SHAPE, "seq_len": 64}, num_slots=4).total_num_bytes
    model = poros.prepare(build(), device="cpu", vram_budget=budget).train()
    long, short = (tiny.make_batches(1, num_tokens=n, padded=False)[0] for n in (64, 16))
    model(**short).loss.backward()
    runtime = poros.runtime(model)
    first = runtime.plan
    model(**long).loss.backward()
    second = runtime.plan
    assert first is not None and second is not None
    assert second.options["seq_len"] == 64 and second.total_num_bytes <= budget
    assert (second.num_slots, second.keep_last) == (4, 0) < (first.num_slots, first.keep_last)
    model(**short).loss.backward()
    assert runtime.plan is second
    huge = tiny.make_batches(1, batch_size=16, num_tokens=64, padded=False)[0]
    with pytest.raises(VRAMBudgetError, match="sequences of at most"):
        model(**huge)
    model(**short).loss.backward()


def test_room_is_made_between_a_forward_and_its_backward() -> None:
    batch = BATCHES[0]
    gradients = []
    for is_resized in (False, True):
        model = poros.prepare(build(), device="cpu", slots=2).train()
        torch.manual_seed(0)
        loss = model(**batch).loss
        if is_resized:
            poros.runtime(model)._takeover.resize(4, 2)
        loss.backward()
        gradients.append([p.grad for p in layers_of(model).parameters() if p.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("num_given", [0, 1, 4])
def test_room_that_cannot_be_had_leaves_the_old_one(num_given: int, resident: Trajectory) -> None:
    class Scarce(EagerStreams):
        left = 99

        def allocate(self, num_bytes: int) -> torch.Tensor:
            if not self.left:
                self.left = 99
                raise torch.OutOfMemoryError("no more")
            self.left -= 1
            return super().allocate(num_bytes)

    streams = Scarce(torch.device("cpu"))
    model = prepare_with(build(), poros.StreamingPolicy(slots=3), streams=streams)
    takeover = poros.runtime(model)._takeover
    streams.left = num_given
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        takeover.resize(5, 2)
    assert (takeover.num_slots, takeover.keep_last, len(takeover.ring.slots)) == (3, 0, 3)
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    takeover.resize(5, 2)
    assert (takeover.keep_last, len(takeover.ring.slots)) == (2, 3)


@pytest.mark.parametrize("value", ["8 apples", -1, 0, float("nan"), True, "GiB"])
def test_bad_budgets_are_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match="vram_budget"):
        poros.prepare(build(num_layers=2), device="cpu", vram_budget=value)
