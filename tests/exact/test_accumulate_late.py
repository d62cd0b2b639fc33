"""What code does to gradients, layers and settings in rare places: equal bits, or an error.

Each row from the first step on, when micro-batches run one after the other for a reason, and from
the second step on, when they have gone together.
"""

import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from poros.accumulation.distributed import Ranks
from poros.accumulation.loop import Samples, Step
from poros.accumulation.micro_batch import MicroBatch
from poros.errors import UnsupportedModelError
from poros.model.runtime import find_runtime
from tests.exact.recorded import on_tapes
from tests.loops import (
    Batch,
    Loss,
    Training,
    accumulated,
    adapted,
    dense,
    ends,
    ends_so,
    later,
    layers_of,
    micro_batches,
    of,
    override,
    own_loss,
    program,
    trained,
)

Model = Any
UNSUPPORTED = UnsupportedModelError


def setting_gradients(model: Model, batch: Batch) -> torch.Tensor:
    """To a new tensor, without a look at what was there."""
    found = own_loss(model, batch)
    for each in trained(model)[:2]:
        each.grad = torch.full_like(each, 0.1)
    return found


def deleting_gradients(model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch)
    for each in trained(model)[:2]:
        del each.grad
    return found


def within_its_backward(model: Model, batch: Batch) -> torch.Tensor:
    """A hook on logits reads what the micro-batches before have left."""
    output = model(**batch, use_cache=False)
    first = trained(model)[0]
    output.logits.register_hook(
        lambda found: found if first.grad is None else found * (1 + first.grad.abs().sum())
    )
    return output.loss / 4  # type: ignore[no-any-return]


def with_settings(model: Model, batch: Batch) -> torch.Tensor:
    """A setting of matrix products that stays."""
    found = own_loss(model, batch)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction ^= True
    return found


def with_another_scaling(model: Model, batch: Batch) -> torch.Tensor:
    """One layer's attention has another one while the model runs on a batch of odd length."""
    attention = layers_of(model)[1].self_attn
    before = attention.scaling
    attention.scaling = before * (1 + batch["input_ids"].shape[1] % 2)
    try:
        return own_loss(model, batch)
    finally:
        attention.scaling = before


CHANGES = "layers that the loss changes"
LOSSES: dict[str, tuple[Loss, Any, str]] = {
    "gradients that are set": (setting_gradients, "used while", "used while"),
    "gradients that are deleted": (deleting_gradients, "used while", "used while"),
    "gradients within a backward": (within_its_backward, *["within a backward"] * 2),
    "settings that the loss changes": (with_settings, "changes settings", "settings of PyTorch"),
    "layers that the loss changes": (with_another_scaling, (UNSUPPORTED, CHANGES), CHANGES),
}


class Widening:
    """From a step on, the second of three layers returns fp32, which the third one casts back."""

    def __init__(self, since: int) -> None:
        self._is_on, self._since = False, since

    def make(self, model: Model) -> None:
        _, second, third = layers_of(model)
        override([second], self._widen)
        override(
            [third],
            lambda layer, own, hidden, *args, **given: own(hidden.bfloat16(), *args, **given),
        )

    def _widen(self, layer: Any, own: Any, hidden: torch.Tensor, *args: Any, **given: Any) -> Any:
        found: torch.Tensor = own(hidden, *args, **given)
        return found.float() if self._is_on else found

    def between(self, model: Model, step: int) -> None:
        self._is_on = step >= self._since


def widening(end: Any, since: int) -> Any:
    layers = Widening(since)
    base = partial(dense, num_layers=3)
    return program(layers.make, end, between=layers.between, sizes=(3, 3), base=base)


# What one part of the code has for another one.


class Changing:
    """The code of a loss that begins at a later step to pass a value to another part of it."""

    step, value = 0, 0.5

    def note(self, model: Model, step: int) -> None:
        self.step = step


class Smoothed(Changing):
    """What it binds behind the layers it reads before them."""

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        factor = self.value if self.step > 1 else 1.0
        found = own_loss(model, batch) * factor
        self.value = 0.9 * self.value + 0.1 * float(found.detach())
        return found


class Slotted:
    """As ``Smoothed``, with an attribute of a class that has no dictionary of these."""

    __slots__ = ("__value", "step")

    def __init__(self) -> None:
        self.step, self.__value = 0, 0.5

    def note(self, model: Model, step: int) -> None:
        self.step = step

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        factor = self.__value if self.step > 1 else 1.0
        found = own_loss(model, batch) * factor
        self.__value = 0.9 * factor + 0.1 * float(found.detach())
        return found


class Noted(Changing):
    """What it binds before the layers it reads behind them."""

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        if self.step > 1:
            self.noted = float(batch["labels"].float().mean())
        return own_loss(model, batch) * (self.noted if self.step > 1 else 1.0)


def changing(loss: Any, name: str) -> Training:
    return program(of(loss), (UNSUPPORTED, f"changes {name}"), between=loss.note, sizes=(3,) * 4)


def counted(state: dict[str, int], model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch) * (1 + state["number"])
    state["number"] += 1
    return found


def by_default(model: Model) -> Loss:
    def loss(model: Model, batch: Batch, state: dict[str, int] = {"number": 0}) -> torch.Tensor:  # noqa: B006
        return counted(state, model, batch)

    return loss


class Scaling(nn.Module):
    """With a buffer that it edits behind the layers."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, model: Model, batch: Batch) -> torch.Tensor:
        scale = self.scale.clone()
        found = own_loss(model, batch) * scale
        self.scale.add_(0.1)
        return found


class Sharing:
    """The batches of a step have one tensor."""

    number = 0

    def form(self, batch: Batch) -> BatchEncoding:
        if self.number % 3 == 0:
            self.tokens = batch["input_ids"].clone()
        self.number += 1
        return BatchEncoding({"input_ids": self.tokens, "labels": self.tokens})


def editing(model: Model, batch: Batch) -> torch.Tensor:
    """Behind the layers, what other batches have too."""
    found = own_loss(model, batch)
    batch["input_ids"].add_(1)
    return found


PASSED = {
    "a value that the layers begin to get": changing(Smoothed(), "value"),
    "a value in a slot": changing(Slotted(), "_Slotted__value"),
    "a value that the layers begin to give": changing(Noted(), "noted"),
    "a default": program(by_default, "changes default 0"),
    "an argument of a partial": program(
        lambda model: partial(counted, {"number": 0}), "changes 0 before"
    ),
    "a buffer": program(lambda model: Scaling(), "changes scale"),
    "a tensor of all batches": program(
        of(editing), "changed before its turn", form=Sharing().form, sizes=(3, 3)
    ),
    "a tensor of all batches, later": later(
        editing, (UNSUPPORTED, "changed before its turn"), form=Sharing().form
    ),
}

PROGRAMS = {
    **PASSED,
    **{name: program(of(loss), why) for name, (loss, why, _) in LOSSES.items()},
    **{
        f"{name}, later": later(loss, (UNSUPPORTED, says))
        for name, (loss, _, says) in LOSSES.items()
    },
    "hidden states of another dtype": widening("change their form", 0),
    "hidden states of another dtype, later": widening((UNSUPPORTED, "change their form"), 1),
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str) -> None:
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        assert ends(PROGRAMS[which])
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


# Between two micro-batches of a group.


def between_two(model: Model, together: bool, act: Any, loss: Any = own_loss) -> Any:
    facts: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(2)

    def run(batch: Batch) -> torch.Tensor:
        value = loss(model, batch)
        value.backward()
        return value.detach()  # type: ignore[no-any-return]

    for number in range(5):
        batches = micro_batches(4, generator, (12,))
        step = Step(lambda: find_runtime(model), Ranks(model), run, [loss])
        samples = Samples(batches)
        try:
            for place, batch in enumerate(batches):
                facts.append(samples.take(step, place == 3) if together else run(batch))
                if place == 1 and number > 1:
                    facts += act(model, together) or []
        finally:
            samples.finish()
        facts += [each.grad.clone() for each in trained(model)]
        model.zero_grad()
    return facts


def within(model: Model, together: bool) -> list[torch.Tensor]:
    """Others, and a look at all gradients."""
    others = micro_batches(2, torch.Generator().manual_seed(7), (12,))
    facts = accumulated(model, others, own_loss, together)
    return [*facts, *(each.grad.clone() for each in trained(model))]


def saved(model: Model, together: bool) -> None:
    torch.save(dict(model.named_parameters()), io.BytesIO())


class Flagged:
    """Reads what somebody else changes."""

    factor = 1.0

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        factor = self.factor
        return own_loss(model, batch) * factor

    def change(self, model: Model, together: bool) -> None:
        self.factor = 2.0


FLAGGED = Flagged()
BETWEEN: dict[str, tuple[Callable[..., Any], Loss, Any]] = {
    "others": (within, own_loss, "micro-batches within micro-batches"),
    "parameters are saved": (saved, own_loss, None),
    "what a loss has read changes": (FLAGGED.change, FLAGGED, (UNSUPPORTED, "changes behind")),
}


@pytest.mark.parametrize("which", BETWEEN)
def test_between(which: str) -> None:
    act, loss, end = BETWEEN[which]
    model, run = on_tapes(adapted(), slots=2), partial(between_two, act=act, loss=loss)
    assert ends_so(model, partial(run, model, True), end, partial(run, adapted(), together=False))


def test_nothing_of_a_group_is_left_whose_backward_has_raised() -> None:
    def edit(model: Model, together: bool) -> None:
        trained(model)[0].data = trained(model)[0].data.clone()
        with torch.no_grad():
            trained(model)[1].mul_(2)
        assert trained(model)[0].grad is None

    with pytest.raises(UnsupportedModelError, match="edits, freezes or thaws"):
        between_two(on_tapes(adapted(), slots=2), True, edit)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, MicroBatch)]
