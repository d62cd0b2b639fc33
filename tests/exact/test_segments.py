"""Kept layers in a row that are replayed in one go: equal bits, or a typed error.

Calls of layers wait for that of the last one, and the model's code is handed tensors without values
meanwhile. What recordings leave is poisoned.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutputWithPast

import poros
from poros.errors import PorosError, RematerializationError, UnsupportedModelError
from tests.exact.recorded import recorded
from tests.loops import (
    Batch,
    adapted,
    bf16,
    layers_of,
    own_loss,
    same,
    several,
    train,
    trained,
    training,
)

Model = Any
Layer = Callable[[int, Any], Any]
"""Calls the layer of that number."""
Code = Callable[[Any, Layer], Any]

NUM_LAYERS = 4
ONE_LENGTH: Any = {"sizes": (2,) * 5, "lengths": (12,), "together": False}
make = partial(training, num_layers=NUM_LAYERS, dropout=0.0)


def kept(model: Model, num_layers: int = NUM_LAYERS, **policy: Any) -> Model:
    """Prepared; all layers keep their graphs, and slots and recordings are poisoned."""
    room = {"slots": num_layers, "keep_last": num_layers, "self_check": "off"}
    return recorded(model, **{**room, **policy})[0]


def num_joined(model: Model) -> int:
    found: int = poros.runtime(model).stats()["num_joined_visits"]
    return found


# ------------------------------------------------------------------ models and modes


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "qwen3", "mistral"])
def test_layers_in_a_row_are_replayed_in_one_go(architecture: str, padded: bool) -> None:
    """Gemma's layers are given two masks, in turns."""
    run = partial(train, padded=padded, **ONE_LENGTH)
    model = kept(make(architecture))
    assert same(run(model), run(make(architecture)))
    # Two steps until all is known: forwards and backwards of the others.
    assert num_joined(model) >= 2 * NUM_LAYERS * 2 * 2


def test_another_length_is_recomputed() -> None:
    run = partial(train, **{**ONE_LENGTH, "sizes": (3,) * 5, "lengths": (12, 12, 9)})
    model = kept(make())
    assert same(run(model), run(make()))
    assert num_joined(model) > 0


@pytest.mark.parametrize("num_layers", [2, 9, 11])
def test_long_models_are_several_segments(num_layers: int) -> None:
    """At most eight layers are joined; a single one is replayed by itself."""
    build = partial(make, num_layers=num_layers)
    model = kept(build(), num_layers)
    assert same(train(model, **ONE_LENGTH), train(build(), **ONE_LENGTH))
    captures = poros.runtime(model).captures
    alone = num_layers % 8 == 1
    assert captures.rows.num_joined >= 2 * 2 * 2 * (num_layers - alone)


def in_a_region(model: Model, batch: Batch) -> torch.Tensor:
    with bf16():
        return own_loss(model, batch)


def in_the_models_region(model: Model, batch: Batch) -> torch.Tensor:
    """As Accelerate has it: the region ends with the model."""
    forward = model.forward
    model.forward = bf16()(forward)
    try:
        return own_loss(model, batch)
    finally:
        model.forward = forward


def with_a_penalty(model: Model, batch: Batch) -> torch.Tensor:
    before = sum(each.square().sum() for each in trained(model)[::3])
    loss = own_loss(model, batch)
    return loss + 0.01 * (before + sum(each.abs().sum() for each in trained(model)[1::2]))


def twice(model: Model, batch: Batch) -> torch.Tensor:
    """The second forward finds the graphs of the first."""
    other = {name: each.flip(0) for name, each in batch.items()}
    return own_loss(model, batch) + own_loss(model, other)


def with_parts_without(model: Model, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        weight = own_loss(model, batch)
    return own_loss(model, batch) * weight


def of_what_is_embedded(model: Model, batch: Batch) -> torch.Tensor:
    """What the first layer is given needs a gradient of three terms; an adapter gets its sum."""
    hidden = model.get_input_embeddings()(batch["input_ids"]) * (1 + trained(model)[-1].sum())
    out = model(inputs_embeds=hidden, labels=batch["labels"], use_cache=False)
    return out.loss + hidden.sin().mean()


def with_a_cache(model: Model, batch: Batch) -> torch.Tensor:
    return model(**batch, use_cache=True).loss  # type: ignore[no-any-return]


def with_hidden_states(model: Model, batch: Batch) -> torch.Tensor:
    out = model(**batch, use_cache=False, output_hidden_states=True)
    return out.loss + sum(each.float().square().mean() for each in out.hidden_states)


LOSSES: dict[str, Any] = {
    "in a region": in_a_region,
    "in the model's region": in_the_models_region,
    "with a penalty": with_a_penalty,
    "two forwards": twice,
    "a forward without gradients": with_parts_without,
    "of what is embedded": of_what_is_embedded,
    "with a cache": with_a_cache,
    "with hidden states": with_hidden_states,
}
ALONE = ("two forwards", "with hidden states")
"""No pass of theirs is joined: graphs are held, or layers are recorded."""


@pytest.mark.parametrize("which", LOSSES)
def test_losses(which: str) -> None:
    run = partial(train, loss=LOSSES[which], **ONE_LENGTH)
    model = kept(make())
    assert same(run(model), run(make()))
    if which not in ALONE:
        assert num_joined(model) > 0


def grouped(model: Model) -> Model:
    return poros.use_adapter_kernels(model, "grouped")


# Adapters, what prepares the resident model, and whether layers are joined.
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, bool]] = {
    "grouped": ({}, {"adapter_kernels": "grouped"}, grouped, True),
    "DoRA": ({"use_dora": True}, {"adapter_kernels": "peft"}, lambda model: model, True),
    "16 bits": ({"adapters": torch.bfloat16}, {}, lambda model: model, True),
    "the second layer alone": ({"layers_to_transform": [1]}, {}, lambda model: model, False),
    "dropout": ({"lora_dropout": 0.1}, {}, lambda model: model, False),
}


@pytest.mark.parametrize("loss", [in_the_models_region, own_loss])
@pytest.mark.parametrize("which", ADAPTERS)
def test_adapters(which: str, loss: Any) -> None:
    options, policy, reference, is_joined = ADAPTERS[which]
    run = partial(train, loss=loss, **ONE_LENGTH)
    model = kept(adapted(**options), 2, **policy)
    assert same(run(model), run(reference(adapted(**options))))
    assert (num_joined(model) > 0) == is_joined


def hooked(order: list[str]) -> Callable[[Model, int], None]:
    """Hooks that write down whose gradient arrives, of each kind there is."""

    def note(name: str, *_: object) -> None:
        order.append(name)

    def between(model: Model, number: int) -> None:
        for name, each in model.named_parameters() if number == 0 else ():
            if each.requires_grad:
                each.register_hook(partial(note, name))
                each.register_post_accumulate_grad_hook(partial(note, f"{name} behind"))

    return between


def test_gradients_arrive_in_the_order_of_a_resident_run() -> None:
    orders: tuple[list[str], list[str]] = [], []
    model = kept(make())
    found = train(model, between=hooked(orders[0]), **ONE_LENGTH)
    assert same(found, train(make(), between=hooked(orders[1]), **ONE_LENGTH))
    assert orders[0] == orders[1] and num_joined(model) > 0


def changed(model: Model, number: int) -> None:
    """What may be otherwise between steps, when layers are joined."""
    if number == 3:
        layers_of(model)[2].mlp.down_proj.scaling["default"] = 0.25
    elif number == 6:
        several(model)
    elif number == 8:
        layers_of(model)[1].register_forward_hook(lambda module, given, result: result * 1.5)
    elif number == 10:
        model.base_model.set_adapter("default")


@pytest.mark.parametrize("loss", [own_loss, with_a_cache])
def test_what_changes_between_steps(loss: Any) -> None:
    # An optimizer's state is made for the adapters of before.
    options: Any = {**ONE_LENGTH, "sizes": (2,) * 12}
    run = partial(train, loss=loss, between=changed, **options)
    model = kept(make())
    assert same(run(model), run(make()))
    assert num_joined(model) > 0


def test_layers_that_begin_to_draw() -> None:
    """Joined in evaluation mode, with gradients; from the fifth step on in training mode."""

    def between(model: Model, number: int) -> None:
        model.train(number >= 4)

    run = partial(train, between=between, **{**ONE_LENGTH, "sizes": (2,) * 7})
    model = kept(adapted(lora_dropout=0.1), 2)
    assert same(run(model), run(adapted(lora_dropout=0.1)))
    assert num_joined(model) > 0


# ------------------------------------------------------------------------ backwards


def prepared_and_joined(**options: Any) -> tuple[Model, Batch]:
    """A model whose passes are joined by now, and a batch."""
    model = kept(make(**options))
    train(model, **ONE_LENGTH)
    assert num_joined(model) > 0
    tokens = torch.arange(24).view(2, 12) + 5
    return model, {"input_ids": tokens, "labels": tokens}


def again(model: Model, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


class Nothing(TorchDispatchMode):
    """Sees operators, and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(model: Model, loss: torch.Tensor) -> None:
    with Nothing():
        loss.backward()


def under_other_settings(model: Model, loss: torch.Tensor) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        loss.backward()


def of_a_few(model: Model, loss: torch.Tensor) -> None:
    few = trained(model)[3:6]
    for each, gradient in zip(few, torch.autograd.grad(loss, few), strict=True):
        each.grad = gradient


# And how many visits of a forward and such a backward are joined.
BACKWARDS: dict[str, tuple[Any, int]] = {
    "twice": (again, 3 * NUM_LAYERS),
    "watched": (watched, NUM_LAYERS),
    "under other settings": (under_other_settings, NUM_LAYERS),
    "of a few": (of_a_few, 2 * NUM_LAYERS),
}


@pytest.mark.parametrize("which", BACKWARDS)
def test_backwards(which: str) -> None:
    take, number = BACKWARDS[which]

    def run(model: Model, batch: Batch) -> list[torch.Tensor]:
        found = []
        for _ in range(2):  # the second one as if nothing had been
            take(model, own_loss(model, batch))
            found += [each.grad.clone() for each in trained(model) if each.grad is not None]
            model.zero_grad()
        return found

    model, batch = prepared_and_joined()
    resident = make()
    train(resident, **ONE_LENGTH)
    before = num_joined(model)
    assert same(run(model, batch), run(resident, batch))
    assert num_joined(model) == before + 2 * number


def edit(model: Model, number: int = 5) -> None:
    with torch.no_grad():
        trained(model)[number].mul_(2)


def second_order(model: Model) -> None:
    torch.autograd.grad(model.loss, trained(model)[0], create_graph=True)


@pytest.mark.parametrize("act", [edit, second_order])
def test_what_a_backward_refuses(act: Callable[[Model], None]) -> None:
    model, batch = prepared_and_joined()
    model.loss = own_loss(model, batch)
    with pytest.raises(RematerializationError):
        act(model)
        model.loss.backward()
    assert all(each.grad is None for each in trained(model))


def test_a_hook_before_a_layer_comes_behind_the_layers_before() -> None:
    """It edits an adapter of the first layer, which has run by then: a resident model raises."""
    model, batch = prepared_and_joined()
    layers_of(model)[2].register_forward_pre_hook(lambda module, given: edit(model, 0))
    with pytest.raises(Exception, match=r"inplace operation|edited"):
        own_loss(model, batch).backward()


# ------------------------------------------------------------- code between layers


def passed_on(hidden: Any, layer: Layer) -> Any:
    for number in range(NUM_LAYERS):
        hidden = layer(number, hidden)
    return hidden


def used(hidden: Any, layer: Layer) -> Any:
    hidden = layer(1, layer(0, hidden))
    hidden = hidden * 1.5 + hidden.square().mean()
    return layer(3, layer(2, hidden))


def looked_at(hidden: Any, layer: Layer) -> Any:
    for number in range(NUM_LAYERS):
        assert hidden.shape[-1] == 64 and hidden.dtype.is_floating_point and hidden.dim() == 3
        hidden = layer(number, hidden)
    return hidden


def used_in_place(hidden: Any, layer: Layer) -> Any:
    hidden = layer(1, layer(0, hidden))
    hidden[:, 0] *= 0.5
    return layer(3, layer(2, hidden))


def all_kept(hidden: Any, layer: Layer) -> Any:
    seen = [hidden := layer(number, hidden) for number in range(NUM_LAYERS)]
    return torch.stack(seen).mean(0)


def skipped(hidden: Any, layer: Layer) -> Any:
    return layer(1, layer(0, hidden))


def repeated(hidden: Any, layer: Layer) -> Any:
    return layer(3, layer(2, layer(1, layer(1, layer(0, hidden)))))


def disordered(hidden: Any, layer: Layer) -> Any:
    return layer(3, layer(1, layer(2, layer(0, hidden))))


def partly_frozen(hidden: Any, layer: Layer) -> Any:
    with torch.no_grad():
        hidden = layer(1, layer(0, hidden))
    return layer(3, layer(2, hidden))


def branched(hidden: Any, layer: Layer) -> Any:
    left = layer(1, first := layer(0, hidden))
    return layer(3, layer(2, left + first))


def one_kept(hidden: Any, layer: Layer) -> Any:
    third = layer(2, layer(1, layer(0, hidden)))
    return layer(3, third) + third


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def by_a_function(hidden: Any, layer: Layer) -> Any:
    return layer(3, layer(2, Passing.apply(layer(1, layer(0, hidden)))))


def under_autocast(hidden: Any, layer: Layer) -> Any:
    hidden = layer(1, layer(0, hidden))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
        return layer(3, layer(2, hidden))


def under_autocast_for_a_while(hidden: Any, layer: Layer) -> Any:
    hidden = layer(0, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
        hidden = layer(2, layer(1, hidden))
    return layer(3, hidden)


def used_under_autocast(hidden: Any, layer: Layer) -> Any:
    hidden = layer(1, layer(0, hidden))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
        hidden = hidden * 2
    return layer(3, layer(2, hidden))


def later_frozen(hidden: Any, layer: Layer) -> Any:
    first = layer(0, hidden)
    with torch.no_grad():
        hidden = layer(2, layer(1, first))
    return layer(3, hidden) + first


def used_without_gradients(hidden: Any, layer: Layer) -> Any:
    first = layer(0, hidden)
    with torch.no_grad():
        scale = first.square().mean()
    return layer(3, layer(2, layer(1, first))) * scale


def with_other_tables(hidden: Any, layer: Layer) -> Any:
    for number in range(NUM_LAYERS):
        if number == 2:
            layer.__self__.rope = tuple(each * 0.5 for each in layer.__self__.rope)  # type: ignore[attr-defined]
        hidden = layer(number, hidden)
    return hidden


def with_a_mask(hidden: Any, layer: Any) -> Any:
    for number in range(NUM_LAYERS):
        mask = {"attention_mask": torch.eye(12)[None, None] * -5.0} if number == 2 else {}
        hidden = layer(number, hidden, **mask)
    return hidden


def with_edited_tables(hidden: Any, layer: Layer) -> Any:
    hidden = layer(1, layer(0, hidden))
    layer.__self__.rope[0].mul_(0.5)  # type: ignore[attr-defined]
    return layer(3, layer(2, hidden))


CODES: dict[str, tuple[Code, type[PorosError] | None]] = {
    "passed on": (passed_on, None),
    "used": (used, None),
    "looked at": (looked_at, None),
    "used in place": (used_in_place, None),
    "all kept": (all_kept, None),
    "skipped": (skipped, None),
    "repeated": (repeated, None),
    "disordered": (disordered, None),
    "partly without gradients": (partly_frozen, None),
    "branched": (branched, None),
    "later without gradients": (later_frozen, None),
    "used without gradients": (used_without_gradients, None),
    "under autocast": (under_autocast, UnsupportedModelError),
    "under autocast for a while": (under_autocast_for_a_while, UnsupportedModelError),
    "used under autocast": (used_under_autocast, UnsupportedModelError),
    "with other tables": (with_other_tables, None),
    "with a mask": (with_a_mask, None),
    "with edited tables": (with_edited_tables, UnsupportedModelError),
    "one kept": (one_kept, UnsupportedModelError),
    "by a function": (by_a_function, UnsupportedModelError),
}
LIBRARY = {"__name__": "transformers.written"}
"""So that what is written below is taken for a library's code."""


def as_library(code: Any) -> Code:
    return FunctionType(code.__code__, {**code.__globals__, **LIBRARY})


def with_code(model: Model, code: list[Code], is_known: bool = True) -> Model:
    """A model whose layers are called by the last of ``code``."""
    holder = model.base_model.model.model
    space: dict[str, Any] = {"code": code, "torch": torch, "Output": BaseModelOutputWithPast}
    exec(
        "def forward(self, input_ids=None, attention_mask=None, **kwargs):\n"
        "    hidden = self.embed_tokens(input_ids)\n"
        "    places = torch.arange(hidden.shape[1])[None]\n"
        "    rope = self.rotary_emb(hidden, places)\n"
        "    call = Calls(self.layers, rope).call\n"
        "    return Output(last_hidden_state=self.norm(code[-1](hidden, call)))\n"
        "class Calls:\n"
        "    def __init__(self, layers, rope):\n"
        "        self.layers, self.rope = layers, rope\n"
        "    def call(self, number, hidden, **more):\n"
        "        return self.layers[number](hidden, position_embeddings=self.rope, **more)\n",
        space | (LIBRARY if is_known else {}),
        space,
    )
    kind = type(holder)
    written = type(kind.__name__, (kind,), {"forward": space["forward"]})
    written.__module__ = kind.__module__
    space["forward"].__globals__.update(space)
    holder.__class__ = written
    return model


@pytest.mark.parametrize("loss", [own_loss, in_the_models_region])
@pytest.mark.parametrize("which", CODES)
def test_code_between_layers(which: str, loss: Any) -> None:
    """It does otherwise than it did from the fourth step on, and later as it did before."""
    code, error = CODES[which]
    if code is repeated and loss is in_the_models_region:
        error = UnsupportedModelError  # as without recordings: both calls share casts

    def run(model: Model, codes: list[Code]) -> list[torch.Tensor]:
        def between(model: Model, number: int) -> None:
            codes.append(as_library(code if 3 <= number < 6 else passed_on))

        options: Any = {**ONE_LENGTH, "sizes": (2,) * 9}
        return train(model, between=between, loss=loss, **options)

    codes: list[Code] = [passed_on]
    model = kept(with_code(make(), codes))
    if error is not None:
        with pytest.raises(error, match=r"cuda_graphs=False|no other call of a layer"):
            run(model, codes)
        assert num_joined(model) > 0
        return
    other: list[Code] = [passed_on]
    assert same(run(model, codes), run(with_code(make(), other), other))
    assert num_joined(model) > 0


def test_code_of_no_library_has_its_layers_run_one_by_one() -> None:
    codes: list[Code] = [passed_on]
    model = kept(with_code(make(), codes, is_known=False))
    assert same(
        train(model, **ONE_LENGTH),
        train(with_code(make(), codes), **ONE_LENGTH),
    )
    assert num_joined(model) == 0 and poros.runtime(model).captures.num_replays > 0


def test_layers_that_are_called_behind_a_pass_do_not_wait() -> None:
    """By code that may do anything between them."""
    model, batch = prepared_and_joined()
    given: list[Any] = []
    hook = layers_of(model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    own_loss(model, batch).backward()
    hook.remove()
    own_loss(model, batch).backward()
    before = num_joined(model)
    (args, kwargs), *_ = given
    hidden = args[0]
    for layer in layers_of(model):
        hidden = layer(hidden, *args[1:], **kwargs)
        assert type(hidden) is torch.Tensor
    assert num_joined(model) == before


def test_nothing_holds_a_model_whose_layers_were_joined() -> None:
    """It goes with its last reference, before Python's collector runs."""
    model, _ = prepared_and_joined()
    layer = weakref.ref(layers_of(model)[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()
