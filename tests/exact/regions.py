"""Programs within autocast regions: whose one cast of an adapter decides when its gradient arrives.

Their gradients also meet others there, of penalties and of further forwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.exact.arms import Model, Program
from tests.exact.programs import Context, loss_of, trained
from tests.snapshots import bf16


def uncached() -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def region(model: Model) -> None:
    """A forward in it, and its backward behind it."""
    with bf16():
        loss = loss_of(model)
    loss.backward()


def half(model: Model) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model)
    loss.backward()


def without_a_cache(model: Model) -> None:
    with uncached():
        loss = loss_of(model)
    loss.backward()
    region(model)


@contextmanager
def accelerated(model: Model) -> Iterator[None]:
    """The forward of the model is a region of its own, as Accelerate makes it."""
    own = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(own)
    try:
        yield
    finally:
        del model.forward


def own_region(model: Model) -> None:
    with accelerated(model):
        loss_of(model).backward()
        loss_of(model, 1).backward()


def matrices(model: Model) -> list[torch.Tensor]:
    return [each for name, each in model.named_parameters() if "lora_A" in name]


def penalty(model: Model) -> torch.Tensor:
    """In reverse, so that the casts of a region are not made in the order of the layers."""
    terms = [(each @ each.T).square().sum() for each in reversed(matrices(model))]
    return 0.1 * torch.stack(terms).sum()


def behind_a_penalty(model: Model) -> None:
    with bf16():
        penalty(model).backward()
        loss = loss_of(model)
    loss.backward()


def beside_a_penalty(model: Model) -> None:
    with bf16():
        loss, other = loss_of(model), penalty(model)
    loss.backward()
    other.backward()


def behind_an_evaluation(model: Model) -> None:
    with bf16():
        with torch.no_grad():
            loss_of(model)
        loss = loss_of(model)
    loss.backward()


# Adapters under autocast whose gradients meet others.


def with_penalty(term: Callable[[Model], torch.Tensor], forward: Context = bf16) -> Program:
    def program(model: Model) -> None:
        with forward():
            loss = loss_of(model) + term(model)
        loss.backward()

    return program


def penalty_first(model: Model) -> None:
    with bf16():
        loss = penalty(model)
        loss = loss + loss_of(model)
    loss.backward()


def penalty_outside(model: Model) -> None:
    with bf16():
        loss = loss_of(model)
    (loss + penalty(model)).backward()


def regions_of_their_own(model: Model) -> None:
    losses = []
    for term in (loss_of, partial(loss_of, number=1), penalty):
        with bf16():
            losses.append(term(model))
    torch.stack(losses).sum().backward()


def penalty_by_accelerate(model: Model) -> None:
    """The forward of the model is a region; the penalty is computed behind it."""
    with accelerated(model):
        (loss_of(model) + penalty(model)).backward()


def retained(model: Model) -> None:
    """The first forward has had its backward, and takes part in another."""
    with bf16():
        first = loss_of(model)
        first.backward(retain_graph=True)
        second = loss_of(model, 1)
    (first + second).backward()


def updates_in_one_region(
    model: Model, fused: bool, lr: float = 1e-2, numbers: tuple[int, ...] = (0, 1)
) -> None:
    """The whole training within one region, on batches of these numbers."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=lr, fused=fused)
    with bf16():
        for number in numbers:
            loss_of(model, number).backward()
            optimizer.step()
