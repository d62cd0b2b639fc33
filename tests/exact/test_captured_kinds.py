"""Recorded visits of layers that keep their graph, without gradients, of unsteady attention.

Replayed by a stand-in that sees nothing of Python.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.errors import ParityError
from poros.replay.forms import HeldGraphs
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.recorded import KEPT, autocast, recorded, train, trained
from tests.support import same_bits
from tools.tape import TapeRecorder

Model = Any


def loss_of(model: Model, shift: int = 0) -> torch.Tensor:
    tokens = torch.arange(12)[None] + shift
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def gradients(model: Model) -> list[Any]:
    return [each.grad.clone() for each in trained(model)]


def inside_and_outside(around: Callable[[], Any], model: Model) -> list[Any]:
    """What a backward runs under is its own: each is recorded, and no other is replayed."""
    facts = []
    for number in range(12):
        with around():
            loss = loss_of(model, number)
            if number % 2:
                loss.backward()
        if not number % 2:
            loss.backward()
        facts += [loss.detach(), *gradients(model)]
    return facts


def region_of_its_own(model: Model) -> list[Any]:
    """As Accelerate has it."""
    model.forward = autocast()(model.forward)
    return train(model, 8, 2)


def two_losses(model: Model, number_of_forwards: int = 2) -> list[Any]:
    """Forwards whose backwards come later, in the order of the forwards and in reverse."""
    facts = []
    for number in range(8):
        parts = range(number_of_forwards if number % 3 else 1)
        losses = [loss_of(model, part) for part in parts]
        for loss in losses if number % 2 else losses[::-1]:
            loss.backward()
        facts += gradients(model)
    return facts


def second_backward(model: Model) -> list[Any]:
    facts = []
    for number in range(8):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss_of(model, 1).backward()
        if number != 5:
            loss.backward()
        facts += gradients(model)
    return facts


def without_gradients(is_training: bool, model: Model) -> list[Any]:
    """As DPO's reference pass: dropout draws if the model trains."""
    model.train(is_training)
    facts = []
    for number in range(8):
        tokens = torch.arange(12)[None] + number
        with torch.no_grad(), model.disable_adapter() if number % 2 else nullcontext():
            facts.append(model(input_ids=tokens, use_cache=False).logits.clone())
        loss = loss_of(model, number)
        loss.backward()
        facts += [loss.detach(), *gradients(model)]
    return facts


def inference_between(model: Model) -> list[Any]:
    """What is recorded then could not be replayed later, so nothing is."""

    def evaluate(model: Model, number: int) -> None:
        model.eval()
        with torch.inference_mode():
            model(input_ids=torch.arange(12)[None], use_cache=False)
        model.train()

    return train(model, 9, 1, evaluate)


RUNS: dict[str, Callable[[Model], list[Any]]] = {
    "backwards inside and outside": partial(inside_and_outside, nullcontext),
    "backwards inside and outside, autocast": partial(inside_and_outside, autocast),
    "a region of the model itself": region_of_its_own,
    "two losses": two_losses,
    "a second backward": second_backward,
    "without gradients, dropout": partial(without_gradients, True),
    "without gradients": partial(without_gradients, False),
    "inference mode between": inference_between,
}


def kinds_of(captures: Any, is_replayed: bool = False) -> set[str]:
    """Of the forms of visits; or of those whose recorded forward has been proved."""
    forms = [form for of_layer in captures._forms.values() for form in of_layer.values()]
    proved = [form for form in forms if form.forward is not None and form.forward.is_proved]
    return {form.kind for form in (proved if is_replayed else forms)}


@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("which", RUNS)
def test_runs(which: str, policy: dict[str, Any], bases: Bases) -> None:
    def run(model: Model) -> list[Any]:
        torch.manual_seed(3)
        return RUNS[which](model)

    expected = run(adapted(bases, lora_dropout=0.1))
    model = adapted(bases, lora_dropout=0.1)
    captures, _ = recorded(model, **policy)
    found = run(model)
    assert len(found) == len(expected) and all(map(same_bits, found, expected))
    assert captures.num_replays > 0
    if which == "two losses":
        # The second one's graph has no place in the recording: it is recomputed.
        assert kinds_of(captures) == ({"kept", "recomputed"} if policy else {"recomputed"})
    if which.startswith("without gradients"):
        kinds = kinds_of(captures, is_replayed=True)
        assert "inference" in kinds and len(kinds) == 2


def test_control_a_kept_graph_that_is_overwritten_gives_other_gradients(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.replay.forms import Form

    expected = two_losses(adapted(bases))
    model = adapted(bases)
    recorded(model, **KEPT)
    two_losses(model, 1)
    for each in trained(model):
        each.grad = None

    class Unseen:
        """A form whose graph in flight nobody sees."""

        def __get__(self, form: Form, kind: Any = None) -> Any:
            return lambda: None

        def __set__(self, form: Form, value: Any) -> None:
            pass

    monkeypatch.setattr(Form, "in_flight", Unseen(), raising=False)
    monkeypatch.setattr(Form, "is_there", lambda self, call: True)
    assert not all(map(same_bits, two_losses(model), expected))


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_whose_graph_goes_before_that_of_a_later_one(
    is_guarded: bool, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded first, it may compute where the later one, recorded then, has its graph."""
    if not is_guarded:
        monkeypatch.setattr(HeldGraphs, "would_lose", lambda self, form: False)

    def run(model: Model) -> list[Any]:
        cuts = False
        facts = []

        def cut(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
            return result.detach().requires_grad_() + 0 if cuts else result

        handle = model.base_model.model.model.layers[0].register_forward_hook(cut)
        for number in range(10):
            cuts = number > 5
            tokens = torch.arange(12)[None] + number
            first = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            if number > 5:
                gc.collect()  # the first layer's call is gone, and so may its graph
                first = first + model(input_ids=tokens + 1, labels=tokens, use_cache=False).loss
            first.backward()
            facts += [first.detach(), *(each.grad.clone() for each in trained(model))]
            model.zero_grad(set_to_none=False)
        handle.remove()
        return facts

    expected = run(adapted(bases))
    model = adapted(bases)
    captures, _ = recorded(model, **KEPT)
    is_same = all(map(same_bits, run(model), expected))
    assert captures.num_replays > 0 and is_same == is_guarded


def test_evaluation_alone_is_recorded_too(bases: Bases) -> None:
    model = adapted(bases)
    captures, recorder = recorded(model, self_check="off")
    expected = None
    for _ in range(5):
        with torch.no_grad():
            logits = model(input_ids=torch.arange(12)[None], use_cache=False).logits
        expected = logits if expected is None else expected
        assert same_bits(logits, expected)
    assert captures.num_replays == 2 * 2 and recorder.num_recorded == 2


def test_decoding_with_a_cache_runs_as_always(bases: Bases) -> None:
    model = adapted(bases).eval()
    prompt = torch.arange(5)[None] + 3
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    captures, _ = recorded(model, self_check="off")
    assert same_bits(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert captures.num_replays == 0


def unsteady_attention(monkeypatch: pytest.MonkeyPatch, spoiled: bool = False) -> None:
    """Attention that is taken for one that does not repeat itself, and does not."""
    from poros.stream import attention

    genuine = torch.nn.functional.scaled_dot_product_attention
    noise = [0]

    class Unsteady(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
            return result.view_as(result)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if torch.are_deterministic_algorithms_enabled():
                return gradient
            noise[0] += 1
            return gradient * (1 + 0.01 * noise[0])

    def steadily(func: Any, args: Any, kwargs: Any) -> Any:
        result = Unsteady.apply(genuine(*args, **kwargs))
        node = result.grad_fn
        if node is not None:
            held: list[Any] = []
            node.register_prehook(lambda _: attention._enter(held))
            node.register_hook(lambda *_: attention._leave(held))
        return result

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        for mode in torch.overrides._get_current_function_mode_stack():
            if isinstance(mode, attention.AttentionKernels):
                mode.may_vary = True
                if mode._is_deterministic:
                    return steadily(None, args, kwargs)
        return Unsteady.apply(genuine(*args, **kwargs))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


def test_attention_that_does_not_repeat_itself_is_proved_with_one_that_does(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsteady_attention(monkeypatch)
    for policy in ({}, KEPT):
        model = adapted(bases, lora_dropout=0.1)
        captures, recorder = recorded(model, self_check="off", **policy)
        train(model, 8, 1)
        assert not any("other bits" in reason for reason in captures.eager)
        assert captures.num_replays >= 2 * 2 * 2
        # Of each of two layers: a forward, a backward, and the steady one that proves it.
        assert recorder.num_recorded == 2 * 3


def test_control_a_recording_that_is_wrong_is_found_with_steady_attention_too(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsteady_attention(monkeypatch)
    model = adapted(bases, lora_dropout=0.1)
    captures, _ = recorded(model, self_check="off")
    genuine = TapeRecorder.record

    def record(self: TapeRecorder, run: Callable[[], None], is_held: bool = False) -> Any:
        recording: Any = genuine(self, run, is_held)
        steps = recording._tape._steps
        places = [place for place, (func, *_) in enumerate(steps) if "bernoulli" in str(func)]
        if torch.are_deterministic_algorithms_enabled() or self.num_recorded > 4:
            del steps[places[-1]]
        return recording

    monkeypatch.setattr(TapeRecorder, "record", record)
    train(model, 8, 1)
    assert any("other bits" in reason for reason in captures.eager)


@pytest.mark.parametrize(("policy", "num_lengths"), [({}, 5), (KEPT, 2)], ids=["", "kept"])
def test_lengths_that_alternate_do_not_drive_each_other_out(
    policy: dict[str, Any], num_lengths: int, bases: Bases
) -> None:
    """One length more than there are places: that one runs as always, and nothing anew."""
    model = adapted(bases)
    captures, recorder = recorded(model, self_check="off", **policy)
    after: list[int] = []
    for _ in range(8):
        for length in range(8, 8 + num_lengths):
            tokens = torch.arange(length)[None]
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        after.append(recorder.num_recorded)
    assert after[-1] == after[-3] == 2 * 2 * (num_lengths - 1)
    assert captures.num_replays > 0


def test_a_length_that_does_not_come_back_makes_way(bases: Bases) -> None:
    model = adapted(bases)
    captures, _ = recorded(model, self_check="off")
    for length in range(8, 14):
        for _ in range(20):
            tokens = torch.arange(length)[None]
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for forms in captures._forms.values():
        assert sum(form.forward is not None for form in forms.values()) == 4
    assert captures.num_replays >= 6 * 16 * 2 * 2


def test_nothing_of_a_dropped_graph_is_held_for_its_form(bases: Bases) -> None:
    model = adapted(bases)
    recorded(model, offload_boundaries=True, self_check="off")
    offloader = poros.runtime(model).offloader
    for _ in range(5):
        loss = model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss
        held = offloader.num_bytes
        del loss
    assert held == offloader.num_bytes == 2 * 12 * 64 * 2  # of two layers


def test_the_bytes_of_a_kept_layer_are_checked_before_any_visit_is_replayed(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.replay.captures._LEAST_VISITS", 1)
    model = adapted(bases)
    recorded(model, **KEPT)
    poros.runtime(model).host_slab(1)[0] ^= 1
    with pytest.raises(ParityError):
        train(model, 3, 1)
