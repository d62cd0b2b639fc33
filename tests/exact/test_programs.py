"""Programs of users on a streamed model: the bits of the resident one, in the same order."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import poros
from poros.errors import ParityError
from poros.layer import early
from poros.layer.call import LayerCall
from poros.layer.casts import SharedCasts
from poros.layer.handover import Repeated
from tests.exact import hooks
from tests.exact import programs as P
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import Bases, Program, Residents, Subject, observe, streamed
from tests.snapshots import bf16, changes, digest, layers_of
from tests.support import AdversarialPrepare

Patch = pytest.MonkeyPatch


class Row(NamedTuple):
    name: str
    subject: Subject
    program: Program
    policy: dict[str, Any] = {}  # noqa: RUF012


STRICT: dict[str, Any] = {"self_check": "strict"}
OFF: dict[str, Any] = {"self_check": "off"}
PRECISIONS = {"bf16": S.PLAIN, "fp32": S.FP32}
ORDERED = {  # by when their gradients arrive within a region
    "lora": S.FP32_NO_DROPOUT,
    "lora bias": S.dense_lora(lora_bias=True),
    "dora": S.dense_lora(use_dora=True),
    "dora, norms": S.dense_lora(use_dora=True, modules_to_save=["post_attention_layernorm"]),
}
IN_ORDER = {each.__name__: R.in_order(each) for each in R.REGIONS}
HOOKED = {which: hooks.all_the_time(which) for which in hooks.HOOKS}
STATES = {
    "a middle state": P.loss_on_states(2),
    "the last state": P.loss_on_states(3),
    "the loss and the last state": P.loss_on_states(3, loss=True),
    "the loss and a middle state": P.loss_on_states(1, loss=True),
    "two middle states": P.loss_on_states(1, 2),
    "everything": P.loss_on_states(0, 1, 2, 3, loss=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "lora bias": {"lora_bias": True},
    "head saved": {"modules_to_save": ["lm_head"]},
    "norms saved": {"modules_to_save": ["input_layernorm"]},
}
FAMILIES = {
    name: S.small(name, num_layers=4)
    for name in ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
}
ROUTED = {name: S.small(name) for name in ("mixtral", "qwen3_moe")}
CONTEXTS = {"nothing": nullcontext, "autocast": bf16}
BACKENDS = {"nothing": nullcontext, "math only": P.only_math}
PENALTIES = {
    "in full precision": R.with_penalty(R.powers),
    "outside": R.penalty_outside,
    "a backward of its own": R.beside_a_penalty,
    "regions of their own": R.regions_of_their_own,
    "accelerate": R.penalty_by_accelerate,
    "no cache": R.with_penalty(R.penalty, R.uncached),
}
MATH_STEP = P.one_step(forward=P.only_math)
STEP_WITHOUT_CACHE = P.one_step(forward=R.uncached)


def rows() -> Iterator[Row]:
    # Backwards.
    yield Row("a second backward", S.PLAIN, P.backward_twice)
    yield Row("different losses", S.PLAIN, P.different_losses)
    yield Row("two forwards, backwards in order", S.PLAIN, P.two_forwards((0, 1)))
    yield Row("two forwards, backwards in reverse", S.PLAIN, P.two_forwards((1, 0)))
    yield Row("gradients of some parameters", S.PLAIN, P.some_parameters)
    yield Row("a layer called outside of the model", S.PLAIN, P.layer_outside_of_the_model)
    # Losses on what passes between the layers. A state that feeds the next layer and a loss has a
    # gradient of three terms: a resident run adds the loss's, the residual path's, then the norm's.
    for name, program in STATES.items():
        yield Row(f"a loss on {name}", S.PLAIN, program)
    yield Row("hidden states alone", S.NO_DROPOUT, P.hidden_states_alone)
    for name, subject in FAMILIES.items():
        yield Row(f"hidden states of {name}", subject, P.hidden_states_alone, STRICT)
    for name, subject in ROUTED.items():
        yield Row(f"router logits of {name}", subject, P.routers_alone, STRICT)
    yield Row("given embeddings", S.PLAIN, P.given_embeddings)
    yield Row("a penalty on embeddings", S.PLAIN, partial(P.given_embeddings, penalty=True))
    yield Row("no trainable adapter", S.PLAIN, partial(P.given_embeddings, frozen=True))
    yield Row("states of an encoder", S.decoder, P.read_an_encoder, STRICT)
    yield Row("an adapter below the layers", S.adapter_below_the_layers, P.train_below_the_layers)
    # What surrounds a forward is replayed at its recomputation.
    for name, between in {
        "eval": lambda model: model.eval(),
        "train": lambda model: model.train(),
        "eval of a layer": lambda model: layers_of(model)[1].eval(),
        "a parameter frozen": P.freeze_one,
    }.items():
        yield Row(f"{name} in between", S.PLAIN, P.one_step(between=between))
    yield Row("train behind a forward of eval", S.PLAIN, P.evaluate_then_train)
    yield Row("flags behind a step", S.PLAIN, P.step_and_flags)
    for precision, subject in PRECISIONS.items():
        yield Row(f"autocast around backward, {precision}", subject, P.one_step(backward=bf16))
        for name, context in CONTEXTS.items():
            program = P.one_step(forward=bf16, backward=context)
            yield Row(f"autocast, {name} around backward, {precision}", subject, program)
    # With dropout there is one backend only.
    for precision, subject in {"bf16": S.NO_DROPOUT, "fp32": S.FP32_NO_DROPOUT}.items():
        for name, context in BACKENDS.items():
            program = P.one_step(forward=P.only_math, backward=context)
            yield Row(f"math attention, {name} around backward, {precision}", subject, program)
    yield Row("saved tensor hooks", S.PLAIN, P.one_step(forward=P.copies_of_saved))
    yield Row("inputs that require gradients", S.inputs_require_gradients, P.STEP)
    yield Row("inputs that require them later", S.PLAIN, P.late_input_require_grads)
    yield Row("much dropout", S.small(dropout=0.5), P.STEP)
    # Adapters.
    for layers in ([0], [1], [2], [0, 2]):
        subject = S.on_layers(layers)
        yield Row(f"a step of adapters on layers {layers}", subject, P.STEP)
        yield Row(f"adapters on layers {layers}", subject, P.train)
    for name, options in KINDS.items():
        yield Row(f"{name} on all layers", S.on_layers([0, 1, 2], **options), P.train)
    yield Row("adapters frozen by hand", S.partly_frozen, P.STEP)
    for name, subject in {"within": S.tied_within, "across": S.tied_across}.items():
        yield Row(f"a step of adapters tied {name} layers", subject, P.STEP)
        yield Row(f"adapters tied {name} layers", subject, P.train)
    # Hooks that are there all the time.
    yield Row("hooks on parameters", S.PLAIN, P.double_and_count)
    yield Row("hooks on a layer", S.with_hooks_on_a_layer, P.STEP)
    for which, program in HOOKED.items():
        for policy in (STRICT, OFF):
            yield Row(f"hooks: {which}, {policy['self_check']}", S.PLAIN, program, policy)
    yield Row("notes of hooks and older forwards", S.PLAIN, hooks.notes_and_older_forwards)
    # Within an autocast region, whose one cast of an adapter decides when its gradient arrives.
    for name, subject in ORDERED.items():
        for region, program in IN_ORDER.items():
            for policy in (STRICT, OFF):
                yield Row(f"{name}, {region}, {policy['self_check']}", subject, program, policy)
    for name, program in PENALTIES.items():
        yield Row(f"a penalty: {name}", S.FP32_NO_DROPOUT, program)
    yield Row("two forwards, two regions", S.FP32_NO_DROPOUT, R.forwards_in_two_regions)
    yield Row("two backwards, one region", S.FP32_NO_DROPOUT, R.backwards_in_one_region)
    yield Row("a module called twice", S.called_twice, P.STEP)
    yield Row("a module called twice, no cache", S.called_twice, STEP_WITHOUT_CACHE)


ROWS = list(rows())


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_program_is_exact(row: Row, residents: Residents) -> None:
    assert residents.compare(row.subject, row.program, **row.policy) == {}


BY_THE_SIDE = ("hidden states of", "router logits of", "an adapter below", "states of an encoder")


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if row.name.startswith(BY_THE_SIDE)]
)
def test_side_channels_under_adversarial_streams_are_exact(row: Row, residents: Residents) -> None:
    prepare = partial(AdversarialPrepare(), device="cpu", **STRICT)
    assert residents.compare(row.subject, row.program, prepare) == {}


# Controls: resident programs that have to differ, or the rows above would show nothing.

DIFFERENT: dict[str, tuple[Subject, Program, Subject, Program]] = {
    "autocast in fp32": (S.FP32, P.STEP, S.FP32, P.STEP_UNDER_AUTOCAST),
    "autocast in bf16": (S.PLAIN, P.STEP, S.PLAIN, P.STEP_UNDER_AUTOCAST),
    "attention backends": (S.FP32_NO_DROPOUT, P.STEP, S.FP32_NO_DROPOUT, MATH_STEP),
    "dropout": (S.small(dropout=0.5), P.STEP, S.small(dropout=0.4), P.STEP),
    "hooks on parameters": (S.PLAIN, P.STEP, S.PLAIN, P.double_and_count),
    "hooks on a layer": (S.PLAIN, P.STEP, S.with_hooks_on_a_layer, P.STEP),
    **{
        f"hooks: {which}": (S.PLAIN, P.train_twice_each, S.PLAIN, program)
        for which, program in HOOKED.items()
        if which not in hooks.PASSIVE
    },
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


# Controls: faults of the runtime that have to show, with the self-check off.


def in_one_sum(patch: Patch) -> None:
    """The terms of an input's gradient are added before they are handed on."""
    genuine = Repeated.take

    def take(self: Repeated) -> Any:
        first, *others = genuine(self)
        return [sum(others, first), *[None] * len(others)]

    patch.setattr(Repeated, "take", take)


def no_shared_casts(patch: Patch) -> None:
    patch.setattr(SharedCasts, "through", lambda self, parameter: parameter[...])


def no_watching(patch: Patch) -> None:
    patch.setattr(early.EarlyCasts, "are_possible", lambda *_: False)


def no_per_layer_inputs(patch: Patch) -> None:
    genuine = LayerCall.run

    def run(self: LayerCall, tensors: Any) -> Any:
        return genuine(self, [tensors[0], tensors[1].detach(), *tensors[2:]])

    patch.setattr(LayerCall, "run", run)


FAULTS: list[tuple[Callable[[Patch], None], str, Subject, Program]] = [
    (in_one_sum, "states of an encoder", S.decoder, P.read_an_encoder),
    (no_per_layer_inputs, "below the layers", S.adapter_below_the_layers, P.STEP),
    *(
        (no_shared_casts, name, ORDERED["lora"], IN_ORDER[name])
        for name in ("several", "behind_a_penalty", "behind_an_evaluation", "beside_a_penalty")
    ),
    *(
        (no_watching, name, ORDERED["dora"], IN_ORDER[name])
        for name in ("region", "own_region", "with_hooks_inside")
    ),
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
    residents.facts(subject, program)
    fault(monkeypatch)
    assert residents.compare(subject, program, **OFF) != {}
    if fault is in_one_sum:  # a loss on the outputs hides it
        assert residents.compare(S.PLAIN, P.train, **OFF) == {}
    if fault is no_per_layer_inputs:
        found = observe(streamed(subject(residents.bases), **OFF), program)
        gone = residents.facts(subject, program).keys() - found.keys()
        assert len(gone) == 2 and not any("layers." in name for name in gone)


def test_a_lost_term_is_found_by_the_self_check(residents: Residents, monkeypatch: Patch) -> None:
    genuine = Repeated.watch

    def watch(self: Repeated, *args: Any) -> None:
        genuine(self, *args)
        self.terms = [None, *self.terms[1:]]

    monkeypatch.setattr(Repeated, "watch", watch)
    with pytest.raises(ParityError, match="gradient of input"):
        P.train(streamed(S.PLAIN(residents.bases)))


# Casts and watching, from near by.


@pytest.mark.parametrize(("which", "expected"), [("lora", 3), ("dora", 9)])
def test_only_layers_that_cast_early_are_watched_for_good(
    which: str, expected: int, residents: Residents, monkeypatch: Patch
) -> None:
    watched: list[int] = []
    genuine = early.first_casts

    def first_casts(tensors: Any) -> Any:
        watched.extend([len(tensors)] if len(tensors) else [])
        return genuine(tensors)

    monkeypatch.setattr("poros.layer.call.first_casts", first_casts)
    model = streamed(ORDERED[which](residents.bases))
    P.loss_of(model).backward()
    assert not watched
    R.several(model)
    assert len(watched) == expected


def test_the_bits_of_a_nan_survive_the_cast() -> None:
    """A gradient that has been through the low precision has lost them."""
    strange = torch.tensor(0x7FA10000, dtype=torch.int32).view(torch.float32)
    parameter = nn.Parameter(torch.ones(2, 3))
    with bf16():
        casts = [SharedCasts("a layer").through(parameter) for _ in range(2)]
    for cast in casts:
        parameter.grad = None
        cast.backward(strange.expand(2, 3))
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


def test_nothing_is_left_on_the_parameters(residents: Residents) -> None:
    model = streamed(S.FP32_NO_DROPOUT(residents.bases))
    P.STEP_UNDER_AUTOCAST(model)
    assert all(not each._backward_hooks for each in model.parameters())


# Lifetimes.


def test_backward_works_after_the_model_was_deleted(residents: Residents) -> None:
    found = []
    for prepare in (lambda model: model, streamed):
        model = prepare(S.NO_DROPOUT(residents.bases))
        parameters = P.trained(model)
        loss = P.loss_of(model)
        del model
        gc.collect()
        loss.backward()
        found.append({name: digest(each.grad) for name, each in parameters.items()})
    assert changes(*found) == {}


def inputs_of_layers(model: Any) -> tuple[torch.Tensor, list["weakref.ref[torch.Tensor]"]]:
    """A loss, and what the layers were given for it."""
    seen: list[weakref.ref[torch.Tensor]] = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    return P.loss_of(model), seen


def test_a_loss_kept_after_backward_keeps_no_activations(residents: Residents) -> None:
    """Many loops hold on to the last loss while the next forward runs."""
    for prepare in (lambda model: model, streamed):
        loss, seen = inputs_of_layers(prepare(S.PLAIN(residents.bases)))
        assert len(seen) == 3
        loss.backward()
        gc.collect()
        assert [each() for each in seen if each() is not None] == []


def test_a_loss_without_backward_is_dropped_with_its_graph(bases: Bases) -> None:
    loss, seen = inputs_of_layers(streamed(S.PLAIN(bases)))
    assert all(each() is not None for each in seen)
    gc.disable()
    try:
        del loss
        # Reference counts alone free it: waiting for the collector would cost device memory.
        assert [each() for each in seen if each() is not None] == []
    finally:
        gc.enable()


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


def test_under_inference_mode_a_model_is_prepared_for_training(residents: Residents) -> None:
    model = S.NO_DROPOUT(residents.bases)
    with torch.inference_mode():
        streamed(model)
    assert changes(residents.facts(S.NO_DROPOUT, P.STEP), observe(model, P.STEP)) == {}
