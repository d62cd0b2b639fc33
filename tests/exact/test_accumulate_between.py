"""What a model or a loss does around single layers, from the start or from some step on.

Micro-batches that go together must end with the bits of one after the other, or with a typed error.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import poros
from poros.accumulation.micro_batch import MicroBatch
from poros.errors import RematerializationError, UnsupportedModelError
from tests.exact.arms import Bases
from tests.exact.together import (
    Batch,
    Loss,
    Rows,
    build,
    layers,
    num_groups,
    own_loss,
    reasons,
    same,
    train,
    trained,
)
from tests.support import prepare_plain

Model = Any
Call = Callable[[int, Any, torch.Tensor, tuple[Any, ...], dict[str, Any]], torch.Tensor]
SIZES = (4,) * 4
LATER = 2
"""The step from which on it is done, if not from the first."""
WHEN = pytest.mark.parametrize("since", [0, LATER], ids=["from the start", "later"])


class Loop:
    """The model's loop over its layers, which calls them by ``call`` while ``is_on``."""

    def __init__(self, model: Model, call: Call, is_on: bool = False) -> None:
        self.is_on = is_on
        stack = layers(model)
        genuine: Callable[[Any], Iterator[Any]] = stack.__class__.__iter__

        def called(number: int, layer: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                return call(number, layer, hidden, args, kwargs)
            return layer(hidden, *args, **kwargs)

        class Calls(torch.nn.ModuleList):
            def __getitem__(self, places: Any) -> Any:
                return [partial(called, number, each) for number, each in enumerate(genuine(stack))]

        stack.__class__ = Calls


def run(
    model: Model, call: Call, since: int, together: bool, loss: Loss = own_loss
) -> list[torch.Tensor]:
    loop = Loop(model, call)

    def between(model: Model, step: int) -> None:
        loop.is_on = step >= since

    return train(model, together, sizes=SIZES, between=between, loss=loss)


def in_evaluation_mode(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    layer.train(number != 1)
    try:
        return layer(hidden, *args, **kwargs)
    finally:
        layer.train()


def in_autocast(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
        return layer(hidden, *args, **kwargs)


def with_a_seed(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    if number != 1:
        return layer(hidden, *args, **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return layer(hidden, *args, **kwargs)


CALLS: dict[str, tuple[Call, str]] = {
    "a layer in evaluation mode": (in_evaluation_mode, "change"),
    "a layer in autocast": (in_autocast, "changes autocast or settings"),
    "a layer with a seed of its own": (with_a_seed, "draws random numbers between"),
}


@WHEN
@pytest.mark.parametrize("which", CALLS)
def test_around_one_layer(which: str, since: int, bases: Bases) -> None:
    call, reason = CALLS[which]
    expected = run(prepare_plain(build(bases), slots=2), call, since, False)
    model = prepare_plain(build(bases), slots=2)
    assert same(run(model, call, since, True), expected)
    assert any(reason in each for each in reasons(model)), reasons(model)


@pytest.mark.parametrize("which", [in_autocast, with_a_seed])
def test_control_surroundings_that_nobody_looks_at(
    which: Call, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(prepare_plain(build(bases), slots=2), which, LATER, False)
    monkeypatch.setattr(MicroBatch, "_require_same_around", lambda self: None)
    model = prepare_plain(build(bases), slots=2)
    assert not same(run(model, which, LATER, True), expected)


# A loss whose computation begins anew finds its batch as it was.


def penalty(model: Model) -> torch.Tensor:
    """On adapters themselves: seen when the loss has been computed."""
    found: torch.Tensor = sum(each.square().sum() for each in trained(model))  # type: ignore[assignment]
    return 0.1 * found


def editing(model: Model, batch: Batch) -> torch.Tensor:
    batch["input_ids"].add_(1)
    return own_loss(model, batch) + penalty(model)


def taking_out(model: Model, batch: Batch) -> torch.Tensor:
    labels = batch.pop("labels")
    return own_loss(model, {**batch, "labels": labels}) + penalty(model)


@pytest.mark.parametrize("loss", [editing, taking_out])
def test_a_batch_that_the_loss_has_touched(loss: Loss, bases: Bases) -> None:
    expected = train(build(bases), False, sizes=SIZES, loss=loss)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, sizes=SIZES, loss=loss), expected)
    assert any("uses parameters of layers" in each for each in reasons(model))


def test_a_trainer_whose_loss_edits_its_batch(bases: Bases, tmp_path: Path) -> None:
    def train_with(kind: type[Trainer], model: Model) -> list[torch.Tensor]:
        class Editing(kind):  # type: ignore[valid-type, misc]
            def compute_loss(self, model: Model, inputs: Batch, *args: Any, **options: Any) -> Any:
                inputs["input_ids"].add_(1)
                found = super().compute_loss(model, inputs, *args, **options)
                return found + penalty(model) if self.state.global_step >= LATER else found

        args = TrainingArguments(
            str(tmp_path / kind.__name__),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            learning_rate=1e-2,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Editing(model=model, args=args, train_dataset=Rows()).train()
        return [each.detach().clone() for each in trained(model)]

    expected = train_with(Trainer, build(bases))
    model = prepare_plain(build(bases), slots=2)
    assert same(train_with(poros.PorosTrainer, model), expected)
    assert any("uses parameters of layers" in each for each in reasons(model))
    assert num_groups(model) >= LATER


# What is refused.


def masking(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    """The mask is edited for one layer, and put back."""
    mask = kwargs["attention_mask"]
    if number != 1:
        return layer(hidden, *args, **kwargs)
    before = mask.clone()
    mask.mul_(0.0)
    found = layer(hidden, *args, **kwargs)
    mask.copy_(before)
    return found


@WHEN
def test_arguments_that_are_edited_for_one_layer(since: int, bases: Bases) -> None:
    model = prepare_plain(build(bases), slots=2)
    model.get_base_model().set_attn_implementation("eager")
    with pytest.raises(RematerializationError, match="edited in place"):
        run(model, masking, since, True)


def counting() -> Call:
    """A plain argument that says how often the code ran."""
    runs: list[int] = []

    def call(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        if number == 0:
            runs.append(1)
        return layer(hidden, *args, **{**kwargs, "is_causal": len(runs) % 3 == 1})

    return call


@WHEN
def test_plain_arguments_that_are_others_the_second_time(since: int, bases: Bases) -> None:
    model = prepare_plain(build(bases), slots=2)
    with pytest.raises(UnsupportedModelError, match="same values each time"):
        run(model, counting(), since, True)


def test_hidden_states_of_another_micro_batch(bases: Bases) -> None:
    """What layer 0 has returned at the call before, kept by the model: seen, or refused by name."""
    kept: list[torch.Tensor] = []

    def call(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        if number == 1:
            before = kept[-1] if kept else hidden
            kept.append(hidden)
            hidden = before if before.shape == hidden.shape else hidden
        return layer(hidden, *args, **kwargs)

    model = build(bases)
    for name, parameter in model.named_parameters():
        if ".layers.0." in name:
            parameter.requires_grad_(False)
    prepare_plain(model, slots=2)
    with pytest.raises(UnsupportedModelError, match="some that were kept"):
        train(model, lengths=(12,), sizes=SIZES)
        kept.clear()
        loop = Loop(model, call, is_on=True)
        assert loop.is_on
        train(model, lengths=(12,), sizes=SIZES)


def test_kept_layers_that_are_given_an_object_that_changes(bases: Bases) -> None:
    class State:
        scale = 1.0

    def scaled(model: Model) -> Model:
        own: Any = type(layers(model)[0])

        class Scaled(own):
            def forward(self, hidden_states: Any, *args: Any, state: Any = None, **kw: Any) -> Any:
                found = super().forward(hidden_states, *args, **kw)
                return found if state is None else found * state.scale

        Scaled.__name__, Scaled.__qualname__, Scaled.__module__ = (
            *(own.__name__, own.__qualname__),
            own.__module__,
        )
        for layer in layers(model):
            layer.__class__ = Scaled
        return model

    state = State()

    def call(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        state.scale = 1.0 + number / 8
        return layer(hidden, *args, state=state, **kwargs)

    expected = run(scaled(build(bases)), call, LATER, False)
    number = len(layers(build(bases)))
    model = prepare_plain(scaled(build(bases)), slots=2, keep_last=number)
    assert same(run(model, call, LATER, True), expected)
    assert any("objects that may change" in each for each in reasons(model))
