"""What a recomputed layer cannot give exactly is refused, never trained on; then all is well again.

A row provokes an error of Poros: as is, or behind steps whose visits were replayed from tapes.
Where a resident model accepts it, a resident model does it too, so that the refusal says something.
A step behind it is exact. Edits that the language of the fuzzer has: ``test_written_programs``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import poros
from poros.errors import (
    PorosError,
    PreparedModelError,
    RematerializationError,
    SlotStateError,
    UnsupportedModelError,
)
from poros.replay import routing
from poros.stream.boundary import is_streamed
from poros.stream.context import ModelContext
from tests.comparing import changes
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.exact.recorded import on_tapes, poisoned
from tests.loops import (
    Model,
    Program,
    Subject,
    batches,
    bf16,
    build,
    differing_facts,
    layers_of,
    observe,
    often,
    resident_facts,
    streamed,
)
from tests.replaced import Patch, noted

Provocation = Callable[[Model], Iterator[None]]
"""Of a model: what comes before, a ``yield``, and what should raise."""


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


def add_bias(model: Model) -> torch.Tensor:
    """Of a projection of the base that has none."""
    projection = layer(model, 1).self_attn.o_proj.base_layer
    assert projection.bias is None
    projection.bias = nn.Parameter(torch.full((64,), 0.3).bfloat16(), requires_grad=False)
    return projection.bias  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Model], object]] = {
    "another adapter": lambda model: model.set_adapter("second"),
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
    "scale of attention": assign("0.self_attn.scaling", lambda value: 2 * value),
    "epsilon": assign("0.input_layernorm.variance_epsilon", lambda _: 1e-3),
    "activation": assign("1.mlp.act_fn.forward", lambda _: torch.relu),
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


def class_replaced(model: Model) -> Iterator[None]:
    loss = P.loss_of(model)
    with P.forward_replaced(Qwen2MLP, P.turned_around(Qwen2MLP)):
        yield
        loss.backward()


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


INPUTS: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "hidden": lambda seen: seen["hidden"],
    "rotary cos": lambda seen: seen["position_embeddings"][0],
    "rotary sin": lambda seen: seen["position_embeddings"][1],
    "mask": lambda seen: seen["attention_mask"],
    "position ids": lambda seen: seen["position_ids"],
}


def edited_input(what: str, index: int) -> Provocation:
    def provocation(model: Model) -> Iterator[None]:
        with P.caught_inputs(model, index) as seen:
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


def argument_edited_by_the_layer(model: Model) -> Iterator[None]:
    """The first layer's input needs no gradient, so autograd would not notice."""
    norm = layer(model, 0).input_layernorm
    with norm.register_forward_pre_hook(lambda m, args: (args[0].add_(1),)):
        yield
        P.loss_of(model).backward()


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


SECOND_ORDER: dict[str, Callable[[Any], torch.Tensor]] = {
    "loss": lambda out: out.loss,
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


class Fickle(nn.Module):
    """Draws random numbers on odd calls only, so never in the recomputation."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 2:
            torch.rand(3)
        return nn.functional.silu(x)


@dataclass(frozen=True)
class Row:
    name: str
    provocation: Provocation
    error: type[Exception] | tuple[type[Exception], ...]
    match: str
    subject: Subject = S.NO_DROPOUT
    is_accepted: bool = True
    """By a resident model."""
    after: Program = P.STEP
    kernels: str = "exact"

    def program(self, model: Model) -> object:
        steps = self.provocation(model)
        next(steps)
        if is_streamed(layers_of(model)[0]):
            with pytest.raises(self.error, match=self.match):
                next(steps, None)
        elif self.is_accepted:
            next(steps, None)
        steps.close()
        model.zero_grad()
        torch.manual_seed(7)
        return self.after(model)


REMAT, UNSUPPORTED, PREPARED = RematerializationError, UnsupportedModelError, PreparedModelError


def rows() -> Iterator[Row]:
    for name, change in CHANGES.items():
        raised = behind(change), REMAT, SAYS_WHERE
        yield Row(name, *raised, S.two_adapters, is_accepted=False, after=train_the_second)
    for place, what in enumerate(INPUTS):
        index = 2 * (place % 2)
        raised = edited_input(what, index), REMAT, r"layers\.\d.*edited in place", S.PLAIN, False
        yield Row(f"edit of {what} of layer {index}", *raised)
    for start in SECOND_ORDER:
        provocation, errors = second_order(start), (RuntimeError, PorosError)
        match = "twice|gradients of gradients"
        # Fused attention gives none of its own.
        yield Row(f"second order of {start}", provocation, errors, match, S.PLAIN, False)
    match = r"layers\.1\.self_attn\.o_proj\.base_layer\.bias"
    yield Row("a bias that came later edited", edit_of_a_new_bias, REMAT, match)
    yield Row("a class's forward replaced", class_replaced, REMAT, "the code of its modules")
    match = r"layers\.0: expected its arguments to be left alone.*in place"
    yield Row("argument edited", argument_edited_by_the_layer, REMAT, match)
    yield Row("dropped cache", cache_of_a_forward_with_gradients, UNSUPPORTED, "KV cache")
    yield Row("frozen", all_adapters_frozen, PREPARED, r"layers\.0: .* a trainable adapter")
    made, match = trainable_base_weight, "made trainable"
    yield Row("base weight made trainable", made, PREPARED, match, S.DENSE, False)
    for name, program in {
        "own permutation": P.own_permutation,
        "counter": P.with_numbered_hook(torch.mul),
        "an operator that saves other rows": P.kept_by_kernels("rows"),
    }.items():
        yield Row(name, run(program), REMAT, "the values that the forward", S.PLAIN)
    for gradients in (False, True):
        name = f"a forward {'with gradients ' if gradients else ''}inside a layer"
        provocation = run(P.another_forward(gradients=gradients))
        yield Row(name, provocation, SlotStateError, "one layer to run at a time", S.PLAIN)
    program = run(P.whole_model_checkpointed)
    yield Row("the whole model checkpointed", program, UNSUPPORTED, "saved-tensor hooks", S.PLAIN)
    create_graph = run(P.create_graph), (REMAT, UNSUPPORTED), "create_graph", S.FP32, False
    yield Row("create_graph", *create_graph)
    yield Row("create_graph of PEFT's modules", *create_graph, kernels="peft")
    functional = run(P.functional_gradient)
    yield Row("torch.func.grad", functional, UNSUPPORTED, "torch.func.grad", is_accepted=False)


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", ["as is", "behind replayed visits"])
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_it_is_refused_and_then_all_is_well(row: Row, way: str) -> None:
    policy = {"adapter_kernels": row.kernels}
    if way == "as is":
        assert differing_facts(row.subject, row.program, poisoned, **policy) == {}
        return
    model = on_tapes(row.subject(), **policy)
    often(P.STEP)(model)
    model.zero_grad()
    assert changes(resident_facts(row.subject, row.program), observe(model, row.program)) == {}
    assert poros.runtime(model).stats()["num_replayed_visits"] > 0


REPLAYED = ("another adapter", "optimizer step", "adapter edited", "one element", "data replaced")
WITHOUT_EFFECT = ("module replaced", "dropout replaced", "epsilon", "last attribute")


@pytest.mark.parametrize("change", WITHOUT_EFFECT)
def test_behind_a_replayed_forward_it_changes_nothing(change: str) -> None:
    """Backward does what a recording does, which reads tensors alone: as if a graph were kept."""

    def program(model: Model) -> None:
        steps = behind(CHANGES[change])(model)
        next(steps)
        next(steps, None)

    model = on_tapes(S.two_adapters())
    often(lambda model: P.loss_of(model).backward())(model)
    model.zero_grad()
    assert changes(resident_facts(S.two_adapters, program), observe(model, program)) == {}


@pytest.mark.parametrize("change", [name for name in CHANGES if name.startswith(REPLAYED)])
def test_a_recorded_backward_refuses_what_it_would_read(change: str) -> None:
    """Other adapters, and other tensors in their places, also once nothing else is looked at."""
    model = on_tapes(S.two_adapters())
    often(lambda model: P.loss_of(model).backward())(model)
    steps = behind(CHANGES[change])(model)
    next(steps)
    with pytest.raises(REMAT, match=SAYS_WHERE):
        next(steps)


@pytest.mark.parametrize("prepare", [poisoned, on_tapes])
def test_a_layer_that_draws_otherwise_when_recomputed_is_refused(prepare: Any) -> None:
    model = build()
    layer(model, 1).mlp.act_fn = Fickle()
    steps = behind(lambda model: None)(prepare(model))
    next(steps)
    with pytest.raises(RematerializationError, match=r"layers\.1: .*random numbers"):
        next(steps)


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prepare", [poisoned, on_tapes])
def test_an_update_within_a_region_is_refused(
    prepare: Any, fused: bool, monkeypatch: Patch
) -> None:
    """A resident run goes on with the casts of the old weights."""
    model = prepare(S.FP32_NO_DROPOUT())
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        P.updates_in_one_region(model, fused)
    # What does not change the casts does not matter.
    harmless = partial(P.updates_in_one_region, fused=fused, lr=1e-12)
    assert differing_facts(S.FP32_NO_DROPOUT, harmless, prepare) == {}
    # The control: let through, it differs.
    monkeypatch.setattr("poros.replay.routing.require_current", lambda *_: None)
    monkeypatch.setattr("poros.stream.general.require_current", lambda *_: None)
    harmful = partial(P.updates_in_one_region, fused=fused)
    assert differing_facts(S.FP32_NO_DROPOUT, harmful, prepare) != {}


def test_an_update_within_a_region_is_refused_by_layers_that_are_replayed(
    monkeypatch: Patch,
) -> None:
    model = on_tapes(S.FP32_DENSE())
    often(P.REGION)(model)
    model.zero_grad()
    before = poros.runtime(model).stats()["num_replayed_visits"]
    monkeypatch.setattr("poros.stream.general.require_current", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        P.updates_in_one_region(model, fused=True, numbers=(0, 0))
    assert poros.runtime(model).stats()["num_replayed_visits"] > before


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_update_between_groups_in_one_region_is_refused(
    is_broken: bool, monkeypatch: Patch
) -> None:
    """The control: layers that are told of a region of their own do not see it."""
    model = on_tapes(S.FP32_DENSE())
    optimizer = torch.optim.AdamW(P.trained(model).values(), lr=1e-2, fused=True)

    group = partial(poros.accumulate, model, [batches()[0]] * 2)
    if is_broken:
        monkeypatch.setattr(ModelContext, "confines_casts", lambda *_: True)
    for _ in range(6):
        with bf16():
            group()
    with bf16():
        group()
        optimizer.step()
        if is_broken:
            group()
            return
        with pytest.raises(UnsupportedModelError, match=r"updated since.*anew"):
            group()


# What is left behind.


def interrupted(error: type[BaseException]) -> Provocation:
    """A hook that fails in the recomputation alone."""

    def provocation(model: Model) -> Iterator[None]:
        calls: list[int] = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise error

        with P.hooked(model, "mlp", hook):
            loss = P.loss_of(model)
            yield
            loss.backward()

    return provocation


FAILING: dict[type[BaseException], Provocation] = {
    RematerializationError: behind(CHANGES["adapter edited"]),
    KeyboardInterrupt: interrupted(KeyboardInterrupt),
    ZeroDivisionError: interrupted(ZeroDivisionError),
}


@pytest.mark.parametrize("error", FAILING)
def test_a_failed_backward_does_not_change_random_state_or_flags(
    error: type[BaseException],
) -> None:
    model = streamed(S.PLAIN()).train()
    steps = FAILING[error](model)
    next(steps)
    flags = {name: each.training for name, each in model.named_modules()}
    random_state = torch.get_rng_state()
    with pytest.raises(error):
        next(steps)
    assert torch.equal(random_state, torch.get_rng_state())
    assert changes(flags, {name: each.training for name, each in model.named_modules()}) == {}
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_a_region_that_ends_with_the_model_makes_no_casts(monkeypatch: Patch) -> None:
    """They would be kept until the region ends."""
    made = noted(monkeypatch, routing, "cached_cast")

    def num_layers() -> int:
        return len({id(of_layer) for _, of_layer in made})

    model = on_tapes(S.FP32_DENSE())
    counts = {P.penalty_by_accelerate: 0, P.PENALTY_OUTSIDE: 3, P.PENALTY_INSIDE: 0}
    for program, count in counts.items():
        often(program)(model)
        made.clear()
        program(model)
        assert num_layers() == count
    # A region around the model's own does not end with it.
    with bf16():
        often(P.penalty_by_accelerate)(model)
        made.clear()
        P.penalty_by_accelerate(model)
    assert num_layers() == 3
