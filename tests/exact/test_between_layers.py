"""Code that runs between layers whose calls wait for those behind: equal bits, or a typed error.

Of a model, of the user around its layers, and of whoever calls layers alone.
"""

import gc
import weakref
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

import poros
from poros.errors import PorosError, UnsupportedModelError
from tests.exact.recorded import (
    NUM_LAYERS,
    ONE_LENGTH,
    in_the_models_region,
    kept_in_a_row,
    num_joined,
    prepared_and_joined,
    undrawn,
)
from tests.loops import Batch, accumulated, layers_of, own_loss, same, train
from tests.replaced import Patch

Model = Any
Layer = Callable[[int, Any], Any]
"""Calls the layer of that number."""
Code = Callable[[Any, Layer], Any]


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


def with_a_mask_from_the_first_on(hidden: Any, layer: Any) -> Any:
    for number in range(NUM_LAYERS):
        hidden = layer(number, hidden, attention_mask=torch.eye(12)[None, None] * -5.0)
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
    "with a mask from the first on": (with_a_mask_from_the_first_on, None),
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


@pytest.mark.cover("values")
@pytest.mark.parametrize("loss", [own_loss, in_the_models_region])
@pytest.mark.parametrize("which", CODES)
def test_code_between_layers(which: str, loss: Any) -> None:
    """It does otherwise than it did for two steps, in which it is recorded and replayed."""
    code, error = CODES[which]
    if code is repeated and loss is in_the_models_region:
        error = UnsupportedModelError  # as without recordings: both calls share casts

    def run(model: Model, codes: list[Code]) -> list[torch.Tensor]:
        def between(model: Model, number: int) -> None:
            codes.append(as_library(code if number in (2, 3) else passed_on))

        return train(model, between=between, loss=loss, **{**ONE_LENGTH, "sizes": (2,) * 5})

    codes: list[Code] = [passed_on]
    model = kept_in_a_row(with_code(undrawn(), codes))
    if error is not None:
        with pytest.raises(error, match=r"cuda_graphs=False|no other call of a layer"):
            run(model, codes)
        assert num_joined(model) > 0
        return
    other: list[Code] = [passed_on]
    assert same(run(model, codes), run(with_code(undrawn(), other), other))
    assert num_joined(model) > 0


def test_a_layer_that_is_called_twice_in_a_region() -> None:
    """The one pair of the grid whose end depends on both."""
    test_code_between_layers("repeated", in_the_models_region)


def test_code_of_no_library_has_its_layers_run_one_by_one() -> None:
    codes: list[Code] = [passed_on]
    model = kept_in_a_row(with_code(undrawn(), codes, is_known=False))
    assert same(
        train(model, **ONE_LENGTH),
        train(with_code(undrawn(), codes), **ONE_LENGTH),
    )
    assert num_joined(model) == 0 and poros.runtime(model).captures.num_replays > 0


def logged(patch: Patch, model: Model) -> None:
    """Somebody looks at what each layer gives, without gradients."""
    genuine = nn.Module._wrapped_call_impl

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = genuine(self, *args, **kwargs)
        if hasattr(self, "self_attn"):
            with torch.no_grad():
                result.norm()
        return result

    patch.setattr(type(layers_of(model)[0]).__mro__[-2], "__call__", call)


def in_a_list_of_its_own(patch: Patch, model: Model) -> None:
    """Each layer is edited when it has run, in a way that PyTorch does not count."""

    class Editing(nn.ModuleList):
        def __iter__(self) -> Any:
            for layer in super().__iter__():
                yield layer
                next(each for each in layer.parameters() if each.requires_grad).data.mul_(0.5)

        def __getitem__(self, which: Any) -> Any:
            found = super().__getitem__(which)
            return Editing(found) if isinstance(which, slice) else found

    layers_of(model).__class__ = Editing


AROUND: dict[str, Callable[[Patch, Model], None]] = {
    "calls are logged": logged,
    "layers are edited": in_a_list_of_its_own,
}


@pytest.mark.parametrize("which", AROUND)
def test_code_of_the_user_around_layers(which: str, monkeypatch: Patch) -> None:
    model, resident = kept_in_a_row(undrawn()), undrawn()
    train(model, **ONE_LENGTH)
    train(resident, **ONE_LENGTH)
    before = num_joined(model)
    assert before > 0
    AROUND[which](monkeypatch, resident)
    AROUND[which](monkeypatch, model)
    assert same(train(model, **ONE_LENGTH), train(resident, **ONE_LENGTH))
    assert num_joined(model) == before


def as_usual(model: Model, batch: Batch) -> None:
    own_loss(model, batch).backward()


def in_a_group(model: Model, batch: Batch) -> None:
    accumulated(model, [batch] * 3, own_loss, together=True)


def interrupted(model: Model, batch: Batch) -> None:
    def stop(*_: object) -> None:
        raise ValueError

    hook = model.base_model.model.model.norm.register_forward_pre_hook(stop)
    with pytest.raises(ValueError):
        own_loss(model, batch)
    hook.remove()


@pytest.mark.parametrize("last", [as_usual, in_a_group, interrupted])
def test_layers_that_are_called_behind_a_pass_do_not_wait(
    last: Callable[[Model, Batch], None],
) -> None:
    """By code that may do anything between them."""
    model, batch = prepared_and_joined()
    given: list[Any] = []
    hook = layers_of(model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    own_loss(model, batch).backward()
    hook.remove()
    last(model, batch)
    before = num_joined(model)
    (args, kwargs), *_ = given
    hidden = args[0]
    for layer in layers_of(model):
        hidden = layer(hidden, *args[1:], **kwargs)
        assert type(hidden) is torch.Tensor
    assert num_joined(model) == before


def at_the_fourth_call() -> Callable[..., bool]:
    numbers = count()

    def has_hooks(*modules: Any) -> bool:
        if next(numbers) == 3:
            raise KeyboardInterrupt
        return False

    return has_hooks


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_nothing_holds_a_model_whose_layers_were_joined(
    is_interrupted: bool, monkeypatch: Patch
) -> None:
    """It goes with its last reference, before Python's collector runs."""
    model, batch = prepared_and_joined()
    if is_interrupted:  # while calls wait
        monkeypatch.setattr("poros.replay.segment.has_hooks", at_the_fourth_call())
        with pytest.raises(KeyboardInterrupt):
            own_loss(model, batch)
    layer = weakref.ref(layers_of(model)[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()
