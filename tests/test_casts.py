"""Adapters under autocast whose gradients meet others: exact, or refused before a wrong update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshots import batches, bf16, build, changes, layers_of, outcome, step
from torch import nn

import poros
from poros.errors import ParityError, UnsupportedModelError
from poros.layer.casts import SharedCasts, _Carried
from tests.adapted import Twice

Model = Any


def make() -> Model:
    return build(dropout=0.0, dtype=torch.float32)


def called_twice() -> Model:
    model = make()
    layers_of(model)[1].mlp.up_proj = Twice(layers_of(model)[1].mlp.up_proj)
    return model


def matrices(model: Model) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if "lora_A" in name]


def orthogonality(model: Model) -> torch.Tensor:
    return torch.stack([(each @ each.T).square().sum() for each in matrices(model)]).sum()


def powers(model: Model) -> torch.Tensor:
    return torch.stack([each.pow(2).sum() + each.norm() for each in matrices(model)]).sum()


Program = Callable[[Model], None]


def behind(penalty: Callable[[Model], torch.Tensor]) -> Program:
    def program(model: Model) -> None:
        with bf16():
            loss = model(**batches()[0]).loss + 0.1 * penalty(model)
        loss.backward()

    return program


def before(model: Model) -> None:
    with bf16():
        loss = 0.1 * orthogonality(model)
        loss = loss + model(**batches()[0]).loss
    loss.backward()


def outside(model: Model) -> None:
    with bf16():
        loss = model(**batches()[0]).loss
    (loss + 0.1 * orthogonality(model)).backward()


def separately(model: Model) -> None:
    with bf16():
        loss, penalty = model(**batches()[0]).loss, 0.1 * orthogonality(model)
    loss.backward()
    penalty.backward()


def regions_of_their_own(model: Model) -> None:
    losses = []
    for batch in batches():
        with bf16():
            losses.append(model(**batch).loss)
    with bf16():
        losses.append(0.1 * orthogonality(model))
    torch.stack(losses).sum().backward()


def by_accelerate(model: Model) -> None:
    """The forward of the model is a region; the penalty is computed behind it."""
    own = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(own)
    try:
        (model(**batches()[0]).loss + 0.1 * orthogonality(model)).backward()
    finally:
        del model.forward


def without_a_cache(model: Model) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(**batches()[0]).loss + 0.1 * orthogonality(model)
    loss.backward()


EXACT: dict[str, Program] = {
    "a penalty in full precision": behind(powers),
    "a penalty outside": outside,
    "a backward of its own": separately,
    "regions of their own": regions_of_their_own,
    "accelerate": by_accelerate,
    "no cache": without_a_cache,
}


def retained(model: Model) -> None:
    """The first forward has had its backward, and takes part in another."""
    with bf16():
        first = model(**batches()[0]).loss
        first.backward(retain_graph=True)
        second = model(**batches()[1]).loss
    (first + second).backward()


REFUSED: dict[str, Program] = {
    "behind": behind(orthogonality),
    "before": before,
    "retained": retained,
}


def outcome_of(model: Model, program: Program) -> dict[str, object]:
    model.train()
    torch.manual_seed(0)
    program(model)
    return outcome(model)


@pytest.mark.parametrize("which", EXACT)
def test_what_meets_in_full_precision_is_exact(which: str) -> None:
    expected, found = (outcome_of(each, EXACT[which]) for each in (make(), poros.prepare(make())))
    assert changes(expected, found) == {}


@pytest.mark.parametrize("which", REFUSED)
def test_what_a_resident_run_sums_in_the_low_precision_is_refused(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poros.prepare(make())
    with pytest.raises(UnsupportedModelError, match=r"layers\.\d: .*autocast.*penalty"):
        outcome_of(model, REFUSED[which])
    model.zero_grad()
    assert changes(step(make(), around_forward=bf16), step(model, around_forward=bf16)) == {}
    # The control: left alone, it differs.
    monkeypatch.setattr(_Carried, "require_alone", lambda *_: None)
    expected, found = (outcome_of(each, REFUSED[which]) for each in (make(), poros.prepare(make())))
    assert changes(expected, found) != {}


def test_a_module_called_twice_in_a_layer_is_refused_under_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = poros.prepare(called_twice())
    with (
        bf16(),
        pytest.raises(UnsupportedModelError, match=r"layers\.1: .*twice.*without autocast"),
    ):
        model(**batches()[0])
    assert changes(step(called_twice()), step(model)) == {}
    without = {"around_forward": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)}
    expected, found = (
        step(each, **without) for each in (called_twice(), poros.prepare(called_twice()))
    )
    assert changes(expected, found) == {}
    # The control: let through, it differs, and the check of the first step says so.
    monkeypatch.setattr(SharedCasts, "require_single", lambda *_: None)
    with pytest.raises(ParityError, match=r"layers\.1: gradient of"):
        step(poros.prepare(called_twice()), around_forward=bf16)


def test_nothing_is_left_on_the_parameters() -> None:
    model = poros.prepare(make())
    step(model, around_forward=bf16)
    assert all(not each._backward_hooks for each in model.parameters())


def test_a_region_that_ends_with_the_model_makes_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be kept until the region ends."""
    made: set[str] = set()
    genuine = SharedCasts.through

    def through(self: SharedCasts, parameter: Any) -> torch.Tensor:
        made.add(self._name)
        return genuine(self, parameter)

    monkeypatch.setattr(SharedCasts, "through", through)
    model = poros.prepare(make())
    for program, count in ((by_accelerate, 0), (outside, 3), (without_a_cache, 0)):
        made.clear()
        program(model)
        assert len(made) == count
    made.clear()
    # A region around the model's own does not end with it, and the penalty is in it.
    with bf16(), pytest.raises(UnsupportedModelError, match="penalty"):
        by_accelerate(model)
    assert len(made) == 3


def stepped(model: Model, fused: bool, lr: float = 1e-2) -> None:
    """The whole training within one region."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=fused)
    with bf16():
        for batch in batches():
            model(**batch).loss.backward()
            optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_within_a_region_is_refused(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resident run goes on with the casts of the old weights."""
    model = poros.prepare(make())
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        stepped(model, fused)
    # What does not change the casts does not matter.
    pair = make(), poros.prepare(make())
    assert changes(*(outcome_of(each, lambda m: stepped(m, fused, 1e-12)) for each in pair)) == {}
    # The control: let through, it differs.
    monkeypatch.setattr(SharedCasts, "require_current", lambda _: None)
    pair = make(), poros.prepare(make())
    assert changes(*(outcome_of(each, lambda m: stepped(m, fused)) for each in pair)) != {}
