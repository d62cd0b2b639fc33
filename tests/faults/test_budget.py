"""One number decides slots and kept layers, at the first step, and changes no bit."""

from functools import cache
from typing import Any

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import LoraConfig

import poros
from poros.api import prepare_with
from poros.errors import PreparedModelError, VRAMBudgetError
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, hash_digests, start_digests, train
from poros.model.sizing import ResidencyPlan
from poros.streams import EagerStreams
from tests.comparing import compare_trajectories
from tests.snapshots import layers_of
from tests.support import AdversarialPrepare, make_model, prepare_plain

NUM_LAYERS = 6
SPEC = TrainingSpec(num_steps=2, accumulation=2)
BATCHES = tiny.make_batches(4, num_tokens=16, padded=False)
SHAPE: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "accumulation": 2, "loss": "reference"}
SHAPE["cuda_graphs"] = False  # of a CPU


def build(**options: Any) -> Any:
    wanted = {"num_layers": NUM_LAYERS, "hidden_size": 64, "dropout": 0.05, **options}
    return make_model("qwen2", **wanted)


@cache
def floor() -> int:
    plans = (poros.plan(build(), **SHAPE, offload_boundaries=each) for each in (False, True))
    return min(each.total_num_bytes for each in plans)


@cache
def full() -> int:
    return poros.plan(build(), **SHAPE, num_slots=NUM_LAYERS, keep_last=NUM_LAYERS).total_num_bytes


@pytest.fixture(scope="module")
def resident() -> Trajectory:
    return train(build(), BATCHES, SPEC)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_budgets_change_no_bit(share: float, resident: Trajectory) -> None:
    budget = int(floor() + share * (full() - floor()))
    model = prepare_plain(build(), device="cpu", vram_budget=budget)
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


@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_budgets_change_no_bit_under_adversarial_streams(
    share: float, resident: Trajectory
) -> None:
    budget = int(floor() + share * (full() - floor()))
    with AdversarialPrepare().watching() as prepare:
        model = prepare(build(), vram_budget=budget)
        assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []


def test_a_warm_step_loads_what_was_planned() -> None:
    budget = poros.plan(build(), **SHAPE, num_slots=4).total_num_bytes
    model = prepare_plain(build(), device="cpu", vram_budget=budget).train()
    runtime = poros.runtime(model)
    for _ in range(2):
        before = runtime.stats()["h2d_num_bytes"]
        model(**BATCHES[0]).loss.backward()
    assert runtime.plan is not None and runtime.plan.bytes_per_step > 0
    assert runtime.stats()["h2d_num_bytes"] - before == runtime.plan.bytes_per_step


def test_a_budget_below_the_floor_is_refused_before_anything_is_trained() -> None:
    model = prepare_plain(build(), device="cpu", vram_budget=floor() - 1).train()
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
    model = prepare_plain(build(), device="cpu", vram_budget=budget).train()
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
    with pytest.raises(VRAMBudgetError, match="fit, each alone: batch_size="):
        model(**huge)
    model(**short).loss.backward()


def test_room_is_made_between_a_forward_and_its_backward() -> None:
    batch = BATCHES[0]
    gradients = []
    for is_resized in (False, True):
        model = prepare_plain(build(), device="cpu", slots=2).train()
        torch.manual_seed(0)
        loss = model(**batch).loss
        if is_resized:
            poros.runtime(model).resize(ResidencyPlan(4, 2))
        loss.backward()
        gradients.append([p.grad for p in layers_of(model).parameters() if p.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


def test_it_is_refused_where_a_hook_may_have_kept_old_weights() -> None:
    model = prepare_plain(build(), device="cpu", slots=2).train()
    layers_of(model)[1].mlp.register_forward_hook(lambda *_: None)
    loss = model(**BATCHES[0]).loss
    poros.runtime(model).resize(ResidencyPlan(4, 2))
    with pytest.raises(poros.RematerializationError, match="moved to make room"):
        loss.backward()


def test_room_is_made_where_gradients_are_summed_by_nodes_that_stay() -> None:
    gradients = []
    for is_resized in (False, True):
        model = prepare_plain(build(), device="cpu", slots=2).train()
        layers_of(model)[1].mlp.register_forward_hook(lambda *_: None)
        trained = [each for each in model.parameters() if each.requires_grad]
        held = [each.expand_as(each).grad_fn.next_functions[0][0] for each in trained]  # as DDP
        torch.manual_seed(0)
        model(**BATCHES[0]).loss.backward()
        if is_resized:
            poros.runtime(model).resize(ResidencyPlan(4, 2))
        model(**BATCHES[0]).loss.backward()
        gradients.append([each.grad for each in trained])
        assert len(held) == len(trained)
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
    model = prepare_with(build(), poros.StreamingPolicy(slots=3, loss="reference"), streams=streams)
    runtime = poros.runtime(model)
    streams.left = num_given
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        runtime.resize(ResidencyPlan(5, 2))
    assert (runtime.room, runtime.num_slots) == (ResidencyPlan(3, 0), 3)
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    runtime.resize(ResidencyPlan(5, 2))
    assert (runtime.room.keep_last, runtime.num_slots) == (2, 3)


def test_without_even_the_old_room_a_model_says_so_and_restores(resident: Trajectory) -> None:
    class Scarce(EagerStreams):
        is_empty = False

        def allocate(self, num_bytes: int) -> torch.Tensor:
            if self.is_empty and num_bytes:
                raise torch.OutOfMemoryError("no more")
            return super().allocate(num_bytes)

    streams = Scarce(torch.device("cpu"))
    model = prepare_with(build(), poros.StreamingPolicy(slots=3, loss="reference"), streams=streams)
    train(model, BATCHES, SPEC)
    runtime = poros.runtime(model)
    before = runtime.stats()
    streams.is_empty = True
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        runtime.resize(ResidencyPlan(5, 2))
    after = runtime.stats()
    assert after["num_loads"] == before["num_loads"] > 0
    assert after["device_num_bytes"] < before["device_num_bytes"]
    assert runtime.num_slots == runtime.num_streamed_blocks == 0
    with pytest.raises(PreparedModelError, match=r"poros\.restore"):
        model(**BATCHES[0])
    streams.is_empty = False
    runtime.resize(ResidencyPlan(3, 0))
    assert runtime.num_slots == 3
    poros.restore(model)(**BATCHES[0]).loss.backward()


def test_the_self_checks_share_becomes_room_when_it_has_passed() -> None:
    shape, wide = {**SHAPE, "num_slots": 4}, {"hidden_size": 256, "rank": 1}
    budget = poros.plan(build(**wide), **shape, self_check=True).total_num_bytes
    block = poros.plan(build(**wide), **SHAPE).terms["slots"] // 2
    budget += block - (budget - poros.plan(build(**wide), **shape).total_num_bytes)
    model = prepare_plain(build(**wide), device="cpu", vram_budget=budget).train()
    runtime = poros.runtime(model)
    slots = []
    for batch in BATCHES[:3]:
        model(**batch).loss.backward()
        slots.append(runtime.num_slots)
    assert slots[0] == 4 < slots[1] == slots[2]
    assert runtime.plan is not None and not runtime.plan.terms.get("self-check")


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_device_that_runs_out_says_what_a_step_needs(is_backward: bool) -> None:
    policy = poros.StreamingPolicy(vram_budget=2 * floor(), slots=2, keep_last=0, loss="reference")
    model = prepare_plain(build(), policy, device="cpu").train()
    model(**BATCHES[0]).loss.backward()
    calls: list[int] = []

    def run_out(*_: object) -> None:
        calls.append(1)
        if len(calls) > is_backward:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    handle = layers_of(model)[0].mlp.register_forward_hook(run_out)
    message = r"layers\.0(.|\n)*workspace(.|\n)*Tried to"
    with pytest.raises(VRAMBudgetError, match=message) as caught:
        model(**BATCHES[0]).loss.backward()
    assert isinstance(caught.value, RuntimeError) and "CUDA out of memory" in str(caught.value)
    handle.remove()
    model(**BATCHES[0]).loss.backward()


def test_boundaries_are_offloaded_when_nothing_else_fits() -> None:
    shape = {**SHAPE, "seq_len": 128}
    batches = tiny.make_batches(4, num_tokens=128, padded=False)
    least = poros.plan(build(), **shape, offload_boundaries=True).total_num_bytes
    assert least < poros.plan(build(), **shape, offload_boundaries=False).total_num_bytes
    expected = train(build(), batches, SPEC)
    model = prepare_plain(build(), device="cpu", vram_budget=least, self_check="off")
    assert compare_trajectories(expected, train(model, batches, SPEC)) == []
    runtime = poros.runtime(model)
    assert runtime.plan is not None and runtime.plan.offload_boundaries
    assert runtime.stats()["offloaded_num_bytes"] > 0
    model = prepare_plain(
        build(), device="cpu", vram_budget=least, offload_boundaries=False, self_check="off"
    )
    with pytest.raises(VRAMBudgetError):
        train(model, batches, SPEC)


def test_two_shapes_are_not_planned_as_one_that_never_was() -> None:
    shapes = [(16, 16), (2, 128)]
    need = max(
        poros.plan(build(), **{**SHAPE, "batch_size": rows, "seq_len": length}).total_num_bytes
        for rows, length in shapes
    )
    whole = poros.plan(build(), **{**SHAPE, "batch_size": 16, "seq_len": 128}).total_num_bytes
    assert need < whole
    model = prepare_plain(build(), device="cpu", vram_budget=need, self_check="off").train()
    for rows, length in shapes:
        batch = tiny.make_batches(1, batch_size=rows, num_tokens=length, padded=False)[0]
        model(**batch).loss.backward()
    plan = poros.runtime(model).plan
    assert plan is not None and plan.total_num_bytes <= need


def test_other_adapters_are_planned_anew() -> None:
    model = build()
    model.add_adapter("large", LoraConfig(r=64, target_modules="all-linear"))
    model.set_adapter("default")
    prepare_plain(model, device="cpu", vram_budget=full() * 20, self_check="off").train()
    runtime = poros.runtime(model)
    sizes = []
    for name in ("default", "default", "large"):
        model.set_adapter(name)
        model(**BATCHES[0]).loss.backward()
        assert runtime.plan is not None
        sizes.append(runtime.plan.terms["adapters"])
    assert sizes[0] == sizes[1] < sizes[2]


def test_planning_leaves_the_adapters_configuration_alone() -> None:
    model = build()
    config = model.peft_config["default"]
    config.base_model_name_or_path = "somebody/a-model"
    before = config.to_dict()
    poros.plan(model, **SHAPE)
    assert config.to_dict() == before


def test_a_refused_batch_is_known_to_trainers_that_look_for_one() -> None:
    model = prepare_plain(build(), device="cpu", vram_budget=floor() - 1).train()
    with pytest.raises(VRAMBudgetError) as caught:
        model(**BATCHES[0])
    assert should_reduce_batch_size(caught.value)


def test_a_loop_that_never_calls_train_keeps_to_the_budget() -> None:
    model = prepare_plain(build().eval(), vram_budget=full())
    runtime = poros.runtime(model)
    with torch.no_grad():
        model(**tiny.make_batches(1, num_tokens=8)[0])
    assert runtime.plan is None
    model(**tiny.make_batches(1, num_tokens=8)[0]).loss.backward()
    assert runtime.plan is not None and runtime.plan.total_num_bytes <= full()
    assert runtime.num_streamed_blocks < NUM_LAYERS


def groups(model: Any, number: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and gradients of so many micro-batches."""
    torch.manual_seed(3)
    losses = poros.accumulate(model, tiny.make_batches(number, num_tokens=16, padded=False))
    return losses, [each.grad for each in model.parameters() if each.grad is not None]


@cache
def needed(number: int, **options: Any) -> int:
    plan = poros.plan(build(), **options, self_check=False, micro_batches=number)
    return plan.total_num_bytes


@pytest.mark.parametrize(("share", "expected"), [(1.0, 1), (0.6, 2), (0.0, 0)])
def test_as_many_micro_batches_go_together_as_the_budget_has_room_for(
    share: float, expected: int
) -> None:
    """All four, twice two, or one after the other."""
    # On a CPU nothing shares its dense weights unless it is asked to.
    options = {
        **SHAPE,
        "offload_boundaries": False,
        "num_slots": 2,
        "keep_last": 0,
        "share_dense": False,
    }
    budget = int(needed(1, **options) + share * (needed(4, **options) - needed(1, **options)))
    losses, gradients = groups(build().train())
    chosen: Any = {"offload_boundaries": False, "self_check": "off", "slots": 2, "keep_last": 0}
    model = prepare_plain(build().train(), device="cpu", vram_budget=f"{budget}B", **chosen)
    found_losses, found_gradients = groups(model)
    assert all(map(torch.equal, losses, found_losses))
    assert all(map(torch.equal, gradients, found_gradients))
    stats = poros.runtime(model).stats()
    assert stats["num_groups"] == expected
    is_alone = any("no memory for two" in line for line in stats["fallbacks"])
    assert is_alone == (expected == 0)
    plan = poros.runtime(model).plan
    assert plan is not None and plan.total_num_bytes <= budget
