"""Gradients within an autocast region, whose one cast of an adapter decides when they arrive."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from snapshots import batches, bf16, build, changes, layers_of, outcome
from torch import nn

import poros
from poros.layer import early
from poros.layer.casts import SharedCasts
from tests.adapted import lora, names_of

Model = Any
Program = Callable[[Model], None]

MODELS: dict[str, Callable[[], Model]] = {
    "lora": lambda: build(dropout=0.0, dtype=torch.float32),
    "lora_bias": lora(lora_bias=True),
    "dora": lora(use_dora=True),
    "dora, norms": lora(use_dora=True, modules_to_save=["post_attention_layernorm"]),
}


def loss_of(model: Model, number: int = 0) -> torch.Tensor:
    return model(**batches()[number]).loss  # type: ignore[no-any-return]


def penalty(model: Model) -> torch.Tensor:
    """In reverse, so that the casts of a region are not made in the order of the layers."""
    matrices = [each for name, each in model.named_parameters() if "lora_A" in name]
    return 0.1 * torch.stack([(each @ each.T).square().sum() for each in reversed(matrices)]).sum()


def one(model: Model) -> None:
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
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = loss_of(model)
    loss.backward()
    one(model)


def own_region(model: Model) -> None:
    """As Accelerate does it."""
    own = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(own)
    try:
        loss_of(model).backward()
        loss_of(model, 1).backward()
    finally:
        del model.forward


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
    one(model)
    model.train()
    one(model)


def by_grad(model: Model) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    with bf16():
        loss = loss_of(model)
    found = torch.autograd.grad(loss, trained, retain_graph=True)
    torch.autograd.grad(loss, trained[3])
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.grad = gradient


def on_the_host(model: Model) -> None:
    with torch.autograd.graph.save_on_cpu():
        one(model)


def with_hooks_inside(model: Model) -> None:
    handles = [
        module.register_forward_hook(lambda _, args, output: 1.5 * output)
        for layer in layers_of(model)
        for module in (layer.mlp, layer.self_attn.q_proj)
    ]
    several(model)
    for each in handles:
        each.remove()


PROGRAMS: list[Program] = [
    one,
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
    on_the_host,
    with_hooks_inside,
]


@contextmanager
def events(model: Model) -> Iterator[list[str]]:
    """What hooks on parameters and on layers see, each of which draws noise as well."""
    names, seen, handles = names_of(model), [], []

    def noisy(name: str, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return gradient + 1e-3 * torch.randn_like(gradient)

    for each in model.parameters():
        if each.requires_grad:
            name = names[id(each)]
            handles.append(each.register_hook(lambda g, n=name: noisy(n, g)))
    for number, layer in enumerate(layers_of(model)):

        def of_layer(_: Any, given: Any, n: int = number) -> Any:
            return (noisy(f"layer {n}", given[0]), *given[1:])

        handles.append(layer.register_full_backward_pre_hook(of_layer))
    yield seen
    for handle in handles:
        handle.remove()


def seen_in(model: Model, program: Program) -> tuple[list[str], dict[str, object]]:
    model.train()
    torch.manual_seed(0)
    with events(model) as seen:
        program(model)
    return seen, outcome(model)


@pytest.mark.parametrize("self_check", ["strict", "off"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("which", MODELS)
def test_gradients_arrive_when_those_of_a_resident_run_do(
    which: str, program: Program, self_check: str
) -> None:
    expected, resident = seen_in(MODELS[which](), program)
    model = poros.prepare(MODELS[which](), self_check=self_check, allow_unvalidated=True)
    found, streamed = seen_in(model, program)
    assert found == expected and len(expected) > 20
    assert changes(resident, streamed) == {}
    # What a region leaves behind must not matter in the next.
    assert seen_in(MODELS[which](), one)[0] == seen_in(model, one)[0]


def test_without_the_casts_of_the_region_the_order_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedCasts, "through", lambda self, parameter: parameter[...])
    for program in (several, behind_a_penalty, behind_an_evaluation, beside_a_penalty):
        expected, found = (
            seen_in(each, program)[0]
            for each in (MODELS["lora"](), poros.prepare(MODELS["lora"]()))
        )
        assert found != expected, program.__name__


def test_without_watching_the_order_of_dora_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early.EarlyCasts, "are_possible", lambda *_: False)
    for program in (one, own_region, with_hooks_inside):
        expected, found = (
            seen_in(each, program)[0]
            for each in (MODELS["dora"](), poros.prepare(MODELS["dora"]()))
        )
        assert found != expected, program.__name__


@pytest.mark.parametrize(("which", "expected"), [("lora", 3), ("dora", 9)])
def test_only_layers_that_cast_early_are_watched_for_good(
    which: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []
    genuine = early.first_casts

    def first_casts(tensors: Any) -> Any:
        watched.extend([len(tensors)] if len(tensors) else [])
        return genuine(tensors)

    monkeypatch.setattr("poros.layer.call.first_casts", first_casts)
    model = poros.prepare(MODELS[which]())
    loss_of(model).backward()
    assert not watched
    several(model)
    assert len(watched) == expected


def test_the_bits_of_a_nan_survive_the_cast() -> None:
    """A gradient that has been through the low precision has lost them."""
    strange = torch.tensor(0x7FA10000, dtype=torch.int32).view(torch.float32)
    parameter = nn.Parameter(torch.ones(2, 3))
    with bf16():
        given = SharedCasts("a layer").through(parameter)
        again = SharedCasts("a layer").through(parameter)
    for each in (given, again):
        parameter.grad = None
        each.backward(strange.expand(2, 3))
        assert parameter.grad is not None
        assert parameter.grad.view(torch.int32).eq(0x7FA10000).all()


def test_watching_leaves_tensors_as_they_were() -> None:
    parameter, tensor = nn.Parameter(torch.ones(2, 3)), torch.ones(3, requires_grad=True)
    kinds, dictionaries = (type(parameter), type(tensor)), (vars(parameter), vars(tensor))
    with pytest.raises(ZeroDivisionError), early.first_casts([parameter, tensor]) as found, bf16():
        dropped = torch.nn.functional.linear(torch.ones(1, 3), parameter, None)
        first = dropped.grad_fn._sequence_nr()  # type: ignore[union-attr]
        del dropped
        torch.nn.functional.linear(torch.ones(1, 3), parameter, None)
        (tensor * parameter).sum()
        assert found.keys() == {id(parameter)} and found[id(parameter)] < first
        with torch.no_grad():
            torch.nn.functional.linear(tensor, torch.ones(2, 3))
        assert found.keys() == {id(parameter), id(tensor)}
        raise ZeroDivisionError
    assert (type(parameter), type(tensor)) == kinds
    assert (vars(parameter), vars(tensor)) == dictionaries == ({}, {})
