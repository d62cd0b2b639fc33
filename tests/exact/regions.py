"""Programs within autocast regions: whose one cast of an adapter decides when its gradient arrives.

Their gradients also meet others there, of penalties and of further forwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.exact.arms import Model, Program
from tests.exact.programs import Context, gradients_now, loss_of, trained
from tests.snapshots import bf16, layers_of


def uncached() -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@contextmanager
def noisy_hooks(model: Model) -> Iterator[list[str]]:
    """What hooks on parameters and on layers see, each of which draws noise as well."""
    seen: list[str] = []
    handles = []

    def noisy(name: str, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return gradient + 1e-3 * torch.randn_like(gradient)

    for name, each in trained(model).items():
        handles.append(each.register_hook(lambda gradient, n=name: noisy(n, gradient)))
    for number, layer in enumerate(layers_of(model)):

        def of_layer(_: Any, given: Any, n: int = number) -> Any:
            return (noisy(f"layer {n}", given[0]), *given[1:])

        handles.append(layer.register_full_backward_pre_hook(of_layer))
    yield seen
    for handle in handles:
        handle.remove()


def region(model: Model) -> None:
    """A forward in it, and its backward behind it."""
    with bf16():
        loss = loss_of(model)
    loss.backward()


def several(model: Model) -> None:
    """With a mask and without one, so that graphs differ."""
    with bf16():
        for number in (0, 1, 0):
            loss_of(model, number).backward()


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


def powers(model: Model) -> torch.Tensor:
    """In full precision everywhere."""
    return torch.stack([each.pow(2).sum() + each.norm() for each in matrices(model)]).sum()


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


def twice(model: Model) -> None:
    with bf16():
        loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def in_evaluation_mode(model: Model) -> None:
    """DoRA remembers its norms there."""
    model.eval()
    several(model)
    region(model)
    model.train()
    region(model)


def by_grad(model: Model) -> None:
    parameters = list(trained(model).values())
    with bf16():
        loss = loss_of(model)
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.autograd.grad(loss, parameters[3])
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def on_the_host(model: Model) -> None:
    with torch.autograd.graph.save_on_cpu():
        region(model)


def with_hooks_inside(model: Model) -> None:
    handles = [
        module.register_forward_hook(lambda _, args, output: 1.5 * output)
        for layer in layers_of(model)
        for module in (layer.mlp, layer.self_attn.q_proj)
    ]
    several(model)
    for each in handles:
        each.remove()


REGIONS: list[Callable[[Model], None]] = [
    region,
    several,
    half,
    without_a_cache,
    own_region,
    behind_a_penalty,
    beside_a_penalty,
    behind_an_evaluation,
    twice,
    in_evaluation_mode,
    by_grad,
    with_hooks_inside,
]


def in_order(program: Program) -> Program:
    """The program, the order in which its gradients arrive, and that of a region behind it.

    What a region leaves behind must not matter in the next.
    """

    def observed(model: Model) -> object:
        with noisy_hooks(model) as seen:
            program(model)
        assert len(seen) > 20
        first = gradients_now(model), torch.get_rng_state()
        with noisy_hooks(model) as next_seen:
            region(model)
        return [*first, seen, next_seen]

    return observed


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


def forwards_in_one_region(model: Model) -> None:
    with bf16():
        loss = loss_of(model) + loss_of(model, 1)
    loss.backward()


def forwards_in_two_regions(model: Model) -> None:
    losses = []
    for number in (0, 1):
        with bf16():
            losses.append(loss_of(model, number))
    torch.stack(losses).sum().backward()


def backwards_in_one_region(model: Model) -> None:
    """The first loss is kept, and with it what its layers have written down."""
    losses = []
    with bf16():
        for number in (0, 1):
            losses.append(loss_of(model, number))
            losses[-1].backward()


def updates_in_one_region(
    model: Model, fused: bool, lr: float = 1e-2, numbers: tuple[int, ...] = (0, 1)
) -> None:
    """The whole training within one region, on batches of these numbers."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=lr, fused=fused)
    with bf16():
        for number in numbers:
            loss_of(model, number).backward()
            optimizer.step()
