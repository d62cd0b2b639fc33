"""Changes between a forward and its backward that raise; test_remat_exact.py has those replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig
from snapshots import assert_same_run, batches, build, changes, layers_of, run
from support import same_bits
from torch import nn

import poros
from poros.errors import PorosError, PreparedModelError, RematerializationError

Model = Any


def two_adapters() -> Model:
    """A model with a second adapter; the first is active."""
    model = build()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    return model


def trainable(model: Model) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def adapter(model: Model, layer: int = 1) -> nn.Parameter:
    return layers_of(model)[layer].mlp.up_proj.lora_A["default"].weight  # type: ignore[no-any-return]


def set_adapter(model: Model) -> None:
    model.set_adapter("second")


def set_adapter_of_one_module(model: Model) -> None:
    layers_of(model)[1].self_attn.q_proj.set_adapter("second")


def disable_one_module(model: Model) -> None:
    layers_of(model)[0].mlp.down_proj.enable_adapters(False)


def disable_all(model: Model) -> None:
    model.base_model.disable_adapter_layers()


def change_scaling(model: Model) -> None:
    layers_of(model)[2].self_attn.v_proj.scaling["default"] *= 2


def scale_layer(model: Model) -> None:
    layers_of(model)[0].self_attn.q_proj.scale_layer(0.5)


def delete_adapter(model: Model) -> None:
    model.delete_adapter("default")


def add_adapter(model: Model) -> None:
    model.add_adapter("third", LoraConfig(r=4, target_modules=["k_proj"]))


def optimizer_step(model: Model) -> None:
    parameters = list(trainable(model).values())
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.SGD(parameters, lr=0.1).step()


def edit_adapter(model: Model) -> None:
    with torch.no_grad():
        adapter(model).mul_(2)


def edit_one_element(model: Model) -> None:
    with torch.no_grad():
        adapter(model)[0, 0] = 1


def replace_data(model: Model) -> None:
    adapter(model).data = adapter(model).data * 2


def replace_data_with_equal_bits(model: Model) -> None:
    adapter(model).data = adapter(model).data.clone()


def cast_data(model: Model) -> None:
    adapter(model).data = adapter(model).data.half()


def replace_parameter(model: Model) -> None:
    owner = layers_of(model)[1].mlp.up_proj.lora_A["default"]
    owner.weight = nn.Parameter(owner.weight.detach() * 2)


def replace_module(model: Model) -> None:
    layers_of(model)[1].mlp.act_fn = nn.ReLU()


def change_dropout(model: Model) -> None:
    layers_of(model)[1].mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.5)


def change_rate_of_dropout(model: Model) -> None:
    layers_of(model)[1].mlp.up_proj.lora_dropout["default"].p = 0.5


def change_dropout_of_attention(model: Model) -> None:
    layers_of(model)[2].self_attn.attention_dropout = 0.5


def change_kind_of_attention(model: Model) -> None:
    model.get_base_model().set_attn_implementation("eager")


def change_scale_of_attention(model: Model) -> None:
    layers_of(model)[0].self_attn.scaling *= 2


def change_epsilon(model: Model) -> None:
    layers_of(model)[0].input_layernorm.variance_epsilon = 1e-3


def change_activation(model: Model) -> None:
    layers_of(model)[0].mlp.act_fn.forward = torch.relu


def new_attribute(model: Model) -> None:
    layers_of(model)[0].mlp.is_observed = True


def full_backward_hook(model: Model) -> None:
    layers_of(model)[1].mlp.register_full_backward_hook(double_gradients)


def full_backward_pre_hook(model: Model) -> None:
    layers_of(model)[1].mlp.register_full_backward_pre_hook(double_incoming)


def forward_hook(model: Model) -> None:
    layers_of(model)[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def double_gradients(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return tuple(each if each is None else 2 * each for each in grad_input)


def double_incoming(module: Any, grad_output: Any) -> Any:
    return tuple(each if each is None else 2 * each for each in grad_output)


CHANGES: list[Callable[[Model], None]] = [
    set_adapter,
    set_adapter_of_one_module,
    disable_one_module,
    disable_all,
    change_scaling,
    scale_layer,
    delete_adapter,
    add_adapter,
    optimizer_step,
    edit_adapter,
    edit_one_element,
    replace_data,
    replace_data_with_equal_bits,
    cast_data,
    replace_parameter,
    replace_module,
    change_dropout,
    change_rate_of_dropout,
    change_dropout_of_attention,
    change_kind_of_attention,
    change_scale_of_attention,
    change_epsilon,
    change_activation,
    new_attribute,
    full_backward_hook,
    full_backward_pre_hook,
    forward_hook,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_forward_and_backward_raises(change: Callable[[Model], None]) -> None:
    model, twin = poros.prepare(two_adapters()), two_adapters()
    model.train()
    loss = model(**batches()[0]).loss
    change(model)
    with pytest.raises(RematerializationError) as caught:
        loss.backward()
    message = str(caught.value)
    assert "layers." in message and ("between" in message or "expected" in message)
    # The change itself stays, as in a model that is not streamed, and a healthy step is exact.
    change(twin)
    for each in (model, twin):
        each.zero_grad()
        each.base_model.enable_adapter_layers()
        each.set_adapter("second")
    assert_same_run(run(twin), run(model))


@pytest.mark.parametrize("change", [lambda model: None, lambda model: model.zero_grad()])
def test_nothing_raises_without_a_change(change: Callable[[Model], None]) -> None:
    """The control of the test above."""
    model = poros.prepare(two_adapters())
    loss = model(**batches()[0]).loss
    change(model)
    loss.backward()
    assert all(each.grad is not None for each in trainable(model).values())


def test_backward_inside_disable_adapter_raises() -> None:
    model, twin = poros.prepare(build()), build()
    loss = model(**batches()[0]).loss
    with model.disable_adapter(), pytest.raises(RematerializationError, match="adapters"):
        loss.backward()
    model.zero_grad()
    assert_same_run(run(twin), run(model))


@pytest.mark.parametrize("quantize", [True, False])
def test_merging_between_forward_and_backward_raises(quantize: bool) -> None:
    model, twin = poros.prepare(build(quantize=quantize)), build(quantize=quantize)
    loss = model(**batches()[0]).loss
    with pytest.raises(PreparedModelError):
        model.merge_adapter()
    with pytest.raises(PorosError) as caught:
        layers_of(model)[1].self_attn.q_proj.merge()  # refused at the call, or else in backward
        loss.backward()
    assert isinstance(caught.value, PreparedModelError | RematerializationError)
    model.zero_grad()
    if not layers_of(model)[1].self_attn.q_proj.merged:
        assert_same_run(run(twin), run(model))


@contextmanager
def caught_inputs(model: Model, index: int) -> Iterator[dict[str, Any]]:
    """What layer ``index`` is called with."""
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])

    handle = layers_of(model)[index].register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


INPUTS: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "hidden": lambda seen: seen["hidden"],
    "rotary cos": lambda seen: seen["position_embeddings"][0],
    "rotary sin": lambda seen: seen["position_embeddings"][1],
    "mask": lambda seen: seen["attention_mask"],
    "position ids": lambda seen: seen["position_ids"],
}


@pytest.mark.parametrize("what", INPUTS)
@pytest.mark.parametrize("index", [0, 2])
def test_an_edit_of_what_a_layer_was_given_raises(what: str, index: int) -> None:
    model, twin = poros.prepare(build()), build()
    with caught_inputs(model, index) as seen:
        loss = model(**batches()[1]).loss  # the second batch is padded, so there is a mask
    tensor = INPUTS[what](seen)
    with torch.no_grad():
        tensor.copy_(tensor.clone())
    with pytest.raises(RematerializationError, match=r"layers\.\d.*edited in place"):
        loss.backward()
    model.zero_grad()
    assert_same_run(run(twin), run(model))


@pytest.mark.parametrize("target", ["adapter", "input"])
def test_edits_are_never_silent_under_saved_tensor_hooks(target: str) -> None:
    """Hooks that copy saved tensors, as save_on_cpu does, switch PyTorch's version check off."""
    twin, model = build(dropout=0.0), poros.prepare(build(dropout=0.0))
    gradients = []
    for each in (twin, model):
        copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
        with copies, caught_inputs(each, 1) as seen:
            loss = each(**batches()[0]).loss
        if target == "adapter":
            edit_adapter(each)
        else:
            with torch.no_grad():
                seen["hidden"].mul_(2)
        try:
            loss.backward()
        except RematerializationError:
            return
        gradients.append({name: p.grad for name, p in trainable(each).items()})
    expected, found = gradients
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


class Fickle(nn.Module):
    """Draws random numbers on odd calls only, so never in the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 2:
            torch.rand(3)
        return nn.functional.silu(x)


class Growing(nn.Module):
    """Returns another type at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x if self.num_calls % 2 else x.double()


def test_a_layer_that_draws_other_random_numbers_when_recomputed_raises() -> None:
    model = build()
    layers_of(model)[1].mlp.act_fn = Fickle()
    poros.prepare(model)
    loss = model(**batches()[0]).loss
    with pytest.raises(RematerializationError, match=r"layers\.1: .*random numbers"):
        loss.backward()


def test_a_layer_that_returns_another_form_when_recomputed_raises() -> None:
    model = build()
    layers_of(model)[1].register_module("tail", Growing())
    original = type(layers_of(model)[1])

    class Tailed(original):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.tail(original.forward(self, *args, **kwargs))

    layers_of(model)[1].__class__ = Tailed
    poros.prepare(model)
    hidden = model(**batches()[0], output_hidden_states=True).hidden_states[2]
    with pytest.raises(RematerializationError, match=r"layers\.1: .*form"):
        hidden.float().sum().backward()


SECOND_ORDER: dict[str, Callable[[Any], torch.Tensor]] = {
    "loss": lambda out: out.loss,
    "logits": lambda out: out.logits.float().sum(),
    # The gradient that arrives at layer 0 is then a constant: nothing asks for a second order.
    "hidden state": lambda out: out.hidden_states[1].float().sum(),
}


@pytest.mark.parametrize("start", SECOND_ORDER)
def test_differentiating_a_gradient_raises(start: str) -> None:
    model, twin = poros.prepare(build()), build()
    out = model(**batches()[0], output_hidden_states=True)
    parameters = list(trainable(model).values())
    with pytest.raises((RuntimeError, PorosError)) as caught:
        gradients = torch.autograd.grad(
            SECOND_ORDER[start](out), parameters, create_graph=True, allow_unused=True
        )
        penalty = sum(each.square().sum() for each in gradients if each is not None)
        # The loss has a graph of its own, so that a lost second order would go unnoticed here.
        (out.loss + penalty).backward()
    assert "twice" in str(caught.value) or isinstance(caught.value, PorosError)
    model.zero_grad()
    assert_same_run(run(twin), run(model))


def test_a_failed_backward_does_not_change_random_state_or_flags() -> None:
    model = poros.prepare(build())
    model.train()
    loss = model(**batches()[0]).loss
    edit_adapter(model)
    flags = {name: each.training for name, each in model.named_modules()}
    random_state = torch.get_rng_state()
    with pytest.raises(RematerializationError):
        loss.backward()
    assert torch.equal(random_state, torch.get_rng_state())
    assert changes(flags, {name: each.training for name, each in model.named_modules()}) == {}
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
