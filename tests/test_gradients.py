"""The autograd graph of a streamed model, as seen from outside: gradients, hooks, lifetimes."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from snapshots import (
    assert_same_run,
    assert_same_step,
    batches,
    build,
    changes,
    digest,
    layers_of,
    outcome,
    run,
    step,
)
from transformers import BartConfig, BartForCausalLM

import poros
from poros.errors import ParityError
from poros.layer.handover import Repeated

Model = Any


def test_a_second_backward_through_a_retained_graph_is_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        out = model(**batches()[0])
        out.loss.backward(retain_graph=True)
        once = outcome(model)
        out.loss.backward()
        found.append({**{f"{key}, once": each for key, each in once.items()}, **outcome(model)})
    assert changes(*found) == {}


def test_backwards_through_different_losses_are_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        out = model(**batches()[0], output_hidden_states=True)
        out.logits[:, :5].float().square().mean().backward(retain_graph=True)
        out.hidden_states[2].float().square().mean().backward(retain_graph=True)
        (out.loss + out.logits[:, 5:].float().mean()).backward()
        found.append(outcome(model))
    assert changes(*found) == {}


def test_two_forwards_then_two_backwards_are_exact() -> None:
    for order in (0, 1), (1, 0):
        found = []
        for model in (build(), poros.prepare(build())):
            torch.manual_seed(0)
            losses = [model(**batch).loss for batch in batches()]
            for index in order:
                losses[index].backward()
            found.append(outcome(model))
        assert changes(*found) == {}


def test_hooks_on_parameters_run_once() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        before: dict[str, int] = {}
        after: dict[str, int] = {}

        def double(gradient: torch.Tensor, counts: dict[str, int], name: str) -> torch.Tensor:
            counts[name] = counts.get(name, 0) + 1
            return gradient * 2

        def count(parameter: torch.Tensor, counts: dict[str, int], name: str) -> None:
            counts[name] = counts.get(name, 0) + 1

        names = []
        for name, each in model.named_parameters():
            if each.requires_grad:
                names.append(name)
                each.register_hook(lambda grad, c=before, n=name: double(grad, c, n))
                each.register_post_accumulate_grad_hook(lambda p, c=after, n=name: count(p, c, n))
        found.append(step(model))
        assert before == after == dict.fromkeys(names, 1)
    assert changes(*found) == {}
    assert changes(step(build()), found[0])


def test_hooks_on_layers_are_exact() -> None:
    def make() -> Model:
        model = build()
        layer = layers_of(model)[1]
        layer.register_forward_hook(lambda module, args, output: output * 1.5)
        layer.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5, *gin[1:]))
        return model

    assert_same_step(make)
    assert changes(step(build()), step(make()))


Losses = Callable[[Any], list[torch.Tensor]]

LOSSES: dict[str, Losses] = {
    "a middle state": lambda out: [out.hidden_states[2]],
    "the last state": lambda out: [out.hidden_states[3]],
    "the loss and the last state": lambda out: [out.loss, out.hidden_states[3]],
    "the loss and a middle state": lambda out: [out.loss, out.hidden_states[1]],
    "two middle states": lambda out: [out.hidden_states[1], out.hidden_states[2]],
    "everything": lambda out: [out.loss, *out.hidden_states],
}


def loss_on_states(model: Model, losses: Losses) -> tuple[torch.Tensor, dict[str, object]]:
    torch.manual_seed(0)
    model.train()
    out = model(**batches()[1], output_hidden_states=True)
    assert len(out.hidden_states) == 4
    states = {f"state {i}": digest(each) for i, each in enumerate(out.hidden_states)}
    total = sum((each.float().square().mean() for each in losses(out)), torch.zeros(()))
    return total, states


@pytest.mark.parametrize("which", LOSSES)
def test_losses_on_hidden_states_are_exact(which: str) -> None:
    """A state that feeds the next layer and a loss has a gradient of three terms.

    A resident run adds the loss's term, then that of the residual path, then that of the norm.
    """
    found = []
    for model in (build(), poros.prepare(build())):
        loss, states = loss_on_states(model, LOSSES[which])
        loss.backward()
        found.append({**states, **outcome(model)})
    assert changes(*found) == {}


def in_one_sum(terms: list[Any]) -> list[Any]:
    first, *others = terms
    return [sum(others, first), *[None] * len(others)]


def test_control_the_terms_of_an_input_in_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Repeated.take
    monkeypatch.setattr(Repeated, "take", lambda self: in_one_sum(genuine(self)))
    found = []
    for model in (build(), poros.prepare(build(), self_check="off")):
        loss, _ = loss_on_states(model, LOSSES["everything"])
        loss.backward()
        found.append(outcome(model))
    assert changes(*found)
    assert_same_run(run(build()), run(poros.prepare(build())))  # a loss on the outputs hides it


class Decoder(NamedTuple):
    """A decoder whose layers all read the states of an encoder, through two projections each."""

    model: Model
    states: torch.Tensor

    @classmethod
    def make(cls) -> "Decoder":
        torch.manual_seed(0)
        config = BartConfig(
            vocab_size=64,
            d_model=32,
            decoder_layers=3,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            is_decoder=True,
            add_cross_attention=True,
        )
        lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(BartForCausalLM(config), lora)
        return cls(model, torch.randn(1, 5, 32).requires_grad_())

    def step(self) -> dict[str, object]:
        torch.manual_seed(1)
        self.model.train()
        ids = torch.arange(8)[None]
        out = self.model(input_ids=ids, labels=ids, encoder_hidden_states=self.states)
        out.loss.backward()
        assert self.states.grad is not None and self.states.grad.any()
        return {"states": digest(self.states.grad), **outcome(self.model)}


def test_states_that_all_layers_read_get_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Decoder.make().step()

    def found(self_check: str) -> dict[str, object]:
        decoder = Decoder.make()
        poros.prepare(decoder.model, allow_unvalidated=True, self_check=self_check)
        return decoder.step()

    assert changes(expected, found("strict")) == {}
    genuine = Repeated.take
    monkeypatch.setattr(Repeated, "take", lambda self: in_one_sum(genuine(self)))
    assert changes(expected, found("off"))


def test_a_lost_term_is_found_by_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Repeated.watch

    def watch(self: Repeated, *args: Any) -> None:
        genuine(self, *args)
        self.terms = [None, *self.terms[1:]]

    monkeypatch.setattr(Repeated, "watch", watch)
    model = poros.prepare(build())
    with pytest.raises(ParityError, match="gradient of input"):
        run(model)


def test_gradients_of_given_embeddings_are_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        embeddings = model.get_input_embeddings()(batches()[0]["input_ids"]).detach()
        embeddings.requires_grad_()
        model(inputs_embeds=embeddings, labels=batches()[0]["labels"]).loss.backward()
        assert embeddings.grad is not None and embeddings.grad.any()
        found.append({"embeddings": digest(embeddings.grad), **outcome(model)})
    assert changes(*found) == {}


def test_gradients_without_any_trainable_adapter_are_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        model.eval().requires_grad_(False)
        embeddings = model.get_input_embeddings()(batches()[0]["input_ids"]).requires_grad_()
        model(inputs_embeds=embeddings, labels=batches()[0]["labels"]).loss.backward()
        assert embeddings.grad is not None and embeddings.grad.any()
        found.append({"embeddings": digest(embeddings.grad)})
    assert changes(*found) == {}


def test_gradients_of_some_parameters_are_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        loss = model(**batches()[0]).loss
        wanted = {n: p for n, p in model.named_parameters() if "layers.1.mlp" in n and "lora" in n}
        gradients = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True)
        loss.backward(inputs=[next(iter(wanted.values()))])
        assert sum(p.grad is not None for p in model.parameters()) == 1
        by_name = {f"{n} alone": digest(g) for n, g in zip(wanted, gradients, strict=True)}
        found.append({**by_name, **outcome(model)})
    assert changes(*found) == {}


def test_saved_tensor_hooks_are_exact() -> None:
    def copies() -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)

    assert_same_step(around_forward=copies)


def test_backward_works_after_the_model_was_deleted() -> None:
    found = []
    for model in (build(dropout=0.0), poros.prepare(build(dropout=0.0))):
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        loss = model(**batches()[0]).loss
        del model
        gc.collect()
        loss.backward()
        found.append({name: digest(each.grad) for name, each in parameters.items()})
    assert changes(*found) == {}


def inputs_of_layers(model: Model) -> tuple[torch.Tensor, list["weakref.ref[torch.Tensor]"]]:
    """A loss, and what the layers were given for it."""
    seen: list[weakref.ref[torch.Tensor]] = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    return model(**batches()[0]).loss, seen


def test_a_loss_kept_after_backward_keeps_no_activations() -> None:
    """Many loops hold on to the last loss while the next forward runs."""
    for model in (build(), poros.prepare(build())):
        loss, seen = inputs_of_layers(model)
        assert len(seen) == 3
        loss.backward()
        gc.collect()
        assert [each() for each in seen if each() is not None] == []


def test_a_loss_without_backward_is_dropped_with_its_graph() -> None:
    loss, seen = inputs_of_layers(poros.prepare(build()))
    assert all(each() is not None for each in seen)
    gc.disable()
    try:
        del loss
        # Reference counts alone free it: waiting for the collector would cost device memory.
        assert [each() for each in seen if each() is not None] == []
    finally:
        gc.enable()


def test_a_layer_called_outside_of_the_model_is_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        seen: dict[str, Any] = {}
        handle = layers_of(model)[1].register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.update(kwargs, hidden=args[0]),
            with_kwargs=True,
        )
        torch.manual_seed(0)
        model(**batches()[1])
        handle.remove()
        hidden = seen.pop("hidden").detach().requires_grad_()
        seen["past_key_values"] = None
        torch.manual_seed(0)
        layers_of(model)[1](hidden, **seen).float().square().mean().backward()
        found.append({"input": digest(hidden.grad), **outcome(model)})
    assert changes(*found) == {}
