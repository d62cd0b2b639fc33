"""Programs whose visits are recorded and replayed, by a stand-in that sees nothing of Python.

They have the bits of a resident run, where layers are recomputed and where they keep their graph.
Then what is recorded and when, what makes way, and what is wrong and never replayed. How users
compute within steps: ``test_programs`` and ``test_written_programs``, which replay them too.
"""

import gc
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint

import poros
from poros.errors import ParityError
from poros.io.digests import checksum
from poros.model import recorded as chosen
from poros.model.sizing import ResidencyPlan
from poros.replay.call import LEAVES
from poros.replay.captures import NEW
from poros.replay.forms import HeldGraph
from poros.replay.graphs import Fixed
from poros.slots.schedule import Phase
from poros.stream.boundary import StreamedLayer
from poros.stream.offload import ActivationOffloader
from tests.exact.recorded import KEPT, as_resident, gradients, loss_of, recorded, spoil, train
from tests.exact.recorded import few_dense as few
from tests.loops import adapted, bf16, build, same, streamed, trained
from tests.replaced import Patch, in_place_of, noted
from tests.support import leaves_keys_always
from tests.unsteady import make_unsteady
from tools.tape import TapeRecorder

Model = Any
Facts = list[Any]
LATE = 5
"""The step from which on something is otherwise; by then visits are replayed."""


# What changes between two steps, beside what the fuzzer's language has.


def of_each(name: str, change: Callable[[Any, bool], object]) -> Callable[[Model, int], None]:
    """``change(module, is_late)`` of each module that has an attribute of this name."""

    def between(model: Model, number: int) -> None:
        if number in (0, LATE):
            for module in list(model.modules()):
                if hasattr(module, name):
                    change(module, number >= LATE)

    return between


def kernels_of_a_library(module: Any, is_late: bool) -> None:
    """Forwards that are set on modules, as Liger does."""

    def forward(self: Any, given: torch.Tensor) -> Any:
        return type(self).forward(self, given) * (0.75 if is_late else 1.25)

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    module.forward = MethodType(forward, module)


CHANGES: dict[str, Callable[[Model, int], None]] = {
    # A module in the place of another, neither of which has attributes that could differ.
    "another activation": of_each(
        "act_fn",
        lambda module, is_late: setattr(
            module, "act_fn", torch.nn.Sigmoid() if is_late else torch.nn.Tanh()
        ),
    ),
    "kernels of a library": of_each("variance_epsilon", kernels_of_a_library),
}


PROGRAMS: dict[str, Callable[[Model], Facts]] = {
    "nothing": train,
    **{name: partial(train, between=change) for name, change in CHANGES.items()},
}


@cache
def resident(which: str) -> Facts:
    model = few(lora_dropout=0.1)
    return PROGRAMS[which](model)


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [KEPT, {}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("which", PROGRAMS)
def test_a_program(which: str, policy: dict[str, Any]) -> None:
    model, captures, _ = recorded(few(lora_dropout=0.1), **policy)
    assert same(PROGRAMS[which](model), resident(which))
    stats = poros.runtime(model).stats()
    assert captures.num_replays == stats["num_replayed_visits"] > 0
    assert stats["num_eager_visits"] == sum(captures.eager.values())
    if which in CHANGES:  # a control
        assert not same(resident(which), resident("nothing"))


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}


ENDS: dict[str, str | None] = {
    **dict.fromkeys(["qwen2", "llama", "mistral", "qwen3", "phi3", "gemma3"]),
    "gemma4": LEAVES if leaves_keys_always() else None,
    **dict.fromkeys(["mixtral", "qwen3_moe"], "hooks"),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("architecture", ENDS)
def test_promised_architectures(architecture: str, policy: dict[str, Any]) -> None:
    """Layers whose routers are recorded by hooks run as always."""
    reason = ENDS[architecture]
    options = {} if architecture == "qwen3_moe" else {"lora_dropout": 0.1}
    run = partial(train, num_steps=5)
    captures = as_resident(partial(few, architecture, quantize=True, **options), run, **policy)
    assert (captures.num_replays > 0) == (reason is None)
    assert reason is None or reason in captures.eager


@pytest.mark.parametrize("policy", [{}, KEPT])
def test_an_input_that_no_norm_has_seen_is_cast_for_each_module(policy: dict[str, Any]) -> None:
    """OLMo 2 has norms behind its modules alone. Of a leaf, autocast keeps one cast for all."""
    make = partial(adapted, "olmo2", lora_dropout=0.1)
    run = partial(train, num_steps=5, around=bf16)
    expected = run(make())
    model, captures, _ = recorded(make(), **policy)
    assert same(run(model), expected)
    assert captures.num_replays > 0 and set(captures.eager) <= {NEW}
    assert same(run(streamed(make(), **{"slots": 2, **policy})), expected)


def test_what_a_backward_has_never_shown_whole_is_not_recorded_until_one_has() -> None:
    model, captures, _ = recorded(few())
    for _ in range(30):
        torch.autograd.grad(loss_of(model), trained(model))
    assert captures.num_recorded == 0 and captures.num_replays == 0
    # Seldom looked at by then, but not never.
    for _ in range(8):
        loss_of(model).backward()
    assert captures.num_replays > 0


def test_restoring_ends_it() -> None:
    model, *_ = recorded(few(lora_dropout=0.1))
    train(model)
    poros.restore(model)
    for each, again in zip(trained(model), trained(few(lora_dropout=0.1)), strict=True):
        each.data = again.data
    assert same(train(model), resident("nothing"))


# What visits leave behind.


def test_replayed_visits_load_no_more_than_eager_ones() -> None:
    model, captures, _ = recorded(build("qwen2", num_layers=4).train(), slots=2, self_check="off")
    loads = []
    for _ in range(6):
        loss_of(model).backward()
        loads.append(poros.runtime(model).stats()["num_loads"])
    # The first step has loaded ahead, 2K - S; a warm one loads 2 (K - S).
    assert captures.num_replays > 0 and loads == [6 + 4 * number for number in range(6)]


def test_gradients_of_adapters_keep_no_memory_of_others() -> None:
    """Of the gradient of a layer's input, which a replay gives as well."""
    model, captures, _ = recorded(few(dtype=torch.float32), self_check="off")
    for _ in range(6):
        model.zero_grad()
        loss_of(model, 100).backward()
    memory = [each.grad.untyped_storage() for each in trained(model)]
    num_bytes = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
    assert captures.num_replays > 0 and num_bytes == sum(each.nbytes for each in trained(model))


# Recordings that are wrong.


@pytest.mark.cover("values")
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", ["mm", "bernoulli"])
def test_a_recording_that_gives_other_bits_is_never_used(
    operator: str, which: int, monkeypatch: Patch
) -> None:
    """One that leaves out an operator, a random one too."""
    model, captures, recorder = recorded(few(lora_dropout=0.1))

    def fault(recorder: TapeRecorder, steps: list[Any]) -> None:
        found = [place for place, (func, *_) in enumerate(steps) if operator in str(func)]
        if recorder.num_recorded % 2 == 1 - which:
            del steps[found[0]]

    spoil(monkeypatch, fault)
    assert same(train(model), resident("nothing"))
    # A forward is replayed as soon as its own recording is proved.
    assert (captures.num_replays > 0) == (which == 1) and recorder.num_replays > 0
    assert any("other bits" in reason for reason in captures.eager)


def without_a_product(steps: list[Any]) -> None:
    del steps[next(place for place, (func, *_) in enumerate(steps) if "mm" in str(func))]


def with_a_draw_more(steps: list[Any]) -> None:
    """Into the mask of a dropout that was applied by then."""
    steps.append(next(step for step in reversed(steps) if "bernoulli_" in str(step[0])))


@pytest.mark.cover("values")
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("fault", "found"), [(without_a_product, "result 0"), (with_a_draw_more, "random numbers")]
)
def test_under_strict_a_recording_with_other_bits_is_an_error(
    fault: Callable[[list[Any]], None], found: str, around: Any, monkeypatch: Patch
) -> None:
    def forwards(model: Model) -> None:
        for number in range(6):  # another row each: memory holds results of the one before
            with around():
                loss = loss_of(model, shift=number)
            if loss.requires_grad:
                loss.backward()

    spoil(monkeypatch, lambda _, steps: fault(steps))
    model, *_ = recorded(few(lora_dropout=0.1), cuda_graphs=True)
    with pytest.raises(ParityError, match=rf"expected a recorded visit .* found others: {found}"):
        forwards(model)
    model, captures, _ = recorded(few(lora_dropout=0.1), cuda_graphs=True, self_check="warn")
    forwards(model)
    assert captures.num_replays == 0


@pytest.mark.parametrize("way", ["recomputed", "kept", "together"])
def test_attention_that_does_not_repeat_itself_is_proved_with_one_that_does(
    way: str, monkeypatch: Patch
) -> None:
    """Together, several backwards of a layer come before what proves the first can be recorded."""
    make_unsteady(monkeypatch)
    model = few(lora_dropout=0.1)
    _, captures, recorder = recorded(model, self_check="off", **(KEPT if way == "kept" else {}))
    for _ in range(8):
        if way == "together":
            poros.accumulate(model, [batch() for _ in range(3)])
        else:
            loss_of(model).backward()
    assert not any("other bits" in reason for reason in captures.eager)
    assert captures.num_replays >= 2 * 2 * 2
    # Of each of two layers: a forward, a backward, and the steady one that proves it.
    assert recorder.num_recorded == 2 * 3


def test_control_a_recording_that_is_wrong_is_found_with_steady_attention_too(
    monkeypatch: Patch,
) -> None:
    make_unsteady(monkeypatch)
    model, captures, _ = recorded(few(lora_dropout=0.1), self_check="off")

    def fault(recorder: TapeRecorder, steps: list[Any]) -> None:
        places = [place for place, (func, *_) in enumerate(steps) if "bernoulli" in str(func)]
        if torch.are_deterministic_algorithms_enabled() or recorder.num_recorded > 4:
            del steps[places[-1]]

    spoil(monkeypatch, fault)
    train(model, 8)
    assert any("other bits" in reason for reason in captures.eager)


def test_the_bytes_of_a_kept_layer_are_checked_before_any_visit_is_replayed() -> None:
    model, *_ = recorded(few(), **KEPT)
    poros.runtime(model).host_slab(1)[0] ^= 1
    with pytest.raises(ParityError):
        train(model, 3)


# When.


def test_the_first_step_is_recorded_behind_the_micro_batch_that_is_checked() -> None:
    model, captures, recorder = recorded(few(), self_check="strict")
    poros.accumulate(model, [batch() for _ in range(5)])
    assert poros.runtime(model).self_check["status"] == "passed"
    assert recorder.num_recorded == 2 * 2
    # Of four, a forward and a backward run beside what is compared with it.
    assert captures.num_replays == 2 * (3 + 2)


def test_many_tokens_are_not_recorded_unless_that_is_asked_for(monkeypatch: Patch) -> None:
    """The device is busy with them for longer than the host."""
    expected = train(few(), 6, 2)
    monkeypatch.setattr(chosen, "_most_parameters", lambda blocks: 10)
    # Of two rows of 12 and of 20 tokens the first may be recorded.
    monkeypatch.setattr(chosen, "MOST_FLOP", 2 * 10 * 30)
    model, captures, recorder = recorded(few())
    assert same(train(model, 6, 2), expected)
    assert captures.num_replays > 0 and recorder.num_recorded == 2 * 2
    assert any("so many tokens" in reason for reason in captures.eager)
    model, captures, recorder = recorded(few(), cuda_graphs=True)
    train(model, 6, 2)
    assert recorder.num_recorded == 2 * 2 * 2


def test_nothing_is_recorded_within_a_backward() -> None:
    """Under a checkpoint around all of the model its forward runs once more in the backward."""
    model, _, recorder = recorded(few(), self_check="off")
    begin, places = recorder.record, []

    def record(run: Callable[[], None], is_held: bool = False) -> Any:
        places.append(torch._C._current_graph_task_id())
        return begin(run, is_held)

    recorder.record = record  # type: ignore[method-assign]
    embedded = torch.randn(1, 12, 64, dtype=torch.bfloat16, requires_grad=True)

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=hidden, use_cache=False).logits.float().sum()

    for _ in range(6):
        checkpoint(loss, embedded, use_reentrant=True).backward()
    assert set(places) <= {-1} and recorder.num_recorded > 0


def test_an_input_waits_on_the_host_once_where_nothing_is_replayed(monkeypatch: Patch) -> None:
    model, *_ = recorded(few(), self_check="off", offload_boundaries=True)
    offloaded = noted(monkeypatch, ActivationOffloader, "offload")
    for layer in model.base_model.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, result: None)
    loss_of(model).backward()
    assert [index for *_, index in offloaded] == [0, 1]


# What makes way. There are four places for forms of a layer, of which there are two here.


def visit(model: Model, *lengths: int, num_times: int = 1) -> None:
    for length in lengths:
        for _ in range(num_times):
            loss_of(model, length).backward()


def test_recordings_that_do_not_pay_make_the_next_ones_rarer() -> None:
    """Lengths that come twice, and not again."""
    model, captures, recorder = recorded(few(), self_check="off")
    visit(model, *range(8, 20), num_times=2)
    # As many forms as there are places, and two that others made way for.
    assert recorder.num_recorded == 2 * 2 * (4 + 2)
    assert captures.num_replays == 0
    visit(model, 19, num_times=8)  # what comes often is recorded all the same
    assert captures.num_replays > 0


def test_lengths_that_alternate_do_not_drive_each_other_out(monkeypatch: Patch) -> None:
    """One length more than there are places: that one runs as always, and nothing anew.

    On a GPU the host waits for the device as memory is given back: only when something is recorded.
    """
    model, captures, recorder = recorded(few(), self_check="off")
    given_back, after = list[int](), list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(captures.num_recorded))
    for _ in range(8):
        visit(model, *range(8, 13))
        after.append(recorder.num_recorded)
    assert after[-1] == after[-3] == 2 * 2 * 4
    assert captures.num_replays > 0
    assert 0 < len(given_back) == len(set(given_back)) <= 2 * 4


def test_a_length_that_does_not_come_back_makes_way() -> None:
    model, captures, _ = recorded(few(), self_check="off")
    visit(model, *range(8, 14), num_times=8)
    for forms in captures._forms.values():
        assert sum(form.forward is not None for form in forms.values()) == 4
    assert captures.num_replays >= 6 * 4 * 2 * 2


def test_a_rare_length_among_micro_batches_is_not_recorded() -> None:
    """A group's own length is, after one; another, which takes memory beside it, after four."""
    model, _, recorder = recorded(few(), self_check="off")

    def train_group(*lengths: int) -> int:
        rows = [torch.arange(length)[None] for length in lengths]
        poros.accumulate(model, [{"input_ids": row, "labels": row} for row in rows])
        return recorder.num_recorded

    usual = [train_group(8, 8, 8, 8) for _ in range(4)][-1]
    assert usual > 0
    assert [train_group(8, 8, 8, 5) for _ in range(3)][-1] == usual
    assert [train_group(8, 8, 8, 5) for _ in range(4)][-1] > usual


def test_kept_layers_replay_a_second_length_as_recomputed_ones() -> None:
    model, captures, _ = recorded(few(), self_check="off", **KEPT)
    eager: list[int] = []
    for _ in range(10):
        visit(model, 8, 9)
        eager.append(captures.eager[NEW])
    assert captures.num_recorded == 2 * 2, "of each layer both lengths"
    assert eager[-1] == eager[-3], "neither runs any more"


@pytest.mark.parametrize("keep_last", [0, 2])
def test_what_is_known_of_calls_stays_known_in_other_rooms(
    keep_last: int, monkeypatch: Patch
) -> None:
    """No layer keeps a graph beside its recording: both of all layers may be above a budget."""
    model, captures, recorder = recorded(few(lora_dropout=0.1), self_check="off")
    eager: list[int] = []

    @in_place_of(StreamedLayer, "_run")
    def refuse_to_keep(genuine: Any, self: StreamedLayer, phase: Phase, *given: Any) -> Any:
        assert phase is not Phase.FORWARD, "a graph is kept"
        return genuine(self, phase, *given)

    def change(model: Any, number: int) -> None:
        eager.append(captures.eager[NEW])
        if number in (5, 9):
            assert recorder.num_recorded == 2 * 2 * (1 if number == 5 else 2)
            room = ResidencyPlan(3, keep_last) if number == 5 else ResidencyPlan(2, 0)
            poros.runtime(model).resize(room)
            refuse_to_keep(monkeypatch)

    expected = train(few(lora_dropout=0.1), 14)
    assert same(train(model, 14, between=change), expected)
    assert recorder.num_recorded == 2 * 2 * 3, "each once more, at once"
    # One of each runs beside what is compared with it; none is there to be learnt from.
    assert eager[5] == eager[4] and eager[9] == eager[5] + 2 * 2 == eager[-1] - 2 * 2


def test_what_is_recorded_of_deleted_adapters_goes() -> None:
    model, _, recorder = recorded(few(), slots=2, self_check="off")
    alive = []
    for number in range(4):
        name = f"number{number}"
        model.add_adapter(name, LoraConfig(r=2, target_modules=["q_proj"]))
        model.set_adapter(name)
        for _ in range(4):
            loss_of(model).backward()
        model.set_adapter("default")
        model.delete_adapter(name)
        loss_of(model).backward()
        gc.collect()
        alive.append(len(recorder.tapes))
    assert recorder.num_recorded > 4 and alive[1:] == alive[:1] * 3


def test_a_graph_that_is_held_does_not_keep_others_from_being_recorded() -> None:
    model, _, recorder = recorded(few(), self_check="off")
    held = loss_of(model)
    visit(model, 12, num_times=3)
    assert recorder.num_recorded and held.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_tells_what_regular_edits_do(dtype: torch.dtype) -> None:
    """Signs, a single bit, neighbours exchanged, rows in another order."""
    values = (torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    other = torch.ones(3, dtype=torch.bfloat16)
    flipped, swapped = values.clone(), values.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    swapped[0, :2] = values[0, :2].flip(0)
    edited = [-values, values.flip(0), flipped, swapped, values * 2]
    found = {int(checksum([each, other])) for each in (values, *edited)}
    assert len(found) == 1 + len(edited)
    assert int(checksum([values.clone(), other])) in found


# Controls.


def test_control_gradients_that_are_not_copied_out_are_overwritten(monkeypatch: Patch) -> None:
    """Autograd keeps what it is handed as ``.grad``, and the next visit writes there."""
    model, captures, _ = recorded(few(lora_dropout=0.1))
    monkeypatch.setattr(Fixed, "copies", lambda self: self.tensors)
    assert not same(train(model), resident("nothing")) and captures.num_replays > 0


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_whose_graph_goes_before_that_of_a_later_one(
    is_guarded: bool, monkeypatch: Patch
) -> None:
    """Recorded first, it may compute where the later one, recorded then, has its graph."""
    if not is_guarded:
        monkeypatch.setattr(HeldGraph, "overwritten", lambda *_: [])

    def run(model: Model) -> Facts:
        cuts = False
        facts = []

        def cut(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
            return result.detach().requires_grad_() + 0 if cuts else result

        handle = model.base_model.model.model.layers[0].register_forward_hook(cut)
        for number in range(10):
            cuts = number > 5
            first = loss_of(model, shift=number)
            if number > 5:
                gc.collect()  # the first layer's call is gone, and so may its graph
                first = first + loss_of(model, shift=number + 1)
            first.backward()
            facts += [first.detach(), *gradients(model)]
            model.zero_grad(set_to_none=False)
        handle.remove()
        return facts

    expected = run(few())
    model, captures, _ = recorded(few(), **KEPT)
    is_same = same(run(model), expected)
    assert captures.num_replays > 0 and is_same == is_guarded


def test_one_graph_of_a_layer_is_kept_where_it_is_recorded(monkeypatch: Patch) -> None:
    """There is memory for one: a second loss that waits for its backward recomputes."""

    def run(model: Model) -> list[Any]:
        facts: list[Any] = []
        for _ in range(6):
            losses = [loss_of(model), loss_of(model, shift=1)]
            torch.stack(losses).sum().backward()
            facts += [*(each.detach() for each in losses), *gradients(model)]
            model.zero_grad()
        return facts

    expected = run(few())
    model, captures, _ = recorded(few(), **{**KEPT, "self_check": "off"})
    kept = noted(monkeypatch, StreamedLayer, "_run")
    assert same(run(model), expected) and captures.num_replays
    assert len(kept) == 2 * 2  # those of two layers in the first step: nothing is recorded then
