"""Gradients arrive in the order of a resident run: what hooks draw, sum and count shows it.

A layer that is recorded hands all of them over in one node, so their order and their sums are made;
one that is not keeps the graph of its forward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import VBLoRAConfig, get_peft_model
from torch import nn

import poros
from tests.adapted import Twice, names_of
from tests.exact.recorded import record_on_tapes
from tests.snapshots import (
    assert_same_run,
    batches,
    build,
    changes,
    layers_of,
    no_context,
    outcome,
    run,
)
from tests.support import AdversarialPrepare

Model = Any
Make = Callable[[], Model]

ARCHITECTURES = ("qwen2", "gemma3", "gemma4", "mixtral", "phi3")


def vblora() -> Model:
    """One bank of vectors, used twice in each target of each layer."""
    base = build(quantize=False).unload()
    torch.manual_seed(2)
    config = VBLoRAConfig(
        r=2,
        target_modules=["q_proj", "up_proj"],
        num_vectors=12,
        vector_length=16,
        topk=2,
        vblora_dropout=0.05,
    )
    return get_peft_model(base, config)


def tied() -> Model:
    """An adapter matrix that is used twice in one layer and once in another."""
    model = build(dropout=0.0)
    first, last = layers_of(model)[0].mlp, layers_of(model)[2].mlp
    for other in (first.gate_proj, last.up_proj):
        other.lora_A["default"].weight = first.up_proj.lora_A["default"].weight
    return model


def called_twice() -> Model:
    model = build(dropout=0.0, dtype=torch.float32, quantize=False)
    layers_of(model)[1].mlp.up_proj = Twice(layers_of(model)[1].mlp.up_proj)
    return model


MODELS: dict[str, Make] = {
    **{name: lambda name=name: build(name) for name in ARCHITECTURES},  # type: ignore[misc]
    "vblora": vblora,
    "tied": tied,
    "prophetnet": lambda: build("prophetnet"),
    "called twice": called_twice,
}


@pytest.fixture(autouse=True)
def on_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_tapes(monkeypatch)


def prepared(model: Model, **overrides: Any) -> Model:
    return AdversarialPrepare()(model, device="cpu", **overrides)


def order_of_hooks(model: Model, around: Callable[[], Any] = no_context) -> list[str]:
    """The parameters, as hooks on them see their gradients arrive."""
    names, seen = names_of(model), []
    handles = [
        each.register_post_accumulate_grad_hook(lambda p: seen.append(names[id(p)]))
        for each in model.parameters()
        if each.requires_grad
    ]
    model.train()
    torch.manual_seed(0)
    with around():
        loss = model(**batches()[1]).loss
    loss.backward()
    model.zero_grad()
    for each in handles:
        each.remove()
    return seen


@pytest.mark.parametrize(
    ("which", "lane"),
    [
        *((which, None) for which in MODELS),
        *(pytest.param(which, False, marks=pytest.mark.slow) for which in ("qwen2", "tied")),
    ],
)
def test_hooks_on_parameters_run_in_the_order_of_a_resident_run(
    which: str, lane: bool | None
) -> None:
    expected = order_of_hooks(MODELS[which]())
    model = prepared(MODELS[which](), cuda_graphs=lane)
    assert order_of_hooks(model) == order_of_hooks(model) == expected
    captures = poros.runtime(model).context.captures
    # The values of a tensor decide what these do, or they share states.
    is_replayable = which not in ("gemma4", "mixtral", "prophetnet", "vblora")
    assert (captures is not None and captures.num_recorded > 0) == (lane is None and is_replayable)
    assert len(expected) > 10 or which == "vblora"


# Gradients that meet others.


def losses_of(model: Model, count: int) -> torch.Tensor:
    return sum((model(**each).loss for each in batches(count)), torch.zeros(()))


def penalty(model: Model) -> torch.Tensor:
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    return 0.01 * torch.stack([(p @ p.T).square().sum() + p.norm() for p in matrices]).sum()


def powers(model: Model) -> torch.Tensor:
    terms = [p.float().pow(2).sum() for p in model.parameters() if p.requires_grad]
    return 0.01 * torch.stack(terms).sum()


SUMS: dict[str, Callable[[Model], torch.Tensor]] = {
    "one forward": lambda model: losses_of(model, 1),
    "three forwards": lambda model: losses_of(model, 3),
    "a penalty behind": lambda model: losses_of(model, 1) + powers(model),
    "a penalty before": lambda model: powers(model) + losses_of(model, 1),
    "everything": lambda model: losses_of(model, 2) + powers(model) + 3 * losses_of(model, 2),
    "orthogonality": lambda model: losses_of(model, 2) + penalty(model),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("which", ["qwen2", "tied", "vblora", "prophetnet", "called twice"])
@pytest.mark.parametrize("what", SUMS)
def test_sums_with_gradients_from_elsewhere_are_exact(which: str, what: str) -> None:
    found = []
    for model in (MODELS[which](), prepared(MODELS[which]())):
        model.train()
        torch.manual_seed(0)
        SUMS[what](model).backward()
        found.append(outcome(model))
    assert changes(*found) == {}


@pytest.mark.parametrize("which", ["tied", "vblora"])
def test_what_is_used_several_times_trains_exactly(which: str) -> None:
    model = prepared(MODELS[which](), self_check="strict")
    assert_same_run(run(MODELS[which]()), run(model))
    assert poros.runtime(model).self_check["status"] == "passed"


def test_gradients_do_not_share_memory() -> None:
    """Two parameters that are added get one gradient tensor; each has to keep its own."""

    class Shift(nn.Module):
        def __init__(self, before: nn.Module) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.ones(before.out_features)) for _ in "ab")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.one + self.other)

    def make() -> Model:
        model = build(dropout=0.0, dtype=torch.float32, quantize=False)
        adapter = layers_of(model)[1].mlp.up_proj.lora_B
        adapter["default"] = nn.Sequential(adapter["default"], Shift(adapter["default"]))
        return model

    found = []
    for model in (make(), prepared(make())):
        for batch in batches(2):
            model(**batch).loss.backward()
        found.append(outcome(model))
        storages = [
            p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
        ]
        assert len(set(storages)) == len(storages)
    assert changes(*found) == {}


def test_a_gradient_of_an_earlier_backward_is_not_compared() -> None:
    """A backward that stops within the layers, and then one that starts below that point."""
    found = []
    for model in (build(), prepared(build())):
        torch.manual_seed(0)
        out = model(**batches()[0], output_hidden_states=True)
        last = layers_of(model)[2].mlp.up_proj.lora_A["default"].weight
        torch.autograd.grad(out.loss, last, retain_graph=True)
        out.hidden_states[2].float().square().mean().backward()
        found.append(outcome(model))
    assert changes(*found) == {}
