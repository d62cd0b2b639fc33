"""One number decides slots and kept layers, at the first step, and changes no bit.

Where nothing else fits, inputs of layers wait on the host: two are on the device at a time.
"""

import gc
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import LoraConfig

import poros
from poros.api import prepare_with
from poros.eager_streams import EagerStreams
from poros.errors import (
    HostMemoryError,
    PreparedModelError,
    RematerializationError,
    VRAMBudgetError,
)
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, start_digests, train
from poros.host import limits
from poros.model.sizing import ResidencyPlan
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest
from poros.stream.offload import ActivationOffloader, OffloadedInput
from tests import loops
from tests.comparing import compare_trajectories
from tests.covers import with_slow
from tests.loops import layers_of, override
from tests.replaced import Patch, raising
from tests.support import AdversarialPrepare, prepare_plain
from tools.adversary import AdversarialStreams, SlotHazard

pytestmark = pytest.mark.usefixtures("planned_once")

NUM_LAYERS = 5
SPEC = TrainingSpec(num_steps=2, accumulation=2)
BATCHES = tiny.make_batches(4, num_tokens=16, padded=False)
SHAPE: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "accumulation": 2, "loss": "reference"}
SHAPE["cuda_graphs"] = False  # of a CPU
build = partial(loops.build, num_layers=NUM_LAYERS)


@cache
def floor() -> int:
    """With inputs of layers on the host, where nothing else fits."""
    return min(planned(offload_boundaries=each) for each in (False, True))


@cache
def full() -> int:
    return planned(num_slots=NUM_LAYERS, keep_last=NUM_LAYERS)


@cache
def planner() -> tuple[Planner, Any]:
    """And its model, which it does not keep alive."""
    model = build()
    return Planner(model), model


def planned(**options: Any) -> int:
    """The bytes that a step of ``SHAPE`` takes, with other options."""
    return planner()[0].plan(PlanRequest.of(**{**SHAPE, **options})).total_num_bytes


def prepared(**options: Any) -> Any:
    return prepare_plain(build(), device="cpu", **options).train()


def over(streams: EagerStreams) -> Any:
    """With three slots, of memory that these streams give."""
    return prepare_with(build(), poros.StreamingPolicy(slots=3, loss="reference"), streams=streams)


class Scarce(EagerStreams):
    """Gives memory so many times; then there is none, once, or as long as ``left`` is 0."""

    left: float = float("inf")
    is_back = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if not self.left and num_bytes:
            self.left = float("inf") if self.is_back else 0
            raise torch.OutOfMemoryError("no more")
        self.left -= 1 if num_bytes else 0
        return super().allocate(num_bytes)


@pytest.fixture(scope="module")
def resident() -> Trajectory:
    return train(build(), BATCHES, SPEC)


@pytest.mark.parametrize(
    ("share", "is_hostile"),
    [
        *((0.0, False), (1.0, False), (0.5, True)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.5, False), (1.0, True))),
    ],
)
def test_budgets_change_no_bit(share: float, is_hostile: bool, resident: Trajectory) -> None:
    """With the self-check, or under adversarial streams."""
    budget = int(floor() + share * (full() - floor()))
    hostile = AdversarialPrepare()
    with hostile.watching() if is_hostile else nullcontext():
        prepare: Any = hostile if is_hostile else prepare_plain
        model = prepare(build(), device="cpu", vram_budget=budget)
        assert poros.runtime(model).plan is None
        assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    runtime = poros.runtime(model)
    assert runtime.plan is not None and runtime.plan.total_num_bytes <= budget
    assert runtime.self_check["status"] == ("off" if is_hostile else "passed")
    in_ring = runtime.num_blocks - runtime.num_streamed_blocks + runtime.num_slots
    assert (in_ring, runtime.plan.keep_last) == (runtime.plan.num_slots, runtime.plan.keep_last)
    if share == 0.0:
        assert (runtime.plan.num_slots, runtime.plan.keep_last) == (2, 0)
        assert runtime.plan.offload_boundaries and runtime.stats()["offloaded_num_bytes"] > 0
    if share == 1.0:
        assert (runtime.num_streamed_blocks, runtime.plan.keep_last) == (0, NUM_LAYERS)


def test_a_budget_below_the_floor_is_refused_before_anything_is_trained() -> None:
    model = prepared(vram_budget=floor() - 1)
    before = start_digests(model)
    random_state = torch.get_rng_state()
    match = r"the floor for 2 slots(.|\n)*workspace .* MB"
    with pytest.raises(VRAMBudgetError, match=match) as caught:
        model(**BATCHES[0])
    assert should_reduce_batch_size(caught.value)  # so that trainers which look for it know it
    assert torch.equal(torch.get_rng_state(), random_state)
    assert start_digests(model) == before
    with torch.no_grad():
        model(**BATCHES[0])
    poros.restore(model)
    model(**BATCHES[0]).loss.backward()


def test_a_batch_that_grows_is_planned_again() -> None:
    budget = planned(seq_len=64, num_slots=4)
    model = prepared(vram_budget=budget)
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
    with pytest.raises(VRAMBudgetError, match="fit, each change alone: batch_size="):
        model(**huge)
    model(**short).loss.backward()


def test_room_is_made_between_a_forward_and_its_backward() -> None:
    """It is refused where a hook, or bitsandbytes' own product, may have kept old weights."""
    gradients, kept = [], []
    for is_resized, keeps in ((False, ""), (True, ""), (True, "a hook"), (True, "a product")):
        model = build(quantize=keeps == "a product")
        kernels = "peft" if keeps == "a product" else "fused"
        prepare_plain(model, device="cpu", slots=2, adapter_kernels=kernels).train()
        if keeps == "a hook":
            mlp = layers_of(model)[1].mlp
            mlp.register_forward_hook(
                lambda mlp, *_: kept.append(mlp.up_proj.base_layer.weight.data)
            )
        torch.manual_seed(0)
        loss = model(**BATCHES[0]).loss
        if is_resized:
            poros.runtime(model).resize(ResidencyPlan(4, 2))
        if keeps:
            with pytest.raises(poros.RematerializationError, match="moved to make room"):
                loss.backward()
            continue
        loss.backward()
        gradients.append([p.grad for p in layers_of(model).parameters() if p.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


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


@pytest.mark.parametrize("num_given", with_slow([0, 1, 4], [0, 1]))
def test_room_that_cannot_be_had_leaves_the_old_one(num_given: int, resident: Trajectory) -> None:
    streams = Scarce()
    model = over(streams)
    runtime = poros.runtime(model)
    streams.left = num_given
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        runtime.resize(ResidencyPlan(5, 2))
    assert (runtime.room, runtime.num_slots) == (ResidencyPlan(3, 0), 3)
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    runtime.resize(ResidencyPlan(5, 2))
    assert (runtime.room.keep_last, runtime.num_slots) == (2, 3)


def test_without_even_the_old_room_a_model_says_so_and_restores(resident: Trajectory) -> None:
    streams = Scarce()
    model = over(streams)
    train(model, BATCHES, SPEC)
    runtime = poros.runtime(model)
    before = runtime.stats()
    streams.left, streams.is_back = 0, False
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        runtime.resize(ResidencyPlan(5, 2))
    after = runtime.stats()
    assert after["num_loads"] == before["num_loads"] > 0
    assert after["device_num_bytes"] < before["device_num_bytes"]
    assert runtime.num_slots == runtime.num_streamed_blocks == 0
    with pytest.raises(PreparedModelError, match=r"poros\.restore"):
        model(**BATCHES[0])
    streams.left = float("inf")
    runtime.resize(ResidencyPlan(3, 0))
    assert runtime.num_slots == 3
    poros.restore(model)(**BATCHES[0]).loss.backward()


def test_the_self_checks_share_becomes_room_when_it_has_passed() -> None:
    shape, wide = {**SHAPE, "num_slots": 4}, {"hidden_size": 256, "rank": 1, "num_layers": 6}
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

    message = r"layers\.0(.|\n)*workspace(.|\n)*Tried to"
    handle = layers_of(model)[0].mlp.register_forward_hook(run_out)
    with handle, pytest.raises(VRAMBudgetError, match=message) as caught:
        model(**BATCHES[0]).loss.backward()
    assert isinstance(caught.value, RuntimeError) and "CUDA out of memory" in str(caught.value)
    model(**BATCHES[0]).loss.backward()


def test_other_adapters_are_planned_anew() -> None:
    model = build()
    model.add_adapter("large", LoraConfig(r=64, target_modules="all-linear"))
    model.set_adapter("default")
    prepare_plain(model, device="cpu", vram_budget=full() * 20, self_check="off").train()
    runtime = poros.runtime(model)
    config = model.peft_config["default"]
    config.base_model_name_or_path = "somebody/a-model"
    sizes, before = [], config.to_dict()
    for name in ("default", "default", "large"):
        model.set_adapter(name)
        model(**BATCHES[0]).loss.backward()
        assert runtime.plan is not None
        sizes.append(runtime.plan.terms["adapters"])
    assert sizes[0] == sizes[1] < sizes[2]
    poros.plan(model, **SHAPE)
    assert config.to_dict() == before  # planning leaves it alone


def test_a_loop_that_never_calls_train_keeps_to_the_budget() -> None:
    model = prepare_plain(build().eval(), vram_budget=full())
    runtime = poros.runtime(model)
    with torch.no_grad():
        model(**tiny.make_batches(1, num_tokens=8)[0])
    assert runtime.plan is None
    model(**tiny.make_batches(1, num_tokens=8)[0]).loss.backward()
    assert runtime.plan is not None and runtime.plan.total_num_bytes <= full()
    assert runtime.num_streamed_blocks < NUM_LAYERS


def groups(model: Any, number: int = 5) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and gradients of so many micro-batches."""
    torch.manual_seed(3)
    losses = poros.accumulate(model, tiny.make_batches(number, num_tokens=16, padded=False))
    return losses, [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(
    ("share", "expected"), [pytest.param(1.0, 1, marks=pytest.mark.slow), (0.6, 2), (0.0, 0)]
)
def test_as_many_micro_batches_go_together_as_the_budget_has_room_for(
    share: float, expected: int
) -> None:
    """All four behind the first, twice two, or one after the other."""
    # On a CPU nothing shares its dense weights unless it is asked to.
    options: Any = {"offload_boundaries": False, "num_slots": 2, "keep_last": 0}
    options |= {"share_dense": False, "self_check": False}
    one, four = (planned(micro_batches=number, **options) for number in (1, 4))
    budget = int(one + share * (four - one))
    losses, gradients = groups(build().train())
    chosen: Any = {"offload_boundaries": False, "self_check": "off", "slots": 2, "keep_last": 0}
    model = prepared(vram_budget=f"{budget}B", **chosen)
    found_losses, found_gradients = groups(model)
    assert all(map(torch.equal, losses, found_losses))
    assert all(map(torch.equal, gradients, found_gradients))
    stats = poros.runtime(model).stats()
    assert stats["num_groups"] == expected
    is_alone = any("no memory for two" in line for line in stats["fallbacks"])
    assert is_alone == (expected == 0)
    plan = poros.runtime(model).plan
    assert plan is not None and plan.total_num_bytes <= budget


# Inputs of layers that wait on the host.


def hostile(model: Any, **overrides: Any) -> Any:
    """Adversarial streams with the self-check on."""
    policy = poros.StreamingPolicy(offload_boundaries=True, loss="reference").override(**overrides)
    return prepare_with(model, policy, streams=AdversarialStreams())


def test_host_buffers_are_used_again() -> None:
    """Given back with the backward, though the losses live on."""
    model = hostile(build(), self_check="off").train()
    runtime = poros.runtime(model)
    losses, sizes, buffers = [], [], []
    longer = tiny.make_batches(1, num_tokens=40, padded=False)[0]
    for batch in (BATCHES[0], BATCHES[0], longer, BATCHES[0]):
        losses.append(model(**batch).loss)
        losses[-1].backward()
        sizes.append(runtime.stats()["offloaded_num_bytes"])
        buffers.append(list(runtime.offloader._buffers))
    assert sizes[0] == sizes[1] > 0 and sizes[2] == sizes[3]
    assert buffers[0] == buffers[1] and buffers[2] == buffers[3], "page locks are costly"
    assert sizes[2] == pytest.approx(sizes[0] * 40 / 16, rel=0.01)


def test_a_graph_that_is_dropped_gives_everything_back(resident: Trajectory) -> None:
    model = hostile(build(), self_check="off").train()
    offloader = poros.runtime(model).offloader
    loss = model(**BATCHES[0]).loss
    most = offloader.num_bytes
    del loss
    loss = model(**BATCHES[1]).loss
    handle = layers_of(model)[2].mlp.register_full_backward_hook(raising(ValueError))
    with handle, pytest.raises((ValueError, RematerializationError)):
        loss.backward()
    del loss
    gc.collect()
    model.zero_grad()
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    assert offloader.num_bytes == most > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_memory_given_back_under_a_copy(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OffloadedInput, "__del__", lambda self: None)
    offloader = ActivationOffloader(AdversarialStreams())
    offloaded = parked(offloader, 5)
    offloaded[4].fetch()
    offloaded[3].fetch()
    del offloaded  # the input of layer 2 is on its way
    with pytest.raises(SlotHazard, match="given back"):
        parked(offloader, 1)


def parked(offloader: ActivationOffloader, number: int) -> list[Any]:
    """The inputs of so many layers, of 12 equal numbers."""
    inputs = [torch.full((3, 4), float(index)) for index in range(number)]
    return [offloader.offload(each, f"layer {at}", at) for at, each in enumerate(inputs)]


def test_each_input_comes_back_ahead_of_its_layer() -> None:
    offloaded = parked(ActivationOffloader(AdversarialStreams()), 6)
    assert [each._tensor is not None for each in offloaded] == [False] * 4 + [True] * 2
    for index in reversed(range(6)):
        assert torch.equal(offloaded[index].fetch(), torch.full((3, 4), float(index)))
        on_device = [number for number, each in enumerate(offloaded) if each._tensor is not None]
        assert on_device == ([index - 1] if index else [])


def test_an_edited_input_is_refused_again_and_again() -> None:
    """The edit and the copy to the host are not ordered: what came back may hold either."""
    model = hostile(build(), self_check="off").train()
    inputs: list[torch.Tensor] = []
    with layers_of(model)[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        edited = model(**BATCHES[0]).loss
    with torch.no_grad():
        inputs[0].add_(1)
    other = model(**BATCHES[1]).loss  # not to blame
    for _ in range(2):
        with pytest.raises(RematerializationError, match=rf"layers\.{NUM_LAYERS - 1}: its input"):
            edited.backward(retain_graph=True)
    other.backward()


def test_a_dropped_graph_waits_on_no_stream(monkeypatch: Patch) -> None:
    """A collector drops it wherever it is, with any stream current: the allocator has to know."""
    offloader = ActivationOffloader(AdversarialStreams())
    offloaded = parked(offloader, 3)
    own = offloader._streams
    abandoned: list[tuple[int, ...]] = []
    monkeypatch.setattr(own, "wait", raising(AssertionError, "waited"))
    monkeypatch.setattr(own, "abandon", lambda memory, event: abandoned.append(memory.shape))
    del offloaded
    gc.collect()
    assert abandoned == [(3, 4)] * 2


def test_an_input_given_twice_passes_the_self_check() -> None:
    def twice(layer: Any, own: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("again", None)
        return own(hidden_states, *args, **kwargs)

    def add(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "again": args[0]}

    model = build()
    override(layers_of(model), twice)
    hostile(model).train()
    for each in layers_of(model):
        each.register_forward_pre_hook(add, with_kwargs=True)
    model(**BATCHES[0]).loss.backward()
    assert poros.runtime(model).self_check["status"] == "passed"


def test_too_little_host_memory_is_said_before_it_is_taken(monkeypatch: Patch) -> None:
    model = hostile(build(), self_check="off").train()
    limit = limits.MemoryLimit(1 << 20, "a limit")
    monkeypatch.setattr(limits, "host_memory_left", lambda root: limit)
    with pytest.raises(HostMemoryError, match="inputs of layers"):
        model(**BATCHES[0])
    monkeypatch.undo()
    model(**BATCHES[0]).loss.backward()
