"""Code of a loss that ends early or in error, or whose context layers and backwards depend on.

Each program runs resident, one micro-batch after the other, and prepared, in groups.
"""

from contextvars import ContextVar
from typing import Any

import pytest
import torch

from poros.accumulation.group import Group
from poros.accumulation.parked import ParkedCode
from poros.errors import UnsupportedModelError
from tests.exact.arms import Bases
from tests.exact.together import (
    Batch,
    Control,
    Loss,
    build,
    ends,
    layers,
    of,
    override,
    own_loss,
    program,
    trained,
)

Model = Any
pytestmark = pytest.mark.usefixtures("known")


def skipping(model: Model, batch: Batch) -> torch.Tensor:
    """Draws, and calls no model for some."""
    if batch["input_ids"].shape[1] == 5:
        torch.rand(3)
        return torch.zeros((), requires_grad=True)
    return own_loss(model, batch)


def raising(place: int) -> Any:
    """A layer raises for some; the loss goes on without the model then."""

    def forward(mlp: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] == 5:
            raise ValueError
        found: torch.Tensor = own(hidden)
        return found

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        try:
            return own_loss(model, batch)
        except ValueError:
            torch.rand(3)
            return torch.zeros((), requires_grad=True)

    def make(model: Model) -> Loss:
        override([layers(model)[place].mlp], forward)
        return loss

    return make


SCALE = ContextVar("SCALE", default=1.0)


def scaled(mlp: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = own(hidden) * SCALE.get()
    return found


def with_a_context(model: Model) -> Loss:
    """Layers read a context variable that the loss has set."""
    override([layers(model)[1].mlp], scaled)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        token = SCALE.set(1 + batch["input_ids"].shape[1] / 16)
        try:
            return own_loss(model, batch)
        finally:
            SCALE.reset(token)

    return loss


def half(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient * 0.5


def hooked_backward(model: Model, batch: Batch) -> torch.Tensor:
    """A hook on an adapter, around a backward of the loss."""
    found = own_loss(model, batch)
    handle = trained(model)[0].register_hook(half)
    found.backward()
    handle.remove()
    return torch.zeros((), requires_grad=True)


def backward_in_a_region(model: Model, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own_loss(model, batch).backward()
    return torch.zeros((), requires_grad=True)


def prompted(model: Model) -> Loss:
    """A trained prompt that is not the model's, with a penalty."""
    width = model.config.hidden_size
    prompt = torch.nn.Parameter(torch.linspace(-0.1, 0.1, 2 * width).view(1, 2, width))

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        first = prompt.to(embedded.dtype).expand(len(embedded), -1, -1)
        scale = 1.0 if prompt.grad is None else 1 + float(prompt.grad.norm())
        logits = model(inputs_embeds=torch.cat([first, embedded], 1), use_cache=False).logits
        found: torch.Tensor = logits.float().square().mean() * scale
        return found + prompt.square().sum()

    return loss


PROGRAMS = {
    "no model for some": program(of(skipping), lengths=(12, 9, 5, 7), sizes=(3, 4, 3)),
    "an error of the first layer": program(raising(0), lengths=(12, 9, 5, 7), sizes=(3, 4, 3)),
    "an error of a later layer": program(
        *(raising(1), (UnsupportedModelError, "its code catches")),
        lengths=(12, 9, 5, 7),
        sizes=(4, 3),
    ),
    "a context variable": program(with_a_context),
    "a hook around its own backward": program(of(hooked_backward), "hooks on parameters"),
    "its own backward in a region": program(
        of(backward_in_a_region),
        "a backward within an autocast region",
        base=lambda bases: build(bases, quantize=False, dtype=torch.float32),
    ),
    "a prompt of its own": program(prompted, "not the model's"),
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str, bases: Bases) -> None:
    assert ends(PROGRAMS[which], bases)


def without_states(group: Any, genuine: Any = Group.finish_behind) -> Any:
    """Code that is over leaves the random states of whoever asks."""
    batch = group.behind
    if not batch.code.is_over:
        return genuine(group)
    group.behind = None
    return batch.code.result


CONTROLS = {
    "layers outside the context of the code": Control(
        ParkedCode, "run_in_context", lambda self, run: run(), PROGRAMS["a context variable"]
    ),
    "random states of code that is over": Control(
        *(Group, "finish_behind", without_states), PROGRAMS["no model for some"]
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONTROLS[which].is_seen(bases, monkeypatch)
