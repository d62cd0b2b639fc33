"""A run on a device with an allocator starts with two slots and spends what a step has left.

The allocator is simulated, over a CPU: what a step takes follows from a few numbers that the tests
and the estimate know, and from what is beyond the estimate.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.config import StreamingPolicy
from poros.errors import UnsupportedModelError, VRAMBudgetError
from poros.gates import tiny
from poros.model.measuring import RESERVE, SPARE_SHARE, DeviceMemory
from poros.model.runtime import Runtime
from poros.model.sizing import ResidencyPlan, Shape, Sizer, Wanted
from tests.loops import layers_of
from tests.support import make_base, prepare_plain

NUM_LAYERS = 6
KB = 1024
STANDING, OTHERS = 300 * KB, 5000 * KB
PER_TOKEN, GRAPH_PER_TOKEN = 4 * KB, 2 * KB
BEYOND = 40 * KB
"""What a step takes beyond its estimate."""


class SimulatedMemory(DeviceMemory):
    """Holds what the numbers above say; ``overhead`` is lost between the graphs of kept layers."""

    def __init__(self, overhead: float = 1.0) -> None:
        self.overhead = overhead
        self.runtime: Runtime | None = None
        self.peaks: list[int] = []
        """Of each micro-batch, without what is not the model's."""
        self.given_back = 0
        self.others = self._reserved = OTHERS

    def allocated(self) -> int:
        if self.runtime is None:
            return self.others
        return self.others + STANDING + self.runtime.ring.num_bytes

    def reserved(self) -> int:
        return self._reserved

    def num_given_back(self) -> int:
        return self.given_back

    def give_back(self) -> None:
        self.given_back += 1
        self._reserved = self.allocated()

    def free(self) -> int:
        return 10**9

    def hold(self, runtime: Runtime) -> None:
        self.runtime = runtime
        sizer: Any = runtime.sizer
        genuine = sizer._held

        def held() -> int:
            genuine()  # looks at the model's tensors and their gradients
            return STANDING + runtime.ring.num_bytes

        sizer._held = held

    def train(self, num_tokens: int, times: float = 1.0, together: int = 1) -> None:
        """So many micro-batches have passed together."""
        assert self.runtime is not None
        num_tokens *= together
        graphs = self.runtime.room.keep_last * GRAPH_PER_TOKEN * num_tokens * self.overhead
        passing = PER_TOKEN * num_tokens * times + graphs
        held = STANDING + self.runtime.ring.num_bytes + BEYOND
        self.peaks.append(held + int(passing))
        self._reserved = max(self._reserved, self.others + self.peaks[-1])


Prepare = Callable[..., "Loop"]


def build() -> Any:
    """With few adapters: what is tested is how often it moves, over many steps."""
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": 32}
    base = make_base("qwen2", **sizes, dropout=0.05, quantize=False)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj"], "init_lora_weights": False, "lora_dropout": 0.05}
    return get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **options))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """What prepares a model on a device whose memory is simulated, for a loop of steps."""

    def prepare(
        num_bytes: int | None = None,
        overhead: float = 1.0,
        dense_tokens: float = 0.0,
        **policy: Any,
    ) -> Loop:
        memory = SimulatedMemory(overhead)
        monkeypatch.setattr(Estimated, "dense_tokens", dense_tokens)
        monkeypatch.setattr("poros.model.runtime.device_memory", lambda device: memory)
        if num_bytes is not None:
            policy["vram_budget"] = f"{num_bytes}B"
        model = prepare_plain(build(), device="cpu", **{"self_check": "off", **policy}).train()
        runtime = poros.runtime(model)
        runtime.sizer._estimate = estimate  # type: ignore[assignment]
        memory.hold(runtime)
        return Loop(model, memory)

    return prepare


class Estimated:
    """A plan, as far as sizing asks for it."""

    dense_tokens = 0.0
    joins = True
    to_come = 0
    """Bytes of a term that no step has taken yet."""

    def __init__(
        self, num_slots: int, keep_last: int, offload: bool, total: int, shape: Shape
    ) -> None:
        self.num_slots, self.keep_last = num_slots, keep_last
        self.options = {"batch_size": shape.batch_size, "seq_len": shape.seq_len}
        self.micro_batches = shape.micro_batches
        self.offload_boundaries, self.total_num_bytes = offload, total + self.to_come
        self.num_blocks, self.block_size = NUM_LAYERS, 1
        self.check_kernels = "peft"
        self.replays, self.shares_dense = False, shape.micro_batches > 1
        self.terms = {"dense layer": 0, "copies": self.to_come}

    def table(self) -> str:
        return "nothing"


def estimate(shape: Shape, budget: int | None, wanted: Wanted, *_: bool) -> Estimated:
    """The most room that fits, as a plan has it."""

    def plan(slots: int, kept: int) -> Estimated:
        total = step(slots, kept, shape.num_tokens) - BEYOND
        return Estimated(slots, kept, bool(wanted.offload_inputs), total, shape)

    slots = [wanted.num_slots] if wanted.num_slots else range(2, NUM_LAYERS + 1)
    rooms = [plan(number, wanted.keep_last or 0) for number in slots]
    if wanted.keep_last is None and rooms[-1].num_slots == NUM_LAYERS:
        rooms += [plan(NUM_LAYERS, number) for number in range(1, NUM_LAYERS + 1)]
    if budget is None:
        return rooms[0]
    fitting = [room for room in rooms if room.total_num_bytes <= budget]
    if not fitting:
        raise VRAMBudgetError("expected more, found less")
    return fitting[-1]


class Loop:
    """Optimizer steps over batches of given lengths; the room in which each ran."""

    def __init__(self, model: Any, memory: SimulatedMemory) -> None:
        self.model, self.memory = model, memory
        self.runtime = poros.runtime(model)
        self.sizer: Any = self.runtime.sizer
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def run(self, *lengths: int, times: float = 1.0, steps: bool = True) -> list[ResidencyPlan]:
        rooms = []
        for length in lengths:
            batch = tiny.make_batches(1, batch_size=1, num_tokens=length, padded=False)[0]
            self.model(**batch).loss.backward()
            rooms.append(self.runtime.room)
            self.memory.train(length, times)
            if steps:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return rooms


@cache
def block_num_bytes() -> int:
    return poros.runtime(prepare_plain(build(), device="cpu", slots=2)).ring.num_bytes // 2


def budget(num_slots: int, keep_last: int, length: int) -> int:
    """The least one for which a step is given so much room."""
    taken = step(num_slots, keep_last, length)
    return next(
        each for each in range(taken, taken * 2) if int(each * (1 - SPARE_SHARE)) - taken >= 0
    )


def step(num_slots: int, keep_last: int, length: int) -> int:
    graphs = keep_last * GRAPH_PER_TOKEN * length
    return STANDING + BEYOND + num_slots * block_num_bytes() + PER_TOKEN * length + graphs


def test_a_room_for_several_shapes_is_planned_as_it_is() -> None:
    def estimate(shape: Shape, budget: object, wanted: Wanted, *_: bool) -> Any:
        slots, kept = {Shape(1, 10): (4, 0), Shape(2, 5): (3, 1)}[shape]
        slots = slots if wanted.num_slots is None else wanted.num_slots
        kept = kept if wanted.keep_last is None else wanted.keep_last
        return Estimated(slots, kept, False, shape.batch_size + shape.seq_len, shape)

    sizer = Sizer(StreamingPolicy(vram_budget="1GiB"), estimate)
    assert sizer.plan is None
    assert sizer.begin(Shape(1, 10), ResidencyPlan(2, 0), False, None) == ResidencyPlan(4, 0)
    room = sizer.begin(Shape(2, 5), ResidencyPlan(4, 0), False, None)
    assert room == ResidencyPlan(3, 0), "what both leave"
    plan: Any = sizer.plan
    assert (plan.num_slots, plan.keep_last, plan.total_num_bytes) == (3, 0, 7)


def test_visits_are_joined_where_the_plan_of_the_longest_ones_says_so() -> None:
    def estimate(shape: Shape, *_: object) -> Any:
        found = Estimated(2, 0, False, 1, shape)
        found.joins = shape.micro_batches * shape.seq_len < 64
        return found

    sizer, joins = Sizer(StreamingPolicy(vram_budget="1GiB"), estimate), []
    for shape in (Shape(1, 8, 4), Shape(1, 16, 4), Shape(1, 8, 4), Shape(1, 32)):
        sizer.begin(shape, ResidencyPlan(2, 0), False, None)
        joins.append(sizer.joins)
    assert joins == [True, False, False, True], "the last one has none to be joined with"


# What is spent.


@pytest.mark.cover("values")
@pytest.mark.parametrize("check", ["strict", "off"])
@pytest.mark.parametrize(("slots", "kept"), [(2, 0), (4, 0), (6, 0), (6, 3), (6, 6)])
def test_what_a_step_leaves_is_spent_but_for_a_fiftieth_of_the_budget(
    prepared: Prepare, slots: int, kept: int, check: str
) -> None:
    """What the check of the first step takes is not counted."""
    loop = prepared(budget(slots, kept, 16), self_check=check)
    rooms = loop.run(16, times=20.0 if check == "strict" else 1.0) + loop.run(16, 16, 16)
    assert rooms == [
        ResidencyPlan(2, 0),
        ResidencyPlan(2, 0),
        ResidencyPlan(slots, kept),
        ResidencyPlan(slots, kept),
    ]
    assert loop.memory.peaks[-1] == step(slots, kept, 16)
    assert loop.runtime.stats()["num_resizes"] == (slots > 2)


@pytest.mark.parametrize(("terms", "slots"), [((), 5), (("copies",), 4)])
def test_what_is_not_there_yet_is_left_for_it(
    prepared: Prepare, terms: tuple[str, ...], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = prepared(budget(5, 0, 16))
    monkeypatch.setattr(Estimated, "to_come", block_num_bytes())
    loop.sizer._terms_to_come = lambda: terms
    assert loop.run(16, 16, 16)[-1] == ResidencyPlan(slots, 0)


def test_what_others_give_back_is_not_taken_for_room(prepared: Prepare) -> None:
    loop = prepared(budget(4, 0, 16))
    loop.run(16)
    loop.memory.others -= 4000 * KB
    assert loop.run(16, 16, 16)[-1] == ResidencyPlan(4, 0)


# Slots for which a budget is too small by a byte, for steps of 16 tokens; None: all free memory.
ROOMS: dict[str, tuple[int | None, dict[str, Any], ResidencyPlan]] = {
    "a byte less, a slot less": (5, {}, ResidencyPlan(4, 0)),
    "more than the floor": (2, {"offload_boundaries": False}, ResidencyPlan(2, 0)),
    "inputs go to the host": (2, {}, ResidencyPlan(2, 0, offload_inputs=True)),
    "all free memory": (None, {}, ResidencyPlan(NUM_LAYERS, NUM_LAYERS)),
    "chosen slots": (None, {"slots": 2}, ResidencyPlan(2, 0)),
    "chosen layers": (None, {"keep_last": 0}, ResidencyPlan(2, 0)),
}


@pytest.mark.parametrize("case", ROOMS)
def test_the_room_of_the_third_step(
    case: str, prepared: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    slots, policy, room = ROOMS[case]
    # The fewest slots need no more than what they take.
    needed = step if slots == 2 else budget
    num_bytes = None if slots is None else needed(slots, 0, 16) - 1
    assert prepared(num_bytes, **policy).run(16, 16, 16)[-1] == room
    assert ("more than the budget" in caplog.text) == (case == "more than the floor")


def test_a_whole_step_is_measured_not_its_first_micro_batch(prepared: Prepare) -> None:
    loop = prepared(budget(6, 0, 16))
    loop.run(16, steps=False), loop.run(16)
    loop.run(16, steps=False)
    loop.run(16, times=2.0)  # clipping, the optimizer's step
    (room,) = loop.run(16, steps=False)
    spare = step(6, 0, 16) - step(2, 0, 16) - PER_TOKEN * 16
    assert room == ResidencyPlan(2 + spare // block_num_bytes(), 0) and room.num_slots < 6


def test_a_step_in_which_somebody_empties_the_cache_is_not_measured(
    prepared: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    loop = prepared(budget(6, 6, 16))
    loop.run(16, 16)
    loop.memory.give_back()
    assert loop.run(16, 16, 16) == [ResidencyPlan(2, 0)] * 3
    assert "torch_empty_cache_steps" in caplog.text


def test_what_turns_out_to_be_too_much_is_given_up_kept_layers_first(prepared: Prepare) -> None:
    wanted = budget(6, 4, 16)
    loop = prepared(wanted, overhead=1.4)
    rooms = loop.run(*[16] * 6)
    assert rooms[2] == ResidencyPlan(6, 4) and loop.memory.peaks[2] > wanted
    assert rooms[-1].num_slots == 6 and 0 < rooms[-1].keep_last < 4
    assert loop.memory.peaks[-1] <= wanted


def test_a_batch_that_needs_more_than_that_gives_up_slots(prepared: Prepare) -> None:
    loop = prepared(budget(6, 0, 40))
    assert loop.run(16, 16, 16)[-1].num_slots == 6
    rooms = loop.run(32, 32, 32)
    assert 2 < rooms[0].num_slots < 6 and rooms[0].num_slots <= rooms[-1].num_slots
    assert max(loop.memory.peaks) <= budget(6, 0, 40)


@pytest.mark.parametrize("kept", [0, 3])
def test_what_a_short_batch_leaves_is_not_spent_if_a_long_one_may_come_again(
    prepared: Prepare, kept: int
) -> None:
    loop = prepared(budget(6, kept, 30))
    loop.run(32, 32, 16, 16, 16, 32, 16, 16, 32)
    assert max(loop.memory.peaks) <= budget(6, kept, 30)


def test_a_step_in_which_visits_are_recorded_is_not_measured(prepared: Prepare) -> None:
    """They run beside their recordings then."""
    loop = prepared(budget(6, 4, 16))
    rooms = []
    for number in range(4):
        rooms += loop.run(16, times=3.0 if number == 1 else 1.0)
        if number == 1:
            loop.sizer.recorded()
    assert rooms[1] == rooms[2] and rooms[3] == ResidencyPlan(6, 4)


def test_a_batch_that_room_was_left_for_is_measured_as_it_comes(prepared: Prepare) -> None:
    """It may take more than its estimate."""
    wanted = budget(6, 2, 16)
    loop = prepared(wanted)
    loop.run(*[16] * 4, *[20] * 4)
    loop.run(28, 28, 28, times=1.6)
    assert loop.memory.peaks[-1] <= wanted < max(loop.memory.peaks)


def test_what_a_short_step_takes_beyond_its_estimate_does_not_decide_for_long_ones(
    prepared: Prepare,
) -> None:
    loop = prepared(budget(6, 2, 64))
    loop.run(*[2] * 4)
    assert loop.run(*[64] * 4)[-1] == ResidencyPlan(6, 2)


def test_lengths_that_creep_up_do_not_resize_at_each_step(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a token at a time. Control: without what is left for longer batches they do."""
    for reserve, is_kept in ((RESERVE, True), (1.0, False)):
        monkeypatch.setattr("poros.model.measuring.RESERVE", reserve)
        loop = prepared(budget(6, 4, 24))
        loop.run(16, 16, 16, 16, *range(17, 41))
        assert max(loop.memory.peaks) <= budget(6, 4, 24)
        num_resizes = loop.runtime.stats()["num_resizes"]
        assert num_resizes <= 4 if is_kept else num_resizes > 5


@pytest.mark.parametrize("error", [UnsupportedModelError, VRAMBudgetError])
@pytest.mark.parametrize("is_given", [True, False])
def test_what_cannot_fit_a_given_budget_is_refused_and_all_else_begins_with_the_fewest_blocks(
    prepared: Prepare, is_given: bool, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    loop = prepared(2**30 if is_given else None)

    def fail(*_: object) -> Any:
        raise error("expected more, found less")

    loop.sizer._estimate = fail
    if is_given and error is VRAMBudgetError:
        with pytest.raises(VRAMBudgetError, match="found less\nRefused before"):
            loop.run(16)
        assert all(parameter.grad is None for parameter in loop.model.parameters())
        return
    assert loop.run(16) == [ResidencyPlan(2, 0)]
    assert "continuing with the fewest blocks" in caplog.text and "found less" in caplog.text


@pytest.mark.parametrize("is_given", [True, False])
def test_room_that_cannot_be_had_is_an_error_only_with_a_budget(
    prepared: Prepare,
    is_given: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = prepared(budget(6, 6, 16) if is_given else None)
    allocate = Runtime._allocate_slots

    def scarce(runtime: Runtime, room: ResidencyPlan) -> Any:
        if room.num_slots > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. No more")
        return allocate(runtime, room)

    monkeypatch.setattr(Runtime, "_allocate_slots", scarce)
    loop.run(16, 16)
    if is_given:
        with pytest.raises(VRAMBudgetError, match="No more") as caught:
            loop.run(16)
        assert isinstance(caught.value, torch.OutOfMemoryError)
    else:
        assert loop.run(16, 16) == [ResidencyPlan(2, 0)] * 2
        assert "continuing with 2 slots" in caplog.text


def test_other_adapters_are_measured_anew(prepared: Prepare) -> None:
    loop = prepared(budget(6, 6, 16))
    loop.run(16, 16, 16, 16)
    first, *others = layers_of(loop.model).parameters()
    trained = next(each for each in others if each.requires_grad)
    assert not first.requires_grad
    trained.requires_grad_(False)
    assert loop.run(16) == [ResidencyPlan(2, 0)]
    assert loop.run(16, 16, 16)[-1] == ResidencyPlan(6, 6)


def test_steps_that_take_now_less_and_now_more_do_not_resize_for_good(prepared: Prepare) -> None:
    loop = prepared(budget(6, 2, 16))
    loop.run(16, 16)
    for _ in range(8):
        loop.run(16, times=4.0)
        loop.run(16)
    assert loop.runtime.stats()["num_resizes"] <= 3


def test_what_the_model_has_on_the_device_counts_each_byte_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poros.model.runtime.device_memory", lambda device: SimulatedMemory())
    model = prepare_plain(build(), device="cpu", vram_budget="1GiB", self_check="off")
    runtime = poros.runtime(model)
    sizer: Any = runtime.sizer
    tensors = {
        (tensor.data_ptr(), tensor.nbytes)
        for tensor in (*model.parameters(), *model.buffers())
        if not runtime.small.holds(tensor)
    }
    expected = sum(num_bytes for _, num_bytes in tensors) + runtime.device_num_bytes
    assert sizer._held() == expected and len(tensors) > NUM_LAYERS
    model.register_buffer("again", next(model.parameters()).detach()[:1])
    assert sizer._held() == expected, "a view of what is there"
    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    trained.grad = torch.zeros_like(trained)
    assert sizer._held() == expected + trained.nbytes


@pytest.mark.parametrize(
    ("whole", "free", "share", "expected"),
    [
        (80, 60, 1.0, 60 + 2 - 8),  # a tenth for others
        (8, 2.5, 1.0, 2.5 + 2 - 1),  # at least 1 GiB
        (80, 79, 0.5, 40 - 5 + 2 - 8),  # the user's limit for this process
        (8, 0.5, 0.01, 0),
    ],
)
def test_what_may_be_spent_without_a_budget(
    whole: float, free: float, share: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In GiB; 5 are held by the allocator, 3 of them in tensors."""
    gib = 2**30
    for name, value in {
        "mem_get_info": (int(free * gib), int(whole * gib)),
        "memory.get_per_process_memory_fraction": share,
        "memory_reserved": 5 * gib,
        "memory_allocated": 3 * gib,
        "memory_stats": {},
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    memory = DeviceMemory(torch.device("cuda"))
    assert memory.free() == pytest.approx(expected * gib, abs=16)
    assert memory.num_given_back() == 0  # a release of torch that does not count it


# Micro-batches go together, unless most layers could keep their graph if each went by itself.


def accumulated(
    loop: Loop, length: int, steps: int, number: int = 3, first: int | None = None
) -> list[bool]:
    """Optimizer steps of so many micro-batches each; whether these went together.

    ``first``: the length of the very first one.
    """
    runtime, found = loop.runtime, list[bool]()
    for _ in range(steps):
        before = 0 if runtime.accumulation is None else runtime.accumulation.num_groups
        lengths, first = [first or length, *[length] * (number - 1)], None
        made = [tiny.make_batches(1, batch_size=1, num_tokens=n, padded=False) for n in lengths]
        poros.accumulate(loop.model, [dict(batch) for batch, *_ in made])
        groups = 0 if runtime.accumulation is None else runtime.accumulation.num_groups
        is_together = groups > before
        loop.memory.train(length, together=number if is_together else 1)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        found.append(is_together)
    return found


def test_micro_batches_go_alone_where_most_layers_can_keep_their_graph(
    prepared: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    loop = prepared(budget(6, 6, 32))
    assert accumulated(loop, 16, 6) == [True] + [False] * 5, "all but the first group"
    assert loop.runtime.room == ResidencyPlan(6, 6)
    assert "one after the other" not in caplog.text, "that is no fault to be told of"
    assert loop.runtime.stats()["fallbacks"] == []
    # A larger batch takes that room, and has them go together for good.
    assert accumulated(loop, 56, 4)[-1]
    assert all(accumulated(loop, 16, 2)), "room that comes and goes changes nothing more"


@pytest.mark.parametrize(
    ("kept", "num_tokens", "dense_tokens"), [(0, 40, 0.0), (6, 48, 40.0), (6, 80, 12.0)]
)
def test_control_micro_batches_stay_together(
    kept: int, num_tokens: int, dense_tokens: float, prepared: Prepare
) -> None:
    """Where few layers can keep their graph, and where that is worth less than sharing weights;
    where those that go together keep theirs too."""
    loop = prepared(budget(6, kept, num_tokens), dense_tokens=dense_tokens)
    assert all(accumulated(loop, 16, 6))
    assert loop.runtime.room.keep_last == kept


@pytest.mark.parametrize("first", [4, 16])
def test_a_longer_group_decides_anew_whether_each_goes_alone(first: int, prepared: Prepare) -> None:
    loop = prepared(budget(6, 6, 32), dense_tokens=8.0)
    assert all(accumulated(loop, first, 2)) == (first == 4)
    assert not any(accumulated(loop, 16, 6)[1:])
    assert loop.runtime.room == ResidencyPlan(6, 6)


def test_one_that_ran_alone_does_not_end_what_others_share(prepared: Prepare) -> None:
    loop = prepared(budget(6, 0, 60), dense_tokens=100.0)
    assert all(accumulated(loop, 16, 4, first=20))
    assert loop.sizer.shares_dense


def test_one_behind_others_may_be_longer(prepared: Prepare) -> None:
    """Room is made for it as its code begins, where others have come to their layers already."""
    loop = prepared(budget(6, 0, 60), dense_tokens=1000.0)
    assert all(accumulated(loop, 16, 6))
    before, num_groups = loop.runtime.room, loop.runtime.accumulation.num_groups
    made = [tiny.make_batches(1, batch_size=1, num_tokens=n, padded=False)[0] for n in (16, 24, 16)]
    poros.accumulate(loop.model, [dict(each) for each in made])
    assert loop.runtime.room != before
    assert loop.runtime.accumulation.num_groups > num_groups
