"""What code does to gradients, layers and settings in rare places: equal bits, or an error.

Each row from the first step on, when micro-batches run one after the other for a reason, and from
the second step on, when they have gone together.
"""

from functools import partial
from typing import Any

import pytest
import torch

from poros.errors import UnsupportedModelError
from tests.loops import (
    Batch,
    Loss,
    dense,
    ends,
    later,
    layers_of,
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


LOSSES: dict[str, tuple[Loss, str, str]] = {
    "gradients that are set": (setting_gradients, "used while", "used while"),
    "gradients that are deleted": (deleting_gradients, "used while", "used while"),
    "gradients within a backward": (within_its_backward, *["within a backward"] * 2),
    "settings that the loss changes": (with_settings, "changes settings", "settings of PyTorch"),
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


PROGRAMS = {
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
