"""What a recomputed layer cannot give exactly is refused, never trained on.

A test first shows that the plain model accepts the construct, so that the refusal says something.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.errors import PreparedModelError, RematerializationError, UnsupportedModelError
from poros.gates import tiny
from tests.support import same_bits


def build(**options: Any) -> Any:
    options = {"num_layers": 3, "hidden_size": 64, "dropout": 0.0, **options}
    return tiny.make_model("qwen2", **options)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return tiny.make_batches(1, num_tokens=8, seed=seed)[0]


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def step(model: Any, **extra: Any) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    model(**batch(), **extra).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_healthy(model: Any) -> None:
    """A prepared model still trains exactly."""
    expected, found = step(build()), step(model)
    assert expected.keys() == found.keys()
    assert all(same_bits(expected[name], found[name]) for name in expected)


def test_a_hook_that_vanishes_before_backward() -> None:
    def run(model: Any) -> None:
        handle = layers_of(model)[1].self_attn.q_proj.register_forward_hook(
            lambda module, args, output: output * 2
        )
        loss = model(**batch()).loss
        handle.remove()
        loss.backward()

    run(build())
    model = poros.prepare(build())
    with pytest.raises(RematerializationError, match=r"layers\.1: .*hooks"):
        run(model)
    assert_healthy(model)


def test_a_trainable_tensor_from_outside_of_the_layer() -> None:
    scale = nn.Parameter(torch.ones(()))

    def run(model: Any) -> None:
        handle = layers_of(model)[1].mlp.register_forward_hook(
            lambda module, args, output: output * scale
        )
        try:
            model(**batch()).loss.backward()
        finally:
            handle.remove()

    run(build())
    assert scale.grad is not None
    model = poros.prepare(build())
    with pytest.raises(UnsupportedModelError, match=r"layers\.1: .*elsewhere"):
        run(model)
    assert_healthy(model)


def test_a_loss_on_an_activation_from_inside_a_layer() -> None:
    def run(model: Any) -> None:
        inner: list[torch.Tensor] = []
        handle = layers_of(model)[1].mlp.register_forward_hook(
            lambda module, args, output: inner.append(output)
        )
        try:
            loss = model(**batch()).loss
            (loss + inner[0].square().mean()).backward()
        finally:
            handle.remove()

    run(build())
    model = poros.prepare(build())
    with pytest.raises(PreparedModelError, match="inside the layer"):
        run(model)
    assert_healthy(model)


@pytest.mark.parametrize("where", ["hidden_states", "inputs_embeds"])
def test_a_second_use_of_a_layers_input_is_exact(where: str) -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        embeddings = None
        if where == "hidden_states":
            outputs = model(**batch(), output_hidden_states=True)
            penalty = outputs.hidden_states[1].square().mean()
        else:
            data = batch()
            embeddings = model.get_input_embeddings()(data.pop("input_ids")).detach()
            embeddings.requires_grad_()
            outputs = model(**data, inputs_embeds=embeddings)
            penalty = embeddings.square().mean()
        (outputs.loss + penalty).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if embeddings is not None:
            found["embeddings"] = embeddings.grad
        return found

    expected, found = run(build()), run(poros.prepare(build()))
    assert expected.keys() == found.keys()
    assert all(same_bits(each, found[name]) for name, each in expected.items())


def test_hidden_states_without_a_loss_on_them_are_exact() -> None:
    expected = step(build(), output_hidden_states=True)
    found = step(poros.prepare(build()), output_hidden_states=True)
    assert all(same_bits(expected[name], found[name]) for name in expected)


def test_decoding_with_the_cache_of_a_forward_with_gradients() -> None:
    data = batch()

    def run(model: Any) -> torch.Tensor:
        cache = model(**data, use_cache=True).past_key_values
        with torch.no_grad():
            token = data["input_ids"][:, -1:]
            return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    run(build())
    model = poros.prepare(build())
    with pytest.raises(UnsupportedModelError, match="KV cache"):
        run(model)
    assert_healthy(model)


def autocast_step(model: Any, *, shared_region: bool, backward_between: bool = False) -> None:
    model.train()
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    losses = []
    if shared_region:
        with region:
            for seed in (0, 1):
                losses.append(model(**batch(seed)).loss)
                if backward_between:
                    losses.pop().backward()
    else:
        for seed in (0, 1):
            with region:
                losses.append(model(**batch(seed)).loss)
    if losses:
        sum(losses).backward()


def test_two_forwards_in_one_autocast_region() -> None:
    autocast_step(build(dtype=torch.float32), shared_region=True)
    model = poros.prepare(build(dtype=torch.float32))
    with pytest.raises(UnsupportedModelError, match="autocast region"):
        autocast_step(model, shared_region=True)


@pytest.mark.parametrize(
    "how", [{"shared_region": False}, {"shared_region": True, "backward_between": True}]
)
def test_two_forwards_under_autocast_that_are_exact(how: dict[str, bool]) -> None:
    resident, streamed = build(dtype=torch.float32), poros.prepare(build(dtype=torch.float32))
    for model in (resident, streamed):
        autocast_step(model, **how)
    for one, other in zip(resident.parameters(), streamed.parameters(), strict=True):
        assert one.grad is None or same_bits(one.grad, other.grad)


def test_an_argument_edited_in_place_by_the_layer() -> None:
    def edit(module: Any, args: Any) -> None:
        args[0].add_(1)

    # The first layer's input needs no gradient, so autograd would not notice.
    model = poros.prepare(build())
    handle = layers_of(model)[0].input_layernorm.register_forward_pre_hook(edit)
    with pytest.raises(RematerializationError, match=r"layers\.0: .*in place"):
        step(model)
    handle.remove()
    assert_healthy(model)


def test_a_buffer_that_the_layers_own_forward_replaces() -> None:
    def count(module: Any, args: Any, output: Any) -> None:
        module.calls = module.calls + 1

    model = build()
    norm = layers_of(model)[1].input_layernorm
    norm.register_buffer("calls", torch.zeros(()))
    handle = norm.register_forward_hook(count)
    model(**batch())
    assert norm.calls == 1
    poros.prepare(model)
    with pytest.raises(PreparedModelError, match=r"calls: .*replaced"):
        model(**batch())
    handle.remove()
    poros.restore(model)
    # An ordinary tensor of the device: what the hook wrote before the error stays.
    assert norm.calls == 2


def test_a_base_weight_that_becomes_trainable() -> None:
    model = poros.prepare(build(quantize=False))
    weight = layers_of(model)[1].mlp.up_proj.base_layer.weight
    weight.requires_grad_(True)
    with pytest.raises(PreparedModelError, match="made trainable"):
        step(model)
    weight.requires_grad_(False)
    expected, found = step(build(quantize=False)), step(model)
    assert all(same_bits(expected[name], found[name]) for name in expected)


def test_an_interrupt_inside_a_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = poros.prepare(build())
    bits = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swap_in = poros.layer.frozen.LayerBindings.swap_in

    def interrupted(self: Any) -> None:
        swap_in(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(poros.layer.frozen.LayerBindings, "swap_in", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    monkeypatch.undo()
    assert_healthy(model)
    poros.restore(model)
    assert all(same_bits(tensor, bits[name]) for name, tensor in model.state_dict().items())


def test_prepare_under_inference_mode_trains_afterwards() -> None:
    model = build()
    with torch.inference_mode():
        poros.prepare(model)
    assert_healthy(model)


def test_a_deleted_model_takes_its_slots_with_it_at_once() -> None:
    model = poros.prepare(build())
    step(model)
    slot = weakref.ref(poros.runtime(model).ring.slots[0].buffer)
    gc.collect()
    gc.disable()
    try:
        del model
        assert slot() is None
    finally:
        gc.enable()
