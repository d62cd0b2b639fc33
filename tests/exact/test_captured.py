"""Recorded visits, replayed by a stand-in that sees nothing of Python: bits of eager ones."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import poros
from poros.errors import ParityError, PolicyError, RematerializationError
from poros.model import recorded as chosen
from poros.replay.captures import NEW
from poros.replay.graphs import Fixed
from poros.stream.offload import ActivationOffloader
from poros.stream.rng import RngStash
from tests.exact.adapter_arms import differences, step, with_kernels
from tests.exact.arms import Bases
from tests.exact.recorded import (
    CHANGES,
    KEPT,
    autocast,
    few,
    loss_of,
    recorded,
    resident,
    spoil,
    train,
)
from tests.exact.together import same, trained
from tools.tape import TapeRecorder

Model = Any
STEPS = 6


@pytest.mark.cover("values")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("policy", [{}, {"slots": 3, "block_size": 2}], ids=str)
@pytest.mark.parametrize("around", [nullcontext, autocast], ids=["", "autocast"])
def test_replayed_visits_have_the_bits_of_eager_ones(
    around: Any, policy: dict[str, Any], options: dict[str, Any], quantize: bool, bases: Bases
) -> None:
    model = few(bases, quantize=quantize, **options)
    expected = with_kernels(model, around)
    captures, recorder = recorded(model, **policy)
    for _ in range(STEPS):
        assert differences(step(model, around), expected) == []
    # Two layers; of the steps one is checked, two are counted, one is compared.
    assert captures.num_replays >= 2 * 2
    assert recorder.num_recorded == 4
    # Of the one that is compared forward and backward count.
    assert captures.eager == {NEW: 2 * (2 + 2)}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_training_has_the_bits_of_a_resident_run(
    change: str, accumulation: int, policy: dict[str, Any], bases: Bases
) -> None:
    expected = resident(bases, change, 9, accumulation)
    model = few(bases, lora_dropout=0.1)
    captures, _ = recorded(model, **policy)
    found = train(model, 9, accumulation, CHANGES[change])
    assert same(found, expected)
    stats = poros.runtime(model).stats()
    assert captures.num_replays == stats["num_replayed_visits"] > 0
    assert stats["num_eager_visits"] == sum(captures.eager.values())
    unchanged = resident(bases, "nothing", 9, accumulation)
    assert change in ("nothing", "evaluation between") or not same(found, unchanged)


def test_replayed_visits_load_no_more_than_eager_ones(bases: Bases) -> None:
    model = bases.build("qwen2", num_layers=4).train()
    captures, _ = recorded(model, slots=2, self_check="off")
    loads = []
    for _ in range(STEPS):
        loss_of(model).backward()
        loads.append(poros.runtime(model).stats()["num_loads"])
    # The first step has loaded ahead, 2K - S; a warm one loads 2 (K - S).
    assert captures.num_replays > 0 and loads == [6 + 4 * number for number in range(STEPS)]


def test_gradients_of_adapters_keep_no_memory_of_others(bases: Bases) -> None:
    """Of the gradient of a layer's input, which a replay gives as well."""
    model = few(bases, dtype=torch.float32)
    captures, _ = recorded(model, self_check="off")
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model, 100).backward()
    memory = [each.grad.untyped_storage() for each in trained(model)]
    num_bytes = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
    assert captures.num_replays > 0 and num_bytes == sum(each.nbytes for each in trained(model))


def test_what_a_backward_has_never_shown_whole_is_not_recorded_until_one_has(bases: Bases) -> None:
    model = few(bases)
    captures, _ = recorded(model)
    for _ in range(30):
        torch.autograd.grad(loss_of(model), trained(model))
    assert captures.num_recorded == 0 and captures.num_replays == 0
    # Seldom looked at by then, but not never.
    for _ in range(8):
        loss_of(model).backward()
    assert captures.num_replays > 0


@pytest.mark.cover("values")
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("operator", ["mm", "bernoulli"])
def test_a_recording_that_gives_other_bits_is_never_used(
    operator: str, which: int, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves out an operator, a random one too."""
    model = few(bases, lora_dropout=0.1)
    expected = resident(bases, "nothing", 6, 1)
    captures, recorder = recorded(model)

    def fault(recorder: TapeRecorder, steps: list[Any]) -> None:
        found = [place for place, (func, *_) in enumerate(steps) if operator in str(func)]
        if recorder.num_recorded % 2 == 1 - which:
            del steps[found[0]]

    spoil(monkeypatch, fault)
    assert same(train(model, 6, 1), expected)
    # A forward is replayed as soon as its own recording is proved.
    assert captures.num_replays == (0, 2)[which] and recorder.num_replays > 0
    assert any("other bits" in reason for reason in captures.eager)


def test_what_the_host_waits_for_is_not_recorded(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = few(bases)
    layer = type(model.base_model.model.model.layers[0].mlp)
    genuine = layer.forward

    def forward(self: Any, given: torch.Tensor) -> Any:
        assert float(given.detach().abs().max()) >= 0
        return genuine(self, given)

    monkeypatch.setattr(layer, "forward", forward)
    expected = train(few(bases), 6, 1)
    captures, _ = recorded(model)
    assert same(train(model, 6, 1), expected)
    assert captures.num_replays == 0
    assert any(reason.startswith("cannot be recorded") for reason in captures.eager)


def test_control_gradients_that_are_not_copied_out_are_overwritten(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd keeps what it is handed as ``.grad``, and the next visit writes there."""
    expected = train(few(bases), 8, 1)
    model = few(bases)
    captures, _ = recorded(model)
    monkeypatch.setattr(Fixed, "copies", lambda self: self.tensors)
    found = train(model, 8, 1)
    assert captures.num_replays > 0 and not same(found, expected)


def test_control_a_random_state_that_is_not_replayed_differs(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not set, the recomputation would draw other masks; it is an error."""
    model = few(bases, lora_dropout=0.1)
    recorded(model)
    train(model, 6, 1)
    monkeypatch.setattr(RngStash, "restore", lambda self: None)
    with pytest.raises(RematerializationError, match="other random numbers"):
        train(model, 2, 1)


def test_restoring_ends_it(bases: Bases) -> None:
    model = few(bases, lora_dropout=0.1)
    recorded(model)
    expected = resident(bases, "nothing", 6, 1)
    train(model, 6, 1)
    poros.restore(model)
    again = few(bases, lora_dropout=0.1)
    for name, each in again.named_parameters():
        if each.requires_grad:
            model.get_parameter(name).data = each.data.clone()
    assert same(train(model, 6, 1), expected)


def test_graphs_on_a_cpu_are_an_error(bases: Bases) -> None:
    model = few(bases)
    with pytest.raises(PolicyError, match="cuda_graphs: expected a GPU"):
        poros.prepare(model, cuda_graphs=True, device="cpu")
    assert step(model).facts


def test_many_tokens_are_not_recorded_unless_that_is_asked_for(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is busy with them for longer than the host."""
    expected = train(few(bases), 6, 2)
    model = few(bases)
    layer = model.base_model.model.model.layers[0]
    matrices = [each.numel() for each in layer.parameters() if each.dim() > 1]
    assert matrices
    monkeypatch.setattr(chosen, "_most_parameters", lambda blocks: 10)
    # Of two rows of 12 and of 20 tokens the first may be recorded.
    monkeypatch.setattr(chosen, "MOST_FLOP", 2 * 10 * 30)
    captures, recorder = recorded(model)
    assert same(train(model, 6, 2), expected)
    assert captures.num_replays > 0 and recorder.num_recorded == 2 * 2
    assert any("so many tokens" in reason for reason in captures.eager)
    model = few(bases)
    captures, recorder = recorded(model, cuda_graphs=True)
    train(model, 6, 2)
    assert recorder.num_recorded == 2 * 2 * 2


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
    fault: Callable[[list[Any]], None],
    found: str,
    around: Any,
    bases: Bases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forwards(model: Model) -> None:
        for number in range(6):  # another row each: memory holds results of the one before
            with around():
                loss = loss_of(model, shift=number)
            if loss.requires_grad:
                loss.backward()

    spoil(monkeypatch, lambda _, steps: fault(steps))
    model = few(bases, lora_dropout=0.1)
    recorded(model, cuda_graphs=True)
    with pytest.raises(ParityError, match=rf"expected a recorded visit .* found others: {found}"):
        forwards(model)
    model = few(bases, lora_dropout=0.1)
    captures, _ = recorded(model, cuda_graphs=True, self_check="warn")
    forwards(model)
    assert captures.num_replays == 0


def test_recordings_that_do_not_pay_make_the_next_ones_rarer(bases: Bases) -> None:
    """Lengths that come twice, and not again."""
    model = few(bases)
    captures, recorder = recorded(model, self_check="off")
    for length in range(8, 20):
        for _ in range(2):
            loss_of(model, length).backward()
    # Of two layers: as many forms as there are places, and one that another made way for.
    assert recorder.num_recorded == 2 * 2 * (4 + 1)
    assert captures.num_replays == 0
    for _ in range(8):  # what comes often is recorded all the same
        loss_of(model, length).backward()
    assert captures.num_replays > 0


def test_memory_is_given_back_only_when_something_is_recorded(bases: Bases) -> None:
    """On a GPU the host waits for the device then."""
    model = few(bases)
    captures, recorder = recorded(model, self_check="off")
    calls: list[int] = []
    recorder.give_back = lambda: calls.append(captures.num_recorded)  # type: ignore[method-assign]
    for _ in range(6):
        for length in range(8, 13):  # one more than there are places for
            loss_of(model, length).backward()
    assert captures.num_replays > 0
    assert 0 < len(calls) == len(set(calls)) <= 2 * 4


def test_nothing_is_recorded_within_a_backward(bases: Bases) -> None:
    """Under a checkpoint around all of the model its forward runs once more in the backward."""
    model = few(bases)
    _, recorder = recorded(model, self_check="off")
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


def test_an_input_waits_on_the_host_once_where_nothing_is_replayed(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = few(bases)
    recorded(model, self_check="off", offload_boundaries=True)
    genuine, indices = ActivationOffloader.offload, list[int]()

    def offload(self: Any, tensor: torch.Tensor, name: str, index: int) -> Any:
        indices.append(index)
        return genuine(self, tensor, name, index)

    monkeypatch.setattr(ActivationOffloader, "offload", offload)
    for layer in model.base_model.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, result: None)
    loss_of(model).backward()
    assert indices == [0, 1]
