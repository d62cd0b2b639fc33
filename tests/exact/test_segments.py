"""Kept layers in a row that are replayed in one go: equal bits, or a typed error.

Calls of layers wait for that of the last one, and the model's code is handed tensors without values
meanwhile. What recordings leave is poisoned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import poros
from poros.errors import RematerializationError
from tests.exact.recorded import (
    NUM_LAYERS,
    ONE_LENGTH,
    in_the_models_region,
    kept_in_a_row,
    num_joined,
    prepared_and_joined,
    undrawn,
)
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
)

Model = Any

# ------------------------------------------------------------------ models and modes


@pytest.mark.cover("values")
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "qwen3", "mistral"])
def test_layers_in_a_row_are_replayed_in_one_go(architecture: str, padded: bool) -> None:
    """Gemma's layers are given two masks, in turns."""
    run = partial(train, padded=padded, **ONE_LENGTH)
    make = partial(undrawn, architecture, quantize=True)
    model = kept_in_a_row(make())
    assert same(run(model), run(make()))
    # Two steps until all is known: forwards and backwards of the others.
    assert num_joined(model) >= 2 * NUM_LAYERS * 2 * 2


def test_another_length_is_recomputed() -> None:
    run = partial(train, **{**ONE_LENGTH, "sizes": (3,) * 5, "lengths": (12, 12, 9)})
    model = kept_in_a_row(undrawn())
    assert same(run(model), run(undrawn()))
    assert num_joined(model) > 0


@pytest.mark.parametrize("num_layers", [9, 10])
def test_long_models_are_several_segments(num_layers: int) -> None:
    """At most eight layers are joined; a single one is replayed by itself."""
    build = partial(undrawn, num_layers=num_layers)
    model = kept_in_a_row(build(), num_layers)
    assert same(train(model, **ONE_LENGTH), train(build(), **ONE_LENGTH))
    captures = poros.runtime(model).captures
    alone = num_layers % 8 == 1
    assert captures.rows.num_joined >= 2 * 2 * 2 * (num_layers - alone)


def in_a_region(model: Model, batch: Batch) -> torch.Tensor:
    with bf16():
        return own_loss(model, batch)


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
    model = kept_in_a_row(undrawn())
    assert same(run(model), run(undrawn()))
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


@pytest.mark.cover("values")
@pytest.mark.parametrize("loss", [in_the_models_region, own_loss])
@pytest.mark.parametrize("which", ADAPTERS)
def test_adapters(which: str, loss: Any) -> None:
    options, policy, reference, is_joined = ADAPTERS[which]
    run = partial(train, loss=loss, **ONE_LENGTH)
    model = kept_in_a_row(adapted(**options), 2, **policy)
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
    model = kept_in_a_row(undrawn())
    found = train(model, between=hooked(orders[0]), **ONE_LENGTH)
    assert same(found, train(undrawn(), between=hooked(orders[1]), **ONE_LENGTH))
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


def test_what_changes_between_steps() -> None:
    # An optimizer's state is made for the adapters of before.
    options: Any = {**ONE_LENGTH, "sizes": (2,) * 12}
    run = partial(train, between=changed, **options)
    model = kept_in_a_row(undrawn())
    assert same(run(model), run(undrawn()))
    assert num_joined(model) > 0


def test_layers_that_begin_to_draw() -> None:
    """Joined in evaluation mode, with gradients; from the fifth step on in training mode."""

    def between(model: Model, number: int) -> None:
        model.train(number >= 4)

    run = partial(train, between=between, **{**ONE_LENGTH, "sizes": (2,) * 7})
    model = kept_in_a_row(adapted(lora_dropout=0.1), 2)
    assert same(run(model), run(adapted(lora_dropout=0.1)))
    assert num_joined(model) > 0


# ------------------------------------------------------------------------ backwards


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
    resident = undrawn()
    train(resident, **ONE_LENGTH)
    before = num_joined(model)
    assert same(run(model, batch), run(resident, batch))
    assert num_joined(model) == before + 2 * number


def edit(model: Model, number: int = 5) -> None:
    with torch.no_grad():
        trained(model)[number].mul_(2)


def replace_a_module(model: Model) -> None:
    """Behind which the backward is seen, so that it goes layer by layer."""
    layers_of(model)[1].mlp.act_fn = torch.nn.ReLU()
    watched(model, model.loss)


def second_order(model: Model) -> None:
    torch.autograd.grad(model.loss, trained(model)[0], create_graph=True)


@pytest.mark.parametrize("act", [edit, second_order, replace_a_module])
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
