"""What a recomputed layer cannot give exactly is refused, never trained on; then all is well again.

A row provokes an error of Poros. Where a resident model accepts it, a
resident model does it too, so that the refusal says something. A step behind it is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.errors import (
    ParityError,
    PorosError,
    PreparedModelError,
    RematerializationError,
    UnsupportedModelError,
)
from poros.layer.casts import SharedCasts, _Carried
from poros.layer.frozen import LayerBindings
from poros.layer.streamed import is_streamed
from tests.exact import hooks
from tests.exact import programs as P
from tests.exact import provocations as V
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import Bases, Model, Program, Residents, Subject, observe, streamed
from tests.snapshots import batches, bf16, changes, layers_of, picture

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Row:
    name: str
    provocation: V.Provocation
    error: type[Exception] | tuple[type[Exception], ...]
    match: str
    subject: Subject = S.NO_DROPOUT
    is_accepted: bool = True
    """By a resident model."""
    is_exact: bool = False
    """In the general lane."""
    after: Program = P.STEP

    def accepted(self, model: Model) -> object:
        """The same without a refusal; what comes behind it finds the gradients."""
        list(self.provocation(model))
        return self.after(model)

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


GENERAL: dict[str, Any] = {"self_check": "off"}
SHARED = S.small("gemma4_shared_kv", num_layers=4)
REMAT, UNSUPPORTED, PREPARED = RematerializationError, UnsupportedModelError, PreparedModelError
MEETING = {
    "behind": R.with_penalty(R.penalty),
    "before": R.penalty_first,
    "retained": R.retained,
}


def rows() -> Iterator[Row]:
    for name, change in V.CHANGES.items():
        raised = V.behind(change), REMAT, V.SAYS_WHERE
        yield Row(name, *raised, S.two_adapters, is_accepted=False, after=V.train_the_second)
    for which in hooks.HOOKS:
        for is_added in (True, False) if which not in hooks.OUTSIDE else ():
            name = f"hooks {'added' if is_added else 'removed'}: {which}"
            provocation = (V.hooks_added if is_added else V.hooks_removed)(which)
            yield Row(name, provocation, REMAT, r"layers\.2: .*hooks", S.PLAIN, False)
    for what in V.INPUTS:
        for index in (0, 2):
            name, provocation = f"edit of {what} of layer {index}", V.edited_input(what, index)
            yield Row(name, provocation, REMAT, r"layers\.\d.*edited in place", S.PLAIN, False)
    for start in V.SECOND_ORDER:
        provocation, errors = V.second_order(start), (RuntimeError, PorosError)
        match = "twice|gradients of gradients"
        # Fused attention gives none of its own.
        yield Row(f"second order of {start}", provocation, errors, match, S.PLAIN, False)
    for subject in (S.PLAIN, S.DENSE):
        name = "4 bits" if subject is S.PLAIN else "dense"
        errors = (PreparedModelError, RematerializationError)
        yield Row(f"merge, {name}", V.merge, PREPARED, "", subject, False)
        yield Row(f"merge of a module, {name}", V.merged_module, errors, "", subject, False)
    inside = V.backward_inside_disable_adapter
    yield Row("backward inside disable_adapter", inside, REMAT, "adapters", S.PLAIN, False)
    yield Row("vanishing hook", V.vanishing_hook, REMAT, r"layers\.1: .*hooks")
    match = r"layers\.1: .*elsewhere"
    exact: dict[str, Any] = {"is_exact": True}
    yield Row("trainable from outside", V.trainable_from_outside, UNSUPPORTED, match, **exact)
    inner = V.loss_on_an_activation
    yield Row("activation in the loss", inner, PREPARED, "inside the layer", **exact)
    match = r"layers\.1\.self_attn\.o_proj\.base_layer\.bias"
    yield Row("a bias that came later edited", V.edit_of_a_new_bias, REMAT, match)
    match = r"layers\.0: .*in place"
    yield Row("argument edited", V.argument_edited_by_the_layer, REMAT, match)
    yield Row("dropped cache", V.cache_of_a_forward_with_gradients, UNSUPPORTED, "KV cache")
    made, match = V.trainable_base_weight, "made trainable"
    yield Row("base weight made trainable", made, PREPARED, match, S.DENSE, False)
    # Gradients that a resident run sums in the low precision.
    fp32 = S.FP32_NO_DROPOUT
    regions = {"after": P.STEP_UNDER_AUTOCAST, **exact}
    match = r"layers\.\d: .*autocast.*penalty"
    for name, program in MEETING.items():
        yield Row(f"penalty {name}", V.run(program), UNSUPPORTED, match, fp32, **regions)
    together = V.run(R.forwards_in_one_region)
    yield Row("forwards in one region", together, UNSUPPORTED, "autocast region", fp32, **regions)
    match = r"layers\.1: .*twice.*without autocast"
    provocation = V.forward_under_autocast
    yield Row("called twice", provocation, UNSUPPORTED, match, S.called_twice, **exact)
    match = "lora_A.*autocast"
    for name, subject in {"within": S.tied_within, "across": S.tied_across}.items():
        refused = UNSUPPORTED, match, subject
        yield Row(f"tied {name} layers", provocation, *refused, after=P.train, **exact)
    # By the side.
    for name in ("gemma4", "mixtral"):
        subject = S.small(name, attn_implementation="eager")
        provocation, match = V.run(V.attentions), "attentions cannot be recorded"
        after = {"after": V.attentions_without_gradients, **exact}
        yield Row(f"attentions of {name}", provocation, UNSUPPORTED, match, subject, **after)
    for kind in (list, dict, set):
        provocation = V.with_argument(lambda kwargs, kind=kind: kwargs.update(findings=kind()))  # type: ignore[misc]
        match = rf"'findings' of .*layers\.1.* {kind.__name__}"
        refused = UNSUPPORTED, match, S.PLAIN
        is_exact = kind is not set
        yield Row(f"a {kind.__name__} as argument", provocation, *refused, is_exact=is_exact)
    provocation = V.with_argument(lambda kwargs: kwargs["shared_kv_states"].update(notes=[]))
    match = r"shared_kv_states\['notes'\].* list"
    yield Row("a list in shared states", provocation, UNSUPPORTED, match, SHARED, **exact)


ROWS = [pytest.param(row, id=row.name) for row in rows()]


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused_and_then_all_is_well(row: Row, residents: Residents) -> None:
    assert residents.compare(row.subject, row.program) == {}


@pytest.mark.parametrize("row", ROWS)
def test_in_the_general_lane_it_is_refused_or_exact(row: Row, residents: Residents) -> None:
    program = row.accepted if row.is_exact else row.program
    assert residents.compare(row.subject, program, **GENERAL) == {}


@pytest.mark.parametrize(
    ("subject", "provocation", "match"),
    [
        (V.fickle, V.behind(lambda model: None), r"layers\.1: .*random numbers"),
        (V.growing, V.grown_state, r"layers\.1: .*form"),
    ],
    ids=["other random numbers", "another form"],
)
def test_a_layer_that_differs_when_recomputed_is_refused(
    subject: Subject, provocation: V.Provocation, match: str, bases: Bases
) -> None:
    steps = provocation(streamed(subject(bases)))
    next(steps)
    with pytest.raises(RematerializationError, match=match):
        next(steps)


def test_a_result_that_nobody_reads_again_does_not_matter(residents: Residents) -> None:
    """In the general lane only what operators save comes from the recomputation."""

    def program(model: Model) -> None:
        list(V.grown_state(model))

    assert residents.compare(V.growing, program, **GENERAL) == {}


# Controls: without a change nothing raises, and what is let through differs.


@pytest.mark.parametrize("change", [lambda model: None, lambda model: model.zero_grad()])
def test_nothing_raises_without_a_change(
    change: Callable[[Model], object], residents: Residents
) -> None:
    def program(model: Model) -> None:
        list(V.behind(change)(model))
        assert all(each.grad is not None for each in P.trained(model).values())

    assert residents.compare(S.two_adapters, program) == {}


@pytest.mark.parametrize("name", MEETING)
def test_control_a_meeting_that_is_let_through_differs(
    name: str, residents: Residents, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(_Carried, "require_alone", lambda *_: None)
    assert residents.compare(S.FP32_NO_DROPOUT, MEETING[name]) != {}


def test_control_a_second_call_that_is_let_through_is_found_by_the_check(
    bases: Bases, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(SharedCasts, "require_single", lambda *_: None)
    with pytest.raises(ParityError, match=r"layers\.1: gradient of"):
        P.STEP_UNDER_AUTOCAST(streamed(S.called_twice(bases)))


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_within_a_region_is_refused(
    fused: bool, residents: Residents, monkeypatch: Patch
) -> None:
    """A resident run goes on with the casts of the old weights."""
    model = streamed(S.FP32_NO_DROPOUT(residents.bases))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: .*updated since.*anew"):
        R.updates_in_one_region(model, fused)
    # What does not change the casts does not matter.
    harmless = partial(R.updates_in_one_region, fused=fused, lr=1e-12)
    assert residents.compare(S.FP32_NO_DROPOUT, harmless) == {}
    # The control: let through, it differs.
    monkeypatch.setattr(SharedCasts, "require_current", lambda _: None)
    harmful = partial(R.updates_in_one_region, fused=fused)
    assert residents.compare(S.FP32_NO_DROPOUT, harmful) != {}


# What is left V.behind.


@pytest.mark.parametrize("target", ["adapter", "input"])
def test_edits_are_never_silent_under_saved_tensor_hooks(target: str, residents: Residents) -> None:
    """Hooks that copy saved tensors, as save_on_cpu does, switch PyTorch's version check off."""

    def program(model: Model) -> None:
        with P.copies_of_saved(), V.caught_inputs(model, 1) as seen:
            loss = P.loss_of(model)
        edited = V.matrix(model) if target == "adapter" else seen["hidden"]
        with torch.no_grad():
            edited.mul_(2)
        loss.backward()

    try:
        assert residents.compare(S.NO_DROPOUT, program) == {}
    except RematerializationError:
        return


def test_a_failed_backward_does_not_change_random_state_or_flags(bases: Bases) -> None:
    model = streamed(S.PLAIN(bases)).train()
    steps = V.behind(V.CHANGES["adapter edited"])(model)
    next(steps)
    flags = {name: each.training for name, each in model.named_modules()}
    random_state = torch.get_rng_state()
    with pytest.raises(RematerializationError):
        next(steps)
    assert torch.equal(random_state, torch.get_rng_state())
    assert changes(flags, {name: each.training for name, each in model.named_modules()}) == {}
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_a_buffer_that_the_layers_own_forward_replaces(bases: Bases) -> None:
    def count(module: Any, args: Any, output: Any) -> None:
        module.calls = module.calls + 1

    model = S.NO_DROPOUT(bases)
    norm = V.layer(model, 1).input_layernorm
    norm.register_buffer("calls", torch.zeros(()))
    handle = norm.register_forward_hook(count)
    model(**batches()[0])
    assert norm.calls == 1
    streamed(model)
    with pytest.raises(PreparedModelError, match=r"calls: .*replaced"):
        model(**batches()[0])
    handle.remove()
    poros.restore(model)
    # An ordinary tensor of the device: what the hook wrote before the error stays.
    assert norm.calls == 2


def test_an_interrupt_inside_a_visit(residents: Residents, monkeypatch: Patch) -> None:
    model = S.NO_DROPOUT(residents.bases).train()
    before = picture(model)
    streamed(model)
    swap_in = LayerBindings.swap_in

    def interrupted(self: Any) -> None:
        swap_in(self)
        raise KeyboardInterrupt

    def interrupt() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LayerBindings, "swap_in", interrupted)
            with pytest.raises(KeyboardInterrupt):
                P.STEP(model)

    interrupt()
    assert changes(residents.facts(S.NO_DROPOUT, P.STEP), observe(model, P.STEP)) == {}
    model.zero_grad()
    # Restored at once, with the tensors of a slot still in a layer.
    interrupt()
    poros.restore(model)
    assert changes(before, picture(model)) == {}


def test_a_region_that_ends_with_the_model_makes_no_casts(bases: Bases, monkeypatch: Patch) -> None:
    """They would be kept until the region ends."""
    made: set[str] = set()
    genuine = SharedCasts.through

    def through(self: SharedCasts, parameter: Any) -> torch.Tensor:
        made.add(self._name)
        return genuine(self, parameter)

    monkeypatch.setattr(SharedCasts, "through", through)
    model = streamed(S.FP32_NO_DROPOUT(bases))
    uncached = R.with_penalty(R.penalty, R.uncached)
    for program, count in ((R.penalty_by_accelerate, 0), (R.penalty_outside, 3), (uncached, 0)):
        made.clear()
        program(model)
        assert len(made) == count
    made.clear()
    # A region around the model's own does not end with it, and the penalty is in it.
    with bf16(), pytest.raises(UnsupportedModelError, match="penalty"):
        R.penalty_by_accelerate(model)
    assert len(made) == 3
