"""What a recomputed layer cannot give exactly is refused, never trained on; then all is well again.

A row provokes an error of Poros: as is, or behind steps whose visits were replayed from tapes.
Where a resident model accepts it, a resident model does it too, so that the refusal says something.
A step behind it is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.errors import (
    PorosError,
    PreparedModelError,
    RematerializationError,
    SlotStateError,
    UnsupportedModelError,
)
from poros.kernels.autocast import cached_cast
from poros.stream.body import ModelContext
from poros.stream.boundary import is_streamed
from tests.exact import hazards as H
from tests.exact import programs as P
from tests.exact import provocations as V
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import (
    Bases,
    Model,
    Program,
    Residents,
    Subject,
    observe,
    often,
    on_tapes,
    poisoned,
    streamed,
)
from tests.snapshots import batches, bf16, changes, layers_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch: Patch) -> None:
    monkeypatch.setattr("poros.replay.captures._LEAST_VISITS", 1)


@dataclass(frozen=True)
class Row:
    name: str
    provocation: V.Provocation
    error: type[Exception] | tuple[type[Exception], ...]
    match: str
    subject: Subject = S.NO_DROPOUT
    is_accepted: bool = True
    """By a resident model."""
    after: Program = P.STEP
    kernels: str = "exact"

    def program(self, model: Model) -> object:
        steps = self.provocation(model)
        next(steps)
        if is_streamed(layers_of(model)[0]):
            with pytest.raises(self.error, match=self.match):
                next(steps, None)
        elif self.is_accepted:
            next(steps, None)
        steps.close()
        model.zero_grad()
        torch.manual_seed(7)
        return self.after(model)


REMAT, UNSUPPORTED, PREPARED = RematerializationError, UnsupportedModelError, PreparedModelError


def rows() -> Iterator[Row]:
    for name, change in V.CHANGES.items():
        raised = V.behind(change), REMAT, V.SAYS_WHERE
        yield Row(name, *raised, S.two_adapters, is_accepted=False, after=V.train_the_second)
    for place, what in enumerate(V.INPUTS):
        index = 2 * (place % 2)
        raised = V.edited_input(what, index), REMAT, r"layers\.\d.*edited in place", S.PLAIN, False
        yield Row(f"edit of {what} of layer {index}", *raised)
    for start in V.SECOND_ORDER:
        provocation, errors = V.second_order(start), (RuntimeError, PorosError)
        match = "twice|gradients of gradients"
        # Fused attention gives none of its own.
        yield Row(f"second order of {start}", provocation, errors, match, S.PLAIN, False)
    yield Row("merge of a module", V.merged_module, (PREPARED, REMAT), "", S.DENSE, False)
    inside = V.backward_inside_disable_adapter
    yield Row("backward inside disable_adapter", inside, REMAT, "adapters", S.PLAIN, False)
    yield Row("vanishing hook", V.vanishing_hook, REMAT, r"layers\.1: .*hooks")
    match = r"layers\.1\.self_attn\.o_proj\.base_layer\.bias"
    yield Row("a bias that came later edited", V.edit_of_a_new_bias, REMAT, match)
    match = r"layers\.0: expected its arguments to be left alone.*in place"
    yield Row("argument edited", V.argument_edited_by_the_layer, REMAT, match)
    yield Row("dropped cache", V.cache_of_a_forward_with_gradients, UNSUPPORTED, "KV cache")
    yield Row("frozen", V.all_adapters_frozen, PREPARED, r"layers\.0: .* a trainable adapter")
    made, match = V.trainable_base_weight, "made trainable"
    yield Row("base weight made trainable", made, PREPARED, match, S.DENSE, False)
    provocation = V.with_argument(lambda kwargs: kwargs.update(findings=set()))
    match = r"'findings' of .*layers\.1.* set"
    yield Row("a set as argument", provocation, UNSUPPORTED, match, S.PLAIN)
    for name, program in {
        "own generator": H.own_generator,
        "own permutation": H.own_permutation,
        "counter": H.counter,
        "an operator that saves other rows": H.kept_by_kernels("rows"),
    }.items():
        yield Row(name, V.run(program), REMAT, "the values that the forward", S.PLAIN)
    for gradients in (False, True):
        name = f"a forward {'with gradients ' if gradients else ''}inside a layer"
        provocation = V.run(H.another_forward(gradients=gradients))
        yield Row(name, provocation, SlotStateError, "one layer to run at a time", S.PLAIN)
    for name, program in {
        "saved tensors copied": P.one_step(forward=P.copies_of_saved),
        "the whole model checkpointed": H.whole_model_checkpointed,
    }.items():
        yield Row(name, V.run(program), UNSUPPORTED, "saved-tensor hooks", S.PLAIN)
    create_graph = V.run(H.create_graph), (REMAT, UNSUPPORTED), "create_graph", S.FP32, False
    yield Row("create_graph", *create_graph)
    yield Row("create_graph of PEFT's modules", *create_graph, kernels="peft")
    functional = V.run(H.functional_gradient)
    yield Row("torch.func.grad", functional, UNSUPPORTED, "torch.func.grad", is_accepted=False)


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", ["as is", "behind replayed visits"])
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_it_is_refused_and_then_all_is_well(row: Row, way: str, residents: Residents) -> None:
    policy = {"adapter_kernels": row.kernels}
    if way == "as is":
        assert residents.compare(row.subject, row.program, poisoned, **policy) == {}
        return
    model = on_tapes(row.subject(residents.bases), **policy)
    often(P.STEP)(model)
    model.zero_grad()
    assert changes(residents.facts(row.subject, row.program), observe(model, row.program)) == {}
    assert poros.runtime(model).stats()["num_replayed_visits"] > 0


@pytest.mark.parametrize("prepare", [poisoned, on_tapes])
@pytest.mark.parametrize(
    ("subject", "provocation", "match"),
    [
        (V.fickle, V.behind(lambda model: None), r"layers\.1: .*random numbers"),
        (V.growing, V.grown_state, r"layers\.1: .*form"),
    ],
    ids=["other random numbers", "another form"],
)
def test_a_layer_that_differs_when_recomputed_is_refused(
    subject: Subject, provocation: V.Provocation, match: str, prepare: Any, residents: Residents
) -> None:
    if subject is V.growing:
        # Only what operators save comes from the recomputation.
        assert residents.compare(subject, V.through(provocation), prepare) == {}
        return
    steps = provocation(prepare(subject(residents.bases)))
    next(steps)
    with pytest.raises(RematerializationError, match=match):
        next(steps)


@pytest.mark.cover("values")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prepare", [poisoned, on_tapes])
def test_an_update_within_a_region_is_refused(
    prepare: Any, fused: bool, residents: Residents, monkeypatch: Patch
) -> None:
    """A resident run goes on with the casts of the old weights."""
    model = prepare(S.FP32_NO_DROPOUT(residents.bases))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        R.updates_in_one_region(model, fused)
    # What does not change the casts does not matter.
    harmless = partial(R.updates_in_one_region, fused=fused, lr=1e-12)
    assert residents.compare(S.FP32_NO_DROPOUT, harmless, prepare) == {}
    # The control: let through, it differs.
    monkeypatch.setattr("poros.replay.routing.require_current", lambda *_: None)
    monkeypatch.setattr("poros.stream.general.require_current", lambda *_: None)
    harmful = partial(R.updates_in_one_region, fused=fused)
    assert residents.compare(S.FP32_NO_DROPOUT, harmful, prepare) != {}


def test_an_update_within_a_region_is_refused_by_layers_that_are_replayed(
    residents: Residents, monkeypatch: Patch
) -> None:
    model = on_tapes(S.FP32_DENSE(residents.bases))
    often(R.region)(model)
    model.zero_grad()
    before = poros.runtime(model).stats()["num_replayed_visits"]
    monkeypatch.setattr("poros.stream.general.require_current", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        R.updates_in_one_region(model, fused=True, numbers=(0, 0))
    assert poros.runtime(model).stats()["num_replayed_visits"] > before


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_update_between_groups_in_one_region_is_refused(
    is_broken: bool, residents: Residents, monkeypatch: Patch
) -> None:
    """The control: layers that are told of a region of their own do not see it."""
    model = on_tapes(S.FP32_DENSE(residents.bases))
    optimizer = torch.optim.AdamW(R.trained(model).values(), lr=1e-2, fused=True)

    def group() -> None:
        poros.accumulate(model, [batches()[0]] * 2)

    if is_broken:
        monkeypatch.setattr(ModelContext, "confines_autocast", lambda self: True)
    for _ in range(6):
        with bf16():
            group()
    with bf16():
        group()
        optimizer.step()
        if is_broken:
            group()
            return
        with pytest.raises(UnsupportedModelError, match=r"updated since.*anew"):
            group()


# What is left behind.


def interrupted(error: type[BaseException]) -> V.Provocation:
    """A hook that fails in the recomputation alone."""

    def provocation(model: Model) -> Iterator[None]:
        calls: list[int] = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise error

        with H.hooked(model, "mlp", hook):
            loss = P.loss_of(model)
            yield
            loss.backward()

    return provocation


FAILING: dict[type[BaseException], V.Provocation] = {
    RematerializationError: V.behind(V.CHANGES["adapter edited"]),
    KeyboardInterrupt: interrupted(KeyboardInterrupt),
    ZeroDivisionError: interrupted(ZeroDivisionError),
}


@pytest.mark.parametrize("error", FAILING)
def test_a_failed_backward_does_not_change_random_state_or_flags(
    error: type[BaseException], bases: Bases
) -> None:
    model = streamed(S.PLAIN(bases)).train()
    steps = FAILING[error](model)
    next(steps)
    flags = {name: each.training for name, each in model.named_modules()}
    random_state = torch.get_rng_state()
    with pytest.raises(error):
        next(steps)
    assert torch.equal(random_state, torch.get_rng_state())
    assert changes(flags, {name: each.training for name, each in model.named_modules()}) == {}
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_a_region_that_ends_with_the_model_makes_no_casts(bases: Bases, monkeypatch: Patch) -> None:
    """They would be kept until the region ends."""
    made: list[Any] = []

    def noted(parameter: torch.Tensor, of_layer: Any) -> torch.Tensor | None:
        if not any(each is of_layer for each in made):
            made.append(of_layer)
        return cached_cast(parameter, of_layer)

    monkeypatch.setattr("poros.replay.routing.cached_cast", noted)
    model = on_tapes(S.FP32_DENSE(bases))
    uncached = R.with_penalty(R.penalty, R.uncached)
    for program, count in ((R.penalty_by_accelerate, 0), (R.penalty_outside, 3), (uncached, 0)):
        often(program)(model)
        made.clear()
        program(model)
        assert len(made) == count
    # A region around the model's own does not end with it.
    with bf16():
        often(R.penalty_by_accelerate)(model)
        made.clear()
        R.penalty_by_accelerate(model)
    assert len(made) == 3
