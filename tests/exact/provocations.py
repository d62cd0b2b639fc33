"""What provokes an error of a streamed layer: changes between its forward and backward, and others.

Each is a generator function of a model: what comes before, a ``yield``, and what should raise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from tests.exact import hazards as H
from tests.exact import programs as P
from tests.exact.arms import Bases, Model, Program
from tests.snapshots import batches, layers_of

Provocation = Callable[[Model], Iterator[None]]


# Changes between a forward and its backward.


def layer(model: Model, index: int) -> Any:
    return layers_of(model)[index]


def matrix(model: Model) -> nn.Parameter:
    return layer(model, 1).mlp.up_proj.lora_A["default"].weight  # type: ignore[no-any-return]


def optimizer_step(model: Model) -> None:
    parameters = list(P.trained(model).values())
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.SGD(parameters, lr=0.1).step()


def replace_parameter(model: Model) -> None:
    owner = layer(model, 1).mlp.up_proj.lora_A["default"]
    owner.weight = nn.Parameter(owner.weight.detach() * 2)


def assign(path: str, value: Callable[[Any], Any]) -> Callable[[Model], None]:
    """Sets an attribute below the layers to what ``value`` makes of it."""
    where, _, name = path.rpartition(".")

    def change(model: Model) -> None:
        module = layers_of(model).get_submodule(where)
        setattr(module, name, value(getattr(module, name, None)))

    return change


def doubled(value: Any) -> Any:
    return 2 * value


def add_bias(model: Model) -> torch.Tensor:
    """Of a projection of the base that has none."""
    projection = layer(model, 1).self_attn.o_proj.base_layer
    assert projection.bias is None
    projection.bias = nn.Parameter(torch.full((64,), 0.3).bfloat16(), requires_grad=False)
    return projection.bias  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Model], object]] = {
    "another adapter": lambda model: model.set_adapter("second"),
    "another in one module": lambda model: layer(model, 1).self_attn.q_proj.set_adapter("second"),
    "none in one module": lambda model: layer(model, 0).mlp.down_proj.enable_adapters(False),
    "scaling": lambda model: layer(model, 2).self_attn.v_proj.scaling.update(default=4.0),
    "adapter deleted": lambda model: model.delete_adapter("default"),
    "adapter added": lambda model: model.add_adapter(
        "third", LoraConfig(r=4, target_modules=["k_proj"])
    ),
    "optimizer step": optimizer_step,
    "adapter edited": lambda model: nn.init.constant_(matrix(model), 0.5),
    "one element edited": lambda model: nn.init.constant_(matrix(model)[0, :1], 1.0),
    "data replaced": lambda model: setattr(matrix(model), "data", 2 * matrix(model).data),
    "data replaced by equal": lambda model: setattr(
        matrix(model), "data", matrix(model).data.clone()
    ),
    "parameter replaced": replace_parameter,
    "bias added": add_bias,
    "module replaced": assign("1.mlp.act_fn", lambda _: nn.ReLU()),
    "dropout replaced": lambda model: layer(model, 1).mlp.up_proj.lora_dropout.update(
        {"default": nn.Dropout(0.5)}
    ),
    "scale of attention": assign("0.self_attn.scaling", doubled),
    "epsilon": assign("0.input_layernorm.variance_epsilon", lambda _: 1e-3),
    "activation": assign("1.mlp.act_fn.forward", lambda _: torch.relu),
    "new attribute": assign("0.mlp.is_observed", lambda _: True),
    "last attribute": assign("0.post_attention_layernorm.is_observed", lambda _: True),
}
SAYS_WHERE = r"(?=[\s\S]*layers\.)[\s\S]*(between|expected)"


def behind(change: Callable[[Model], object]) -> Provocation:
    """A change between a forward and its backward."""

    def provocation(model: Model) -> Iterator[None]:
        loss = P.loss_of(model)
        change(model)
        yield
        loss.backward()

    return provocation


def edit_of_a_new_bias(model: Model) -> Iterator[None]:
    bias = add_bias(model)
    loss = P.loss_of(model)
    bias.mul_(2)
    yield
    loss.backward()


def train_the_second(model: Model) -> object:
    """The change stays, as in a model that is not streamed, and training is exact with it."""
    model.base_model.enable_adapter_layers()
    model.set_adapter("second")
    return P.train(model)


@contextmanager
def caught_inputs(model: Model, index: int) -> Iterator[dict[str, Any]]:
    """What layer ``index`` is called with."""
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])

    handle = layer(model, index).register_forward_pre_hook(look, with_kwargs=True)
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


def edited_input(what: str, index: int) -> Provocation:
    def provocation(model: Model) -> Iterator[None]:
        with caught_inputs(model, index) as seen:
            loss = P.loss_of(model, 1)  # padded, so there is a mask
        with torch.no_grad():
            tensor = INPUTS[what](seen)
            tensor.copy_(tensor.clone())
        yield
        loss.backward()

    return provocation


# What a layer cannot be asked for.


def run(program: Program) -> Provocation:
    def provocation(model: Model) -> Iterator[None]:
        yield
        program(model)

    return provocation


def through(provocation: Provocation) -> Program:
    """What is no provocation at all."""

    def program(model: Model) -> None:
        list(provocation(model))

    return program


def vanishing_hook(model: Model) -> Iterator[None]:
    with H.hooked(model, "self_attn.q_proj", lambda m, args, output: output * 2):
        loss = P.loss_of(model)
    yield
    loss.backward()


def argument_edited_by_the_layer(model: Model) -> Iterator[None]:
    """The first layer's input needs no gradient, so autograd would not notice."""
    norm = layer(model, 0).input_layernorm
    handle = norm.register_forward_pre_hook(lambda m, args: (args[0].add_(1),))
    try:
        yield
        P.loss_of(model).backward()
    finally:
        handle.remove()


def cache_of_a_forward_with_gradients(model: Model) -> Iterator[None]:
    data = batches()[0]
    cache = model(**data, use_cache=True).past_key_values
    yield
    with torch.no_grad():
        model(input_ids=data["input_ids"][:, -1:], past_key_values=cache, use_cache=True)


def all_adapters_frozen(model: Model) -> Iterator[None]:
    trained = list(P.trained(model).values())
    for each in trained:
        each.requires_grad_(False)
    try:
        yield
        P.loss_of(model.train())
    finally:
        for each in trained:
            each.requires_grad_(True)


def trainable_base_weight(model: Model) -> Iterator[None]:
    weight = layer(model, 1).mlp.up_proj.base_layer.weight
    weight.requires_grad_(True)
    try:
        yield
        P.STEP(model)
    finally:
        weight.requires_grad_(False)


def merged_module(model: Model) -> Iterator[None]:
    loss = P.loss_of(model)
    yield
    layer(model, 1).self_attn.q_proj.merge()  # refused at the call, or else in backward
    loss.backward()


def backward_inside_disable_adapter(model: Model) -> Iterator[None]:
    loss = P.loss_of(model)
    yield
    with model.disable_adapter():
        loss.backward()


SECOND_ORDER: dict[str, Callable[[Any], torch.Tensor]] = {
    "loss": lambda out: out.loss,
    "logits": lambda out: out.logits.float().sum(),
    # The gradient that arrives at layer 0 is then a constant: nothing asks for a second order.
    "hidden state": lambda out: out.hidden_states[1].float().sum(),
}


def second_order(start: str) -> Provocation:
    def provocation(model: Model) -> Iterator[None]:
        out = model(**batches()[0], output_hidden_states=True)
        parameters = list(P.trained(model).values())
        yield
        gradients = torch.autograd.grad(
            SECOND_ORDER[start](out), parameters, create_graph=True, allow_unused=True
        )
        penalty = sum(each.square().sum() for each in gradients if each is not None)
        # The loss has a graph of its own, so that a lost second order would go unnoticed here.
        (out.loss + penalty).backward()

    return provocation


def with_argument(edit: Callable[[dict[str, Any]], object]) -> Provocation:
    """A step in which layer 1 gets other keyword arguments."""

    def change(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        edit(kwargs)
        return args, kwargs

    def provocation(model: Model) -> Iterator[None]:
        handle = layer(model, 1).register_forward_pre_hook(change, with_kwargs=True)
        try:
            yield
            P.loss_of(model, 1).backward()
        finally:
            handle.remove()

    return provocation


class Fickle(nn.Module):
    """Draws random numbers on odd calls only, so never in the recomputation."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 2:
            torch.rand(3)
        return nn.functional.silu(x)


class Growing(nn.Module):
    """Returns another type at each call."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x if self.num_calls % 2 else x.double()


def fickle(bases: Bases) -> Model:
    model = bases.build()
    layer(model, 1).mlp.act_fn = Fickle()
    return model


def growing(bases: Bases) -> Model:
    model = bases.build()
    layer(model, 1).register_module("tail", Growing())
    original = type(layer(model, 1))

    class Tailed(original):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.tail(original.forward(self, *args, **kwargs))

    layer(model, 1).__class__ = Tailed
    return model


def grown_state(model: Model) -> Iterator[None]:
    states: list[torch.Tensor] = []
    with H.hooked(model, "", lambda m, args, output: states.append(output)):
        P.loss_of(model)
    yield
    states[0].float().sum().backward()
