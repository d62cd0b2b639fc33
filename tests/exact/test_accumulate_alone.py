"""What cannot go together runs one after the other, to the same bits, or is refused."""

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.errors import UnsupportedModelError
from tests.exact import subjects as S
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import Batch, build, layers, num_groups, own_loss, reasons, same, train
from tests.support import prepare_plain

Model = Any


def two_forwards(model: Model, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) + own_loss(model, batch)


def hidden_states(model: Model, batch: Batch) -> torch.Tensor:
    output = model(**batch, use_cache=False, output_hidden_states=True)
    loss: torch.Tensor = output.loss + output.hidden_states[1].float().square().mean()
    return loss


def watched(model: Model, batch: Batch) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        return own_loss(model, batch)


LOSSES: dict[str, tuple[Callable[[Model, Batch], torch.Tensor], str]] = {
    "two forwards": (two_forwards, "more than once"),
    "hidden states": (hidden_states, "recorded"),
    "saved tensors that are packed": (watched, "packs saved tensors"),
}


@pytest.mark.parametrize("which", LOSSES)
def test_losses_that_run_one_after_the_other(which: str, bases: Bases) -> None:
    loss, reason = LOSSES[which]
    expected = train(build(bases), together=False, loss=loss)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, loss=loss), expected)
    (found,) = reasons(model)
    assert reason in found


def reference_before(model: Model, batch: Batch) -> torch.Tensor:
    """PEFT has all of an adapter trained behind it."""
    with torch.no_grad(), model.disable_adapter():
        expected = model(**batch, use_cache=False).logits.float()
    output = model(**batch, use_cache=False)
    loss: torch.Tensor = output.loss + (output.logits.float() - expected).square().mean()
    return loss


def reference_after(model: Model, batch: Batch) -> torch.Tensor:
    output = model(**batch, use_cache=False)
    with torch.no_grad(), model.disable_adapter():
        expected = model(**batch, use_cache=False).logits.float()
    loss: torch.Tensor = output.loss + (output.logits.float() - expected).square().mean()
    return loss


def frozen_again(model: Model, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name and "layers.1." not in name)


@pytest.mark.parametrize("between", [lambda model, step: None, frozen_again])
@pytest.mark.parametrize("loss", [reference_before, reference_after])
def test_a_reference_pass_that_trains_what_was_frozen(
    loss: Callable[[Model, Batch], torch.Tensor],
    between: Callable[[Model, int], object],
    bases: Bases,
) -> None:
    options: Any = {"loss": loss, "between": between}
    expected = train(S.partly_frozen(bases).train(), together=False, **options)
    model = prepare_plain(S.partly_frozen(bases).train(), slots=2)
    assert same(train(model, **options), expected)
    # All of the steps, or the first of them, in which something was frozen.
    is_each = between is frozen_again
    assert num_groups(model) > 0 or (is_each and loss is reference_before)
    assert any("which parameters are trained" in each for each in reasons(model)) == (
        loss is reference_before
    )


def hooked(model: Model) -> None:
    layers(model)[1].register_forward_hook(lambda module, args, output: output * 1.5)


def hooked_before(model: Model) -> None:
    layers(model)[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


def by_hand(model: Model, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """The loop over layers does something of its own."""
    stack = layers(model)
    genuine = stack.__class__.__iter__

    class Loop(torch.nn.ModuleList):
        def __getitem__(self, places: Any) -> Any:
            return [partial(called, number, each) for number, each in enumerate(genuine(stack))]

    def called(number: int, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return layer(change(number, hidden), *args, **kwargs)

    stack.__class__ = Loop


def scaled(number: int, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.5 if number == 1 else hidden


def in_place(number: int, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mul_(1.5) if number == 1 else hidden


def drawing(number: int, hidden: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return hidden


MODELS: dict[str, tuple[Callable[[Model], None], str]] = {
    "hooks on a layer": (hooked, "hooks on whole layers"),
    "hooks before a layer": (hooked_before, "hooks on whole layers"),
    "code between": (lambda model: by_hand(model, scaled), "between its layers"),
    "edits in place between": (lambda model: by_hand(model, in_place), "between its layers"),
    "draws between": (lambda model: by_hand(model, drawing), "draws random numbers between"),
}


@pytest.mark.parametrize("which", MODELS)
def test_models_that_run_one_after_the_other(which: str, bases: Bases) -> None:
    change, reason = MODELS[which]
    resident, model = build(bases), build(bases)
    change(resident)
    expected = train(resident, together=False)
    prepare_plain(model, slots=2)
    change(model)
    assert same(train(model), expected)
    (found,) = reasons(model)
    assert reason in found and num_groups(model) == 0


def test_draws_that_depend_on_data(bases: Bases) -> None:
    def routed(model: Model) -> Model:
        class Routed(type(layers(model)[0].mlp)):  # type: ignore[misc]
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = super().forward(hidden)
                torch.rand(int((hidden.float().sum() * 1e4).abs()) % 7)
                return output * torch.rand(1).to(output.dtype)

        for layer in layers(model):
            layer.mlp.__class__ = Routed
        return model

    expected = train(routed(build(bases)), together=False, lengths=(8,), sizes=(4,) * 4)
    model = prepare_plain(routed(build(bases)), slots=2)
    assert same(train(model, lengths=(8,), sizes=(4,) * 4), expected)
    (found,) = reasons(model)
    assert "does not depend on shapes" in found


def test_a_normal_number_at_a_time(bases: Bases) -> None:
    """A CPU's generator keeps the second one of a pair: no count of draws says that."""

    def noisy(model: Model) -> Model:
        class Noisy(type(layers(model)[0].mlp)):  # type: ignore[misc]
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = super().forward(hidden)
                return output * (1 + 0.01 * torch.randn(1).to(output.dtype))

        for layer in layers(model):
            layer.mlp.__class__ = Noisy
        return model

    expected = train(noisy(build(bases)), together=False)
    model = prepare_plain(noisy(build(bases)), slots=2)
    assert same(train(model), expected) and reasons(model)


def test_autocast_around_all(bases: Bases) -> None:
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    options: Any = {"dtype": torch.float32}
    expected = train(build(bases, **options), together=False, around=around, sizes=(1, 1))
    model = prepare_plain(build(bases, **options), slots=2)
    assert same(train(model, around=around, sizes=(1, 1)), expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_trained_vocabulary(is_tied: bool, bases: Bases) -> None:
    def make() -> Model:
        base = bases.base("qwen2")
        if is_tied:
            base.config.tie_word_embeddings = True
            base.tie_weights()
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).train()
        model.get_input_embeddings().weight.requires_grad_(True)
        return model

    expected = train(make(), together=False)
    model = prepare_plain(make(), slots=2)
    assert same(train(model), expected)
    assert (num_groups(model) == 3) == (not is_tied)
    reason = "a trained parameter with several places in the model"
    assert reasons(model) == ([reason] if is_tied else [])


def test_a_loss_that_does_not_call_the_model_again(bases: Bases) -> None:
    model = prepare_plain(build(bases), slots=2)
    calls = itertools.count(1)

    def once(model: Model, batch: Batch) -> torch.Tensor:
        if next(calls) > 4:
            return torch.zeros((), requires_grad=True)
        return own_loss(model, batch)

    with pytest.raises(UnsupportedModelError, match="calls the model as it did before"):
        train(model, loss=once)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 3, 5, 7])
def test_after_a_loss_that_fails_all_is_as_before(
    call: int, error: type[BaseException], bases: Bases
) -> None:
    """Calls 1 to 4 go up to the last layer, 5 to 8 to the end; they count where nobody sees it."""
    expected = train(build(bases), together=False)
    model = prepare_plain(build(bases), slots=2, self_check="off")
    seen = SimpleNamespace(calls=0)

    def failing(model: Model, batch: Batch) -> torch.Tensor:
        seen.calls += 1
        loss = own_loss(model, batch)
        if seen.calls == call:
            raise error
        return loss

    def failing_early(model: Model, batch: Batch) -> torch.Tensor:
        if seen.calls + 1 == call:
            raise error
        return failing(model, batch)

    with pytest.raises(error):
        train(model, loss=failing_early)
    model.zero_grad()
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        model.eval()(input_ids=tokens)
    model.train()
    assert same(train(model), expected)


def test_frozen_lower_layers(bases: Bases) -> None:
    make = partial(adapted, bases, lora_dropout=0.1, layers_to_transform=[1])
    expected = train(make(), together=False)
    model = prepare_plain(make(), slots=2)
    assert same(train(model), expected) and num_groups(model) == 3


def test_inputs_that_require_gradients(bases: Bases) -> None:
    def enabled(model: Model) -> Model:
        model.enable_input_require_grads()
        return model

    expected = train(enabled(build(bases)), together=False)
    model = prepare_plain(enabled(build(bases)), slots=2)
    assert same(train(model), expected) and num_groups(model) == 3


def test_within_another_module(bases: Bases) -> None:
    """A module of the user's own that holds the prepared model."""

    class Outer(torch.nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

    expected = train(build(bases), together=False)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(Outer(model)), expected) and num_groups(model) == 3


def test_without_gradients(bases: Bases) -> None:
    model = prepare_plain(build(bases), slots=2)
    tokens = torch.arange(9)[None]
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        poros.accumulate(model, [{"input_ids": tokens, "labels": tokens}] * 2)
