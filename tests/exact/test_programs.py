"""Programs of users on a prepared model: the bits of the resident one, in the same order.

All with slots that are poisoned: several times, with visits that are recorded on tapes, or once,
with the self-check on. `make test` has the first of what may be replayed, and the second of others.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.replay.remat import RematerializeLayer
from poros.replay.routing import Terms
from poros.stream.body import LayerBody
from tests.exact import hazards as H
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.exact.arms import (
    Bases,
    Program,
    Residents,
    Subject,
    in_order,
    observe,
    of_the_first,
    often,
    on_tapes,
    poisoned,
    streamed,
)
from tests.exact.table import MATH_STEP, ROWS, Row
from tests.snapshots import changes, digest, layers_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch: Patch) -> None:
    monkeypatch.setattr("poros.replay.captures._LEAST_VISITS", 1)


def rows(is_checked: bool) -> Any:
    # The check of a decoder's layers copies a cache of two parts.
    slow = [
        row.replays == is_checked and not (is_checked and row.subject is S.decoder) for row in ROWS
    ]
    each = [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] * is_slow)
        for row, is_slow in zip(ROWS, slow, strict=True)
    ]
    return pytest.mark.parametrize("row", each)


@rows(is_checked=True)
def test_a_program_is_exact(row: Row, residents: Residents) -> None:
    program = in_order(row.program)
    expected = of_the_first(residents.facts(row.subject, often(program, row.num_times)))
    model = poisoned(row.subject(residents.bases), **{"self_check": "strict", **row.policy})
    found = of_the_first(observe(model, often(program, 1)))
    assert expected and changes(expected, found) == {}


@rows(is_checked=False)
def test_a_program_whose_visits_are_replayed_is_exact(row: Row, residents: Residents) -> None:
    program = often(in_order(row.program), row.num_times)
    expected = residents.facts(row.subject, program)
    model = on_tapes(row.subject(residents.bases), **row.policy)
    assert changes(expected, observe(model, program)) == {}
    captures = poros.runtime(model).captures
    assert captures and (captures.num_replays > 0) == row.replays
    assert row.replays or row.num_times > 2 or not captures.num_recorded


# Controls: resident programs that have to differ, or the rows above would show nothing.

DIFFERENT: dict[str, tuple[Subject, Program, Subject, Program]] = {
    "autocast in fp32": (S.FP32, P.STEP, S.FP32, P.STEP_UNDER_AUTOCAST),
    "autocast in bf16": (S.PLAIN, P.STEP, S.PLAIN, P.STEP_UNDER_AUTOCAST),
    "attention backends": (S.FP32_NO_DROPOUT, P.STEP, S.FP32_NO_DROPOUT, MATH_STEP),
    "dropout": (S.small(dropout=0.5), P.STEP, S.small(dropout=0.4), P.STEP),
    "an older hook on backward": (S.PLAIN, P.STEP, S.PLAIN, H.older_hook),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_control_programs_differ(name: str, residents: Residents) -> None:
    subject, program, other_subject, other = DIFFERENT[name]
    assert changes(residents.facts(subject, program), residents.facts(other_subject, other))


def test_attention_backends_and_inputs_are_left_as_they_were(residents: Residents) -> None:
    observe(streamed(S.PLAIN(residents.bases)), MATH_STEP)
    assert torch.backends.cuda.flash_sdp_enabled()
    plain = residents.facts(S.PLAIN, P.STEP)
    assert changes(plain, residents.facts(S.inputs_require_gradients, P.STEP)) == {}


# Controls: faults of the runtime that have to show, with the self-check off. Of casts and of order:
# ``test_written_programs``.


def in_one_sum(patch: Patch) -> None:
    """The terms of an input's gradient are added before they are handed on."""
    genuine = Terms.take

    def take(self: Terms) -> Any:
        first, *others = genuine(self)
        return [sum(others, first), *[None] * len(others)]

    patch.setattr(Terms, "take", take)


def spoiled(patch: Patch) -> None:
    """Each gradient is off by one unit in the last place of bf16."""
    genuine = RematerializeLayer.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        given = genuine(ctx, *gradients)
        return tuple(None if each is None else each * 1.0078125 for each in given)

    patch.setattr(RematerializeLayer, "backward", staticmethod(backward))


FAULTS: list[tuple[Callable[[Patch], None], str, Subject, Program]] = [
    (spoiled, "a step", S.PLAIN, P.STEP),
    (in_one_sum, "what layers give", S.PLAIN, P.loss_on_outputs),
    (in_one_sum, "states of an encoder", S.decoder, P.read_an_encoder),
]


@pytest.mark.parametrize(
    ("fault", "subject", "program"),
    [pytest.param(fault, *row, id=f"{fault.__name__}: {name}") for fault, name, *row in FAULTS],
)
def test_control_a_fault_differs(
    fault: Callable[[Patch], None],
    subject: Subject,
    program: Program,
    residents: Residents,
    monkeypatch: Patch,
) -> None:
    fault(monkeypatch)
    assert residents.compare(subject, often(in_order(program)), on_tapes) != {}


def test_a_usual_loss_hides_terms_that_are_added(residents: Residents, monkeypatch: Patch) -> None:
    in_one_sum(monkeypatch)
    assert residents.compare(S.PLAIN, often(in_order(P.train_once)), on_tapes) == {}


def test_control_per_layer_inputs_without_a_gradient_differ(
    residents: Residents, monkeypatch: Patch
) -> None:
    genuine = LayerBody.run

    def run(self: LayerBody, args: Any, kwargs: Any) -> Any:
        return genuine(self, (args[0], *(each.detach() for each in args[1:])), kwargs)

    monkeypatch.setattr(LayerBody, "run", run)
    found = observe(streamed(S.adapter_below_the_layers(residents.bases), self_check="off"), P.STEP)
    gone = residents.facts(S.adapter_below_the_layers, P.STEP).keys() - found.keys()
    assert len(gone) == 2 and not any("layers." in name for name in gone)


def test_nothing_is_left_on_the_parameters(residents: Residents) -> None:
    model = on_tapes(S.FP32_NO_DROPOUT(residents.bases))
    often(P.STEP_UNDER_AUTOCAST)(model)
    assert all(not each._backward_hooks for each in model.parameters())


# Lifetimes.


def test_backward_works_after_the_model_was_deleted(residents: Residents) -> None:
    found = []
    for prepare in (lambda model: model, streamed, on_tapes):
        model = prepare(S.NO_DROPOUT(residents.bases))
        parameters = P.trained(model)
        loss = P.loss_of(model)
        del model
        gc.collect()
        loss.backward()
        found.append({name: digest(each.grad) for name, each in parameters.items()})
    assert found[0] == found[1] == found[2]


def inputs_of_layers(model: Any) -> tuple[torch.Tensor, list["weakref.ref[torch.Tensor]"]]:
    """A loss, and what the layers were given for it."""
    seen: list[weakref.ref[torch.Tensor]] = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    return P.loss_of(model), seen


def test_a_loss_kept_after_backward_keeps_no_activations(residents: Residents) -> None:
    """Many loops hold on to the last loss while the next forward runs."""
    for prepare in (lambda model: model, streamed, on_tapes):
        loss, seen = inputs_of_layers(prepare(S.PLAIN(residents.bases)))
        assert len(seen) == 3
        loss.backward()
        gc.collect()
        assert [each() for each in seen if each() is not None] == []


def test_a_deleted_model_takes_its_slots_with_it_at_once(bases: Bases) -> None:
    model = streamed(S.NO_DROPOUT(bases))
    P.STEP(model)
    slot = weakref.ref(poros.runtime(model).ring.slots[0].buffer)
    gc.collect()
    gc.disable()
    try:
        del model
        assert slot() is None
    finally:
        gc.enable()
