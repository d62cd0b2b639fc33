"""Programs of users on a prepared model: the bits of the resident one, in the same order.

All with slots that are poisoned: several times, with visits that are recorded on tapes, or once,
with the self-check on. `make test` has the first of what may be replayed, and the second of others.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP

import poros
from poros.replay.remat import RematerializeLayer
from poros.stream.body import LayerBody
from poros.stream.boundary import is_streamed
from tests.comparing import changes, digest
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.exact.recorded import on_tapes, poisoned
from tests.loops import (
    ON_HOST,
    Model,
    Program,
    Subject,
    bf16,
    differing_facts,
    facts_of,
    in_order,
    layers_of,
    observe,
    often,
    resident_facts,
    run,
    streamed,
)
from tests.replaced import Patch, in_place_of


class Row(NamedTuple):
    program: Program
    subject: Subject = S.PLAIN
    policy: dict[str, Any] = {}  # noqa: RUF012
    replays: bool = True
    """Whether visits of some layers may be replayed."""
    num_fewer: int = 0
    """How many times less it runs, as the program has several steps."""

    @property
    def num_times(self) -> int:
        """The first shows what is to be recorded, the second proves it, the third replays it."""
        return 2 + self.replays - self.num_fewer


PEFT: dict[str, Any] = {"adapter_kernels": "peft"}
UNCHECKED: dict[str, Any] = {"self_check": "off"}
"""The self-check itself runs hooks, restores PyTorch's random states alone, and takes gradients as
reentrant checkpoints refuse."""


def backwards() -> Iterator[tuple[str, Row]]:
    yield "partial backwards", Row(P.partial_backwards)
    yield "backward in another thread", Row(P.from_another_thread)
    yield "forward in another thread", Row(P.forward_in_another_thread)
    yield "a backward below another", Row(P.backward_below_an_earlier_one, replays=False)
    yield "a layer called outside of the model", Row(P.layer_outside_of_the_model)
    yield "saved tensors looked at", Row(P.inspected)
    yield "two parameters that are added", Row(P.gradients_of_their_own, S.shifted)


def losses() -> Iterator[tuple[str, Row]]:
    """On what passes between the layers, and on what is inside them."""
    for name in ("gemma4", "mixtral"):
        subject = S.small(name, attn_implementation="eager")
        yield f"attentions of {name}", Row(P.attentions, subject, replays=False)
    yield "states of an encoder", Row(P.read_an_encoder, S.decoder)
    below = Row(P.train_below_the_layers, S.adapter_below_the_layers, replays=False)
    yield "an adapter below the layers", below
    own = Row(P.inner_loss, S.adapters_on("q_proj", "v_proj"), PEFT)
    yield "PEFT's own modules, an inner loss", own
    subject = S.adapters_on(
        "q_proj", "down_proj", dropout=0.05, use_dora=True, modules_to_save=["input_layernorm"]
    )
    yield "norms that are trained", Row(partial(run, num_steps=1), subject)
    score = S.reading("AutoModelForSequenceClassification")
    yield "a classifier", Row(P.classify, score)  # reward models: ``test_trl``
    # A run has four forwards, which are enough to replay some.
    yield "embeddings", Row(P.contrast, S.reading("AutoModel", "gemma3"), num_fewer=1)


def surroundings() -> Iterator[tuple[str, Row]]:
    """What surrounds a forward is replayed at its recomputation."""
    # With dropout there is one backend only.
    yield "math attention", Row(P.MATH_STEP, S.FP32_NO_DROPOUT)
    full = S.few(dropout=0.05, dtype=torch.float32, quantize=False)
    yield "autocast around backward", Row(P.one_step(backward=bf16), full)
    yield "another autocast around backward", Row(P.one_step(bf16, P.fp16))
    for kind in (Qwen2DecoderLayer, nn.Linear):
        program = P.class_with_another_forward(kind, P.turned_around(kind))
        yield f"another forward of {kind.__name__}", Row(program, full, num_fewer=2)
    program = P.class_with_another_forward(Qwen2MLP, nn.Identity.forward)
    yield "a library's other forward of Qwen2MLP", Row(program, full, num_fewer=2)
    for name, (program, replays) in P.IN_REGIONS.items():
        yield f"an adapter under autocast: {name}", Row(program, S.FP32_DENSE, replays=replays)


def inside() -> Iterator[tuple[str, Row]]:
    """Forwards, hooks and functions of users inside a layer."""
    for reentrant in (True, False):
        name = f"a module checkpointed, {'reentrant' if reentrant else 'not reentrant'}"
        yield name, Row(P.checkpointed_inside(reentrant), policy=UNCHECKED if reentrant else {})
    yield "an operator that saves an empty tensor", Row(P.EMPTY_TENSOR_SAVED)
    for alone in (False, True):
        name = f"saved as they are inside a layer, {'inner loss' if alone else 'loss'}"
        yield name, Row(P.saved_inside(alone=alone), S.DENSE)
    yield "an older hook on backward", Row(P.older_hook)
    program = P.with_hook(P.python_random, "input_layernorm")
    yield "Python's and NumPy's generators in a hook", Row(program, policy=UNCHECKED)
    for part in ("seed", "padding"):
        yield f"an operator that leaves its {part} unwritten", Row(P.kept_by_kernels(part))
    for gradients in (False, True):
        name = f"a {'step' if gradients else 'forward'} inside a backward"
        yield name, Row(P.in_backward(gradients=gradients))
    others = S.adapters_on("q_proj", "v_proj", quantize=False)
    yield "a function of others that keeps a weight", Row(P.function_of_others, others)
    beside = S.adapters_on("q_proj", "v_proj")
    yield "bitsandbytes beside a layer", Row(P.bitsandbytes_beside, beside)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def evaluations() -> Iterator[tuple[str, Row]]:
    """Beside those of ``test_cells``, which has all architectures, without autocast."""
    for (name, mode), subject in zip(MODES.items(), (S.FP32, S.PLAIN), strict=True):
        program = partial(P.evaluated_under_autocast, mode=mode)
        name = f"evaluations under autocast, {name}, {'fp32' if subject is S.FP32 else 'bf16'}"
        yield name, Row(program, subject, replays=subject is S.PLAIN, num_fewer=1)
    for name, options in {
        "without a cache": {"use_cache": False},
        "samples": {"do_sample": True, "top_k": 0},
        "beams": {"num_beams": 2},
        "a static cache": {"cache_implementation": "static"},
    }.items():
        # With logits whole, as they are read; with the head in host memory or not.
        policy = {"block_size": 2, **(ON_HOST if "num_beams" in options else {})}
        yield (
            f"generation: {name}",
            Row(partial(P.generated, **options), S.PLAIN, policy, name == "without a cache"),
        )
    experts = Row(P.generated, S.small("qwen3_moe"), {"block_size": 2}, replays=False)
    yield "generation of experts", experts


ROWS: dict[str, Row] = dict((*backwards(), *losses(), *surroundings(), *inside(), *evaluations()))


def rows(is_checked: bool) -> Any:
    # The check of a decoder's layers copies a cache of two parts.
    slow = [
        row.replays == is_checked and not (is_checked and row.subject is S.decoder)
        for row in ROWS.values()
    ]
    each = [
        pytest.param(row, id=name, marks=[pytest.mark.slow] * is_slow)
        for (name, row), is_slow in zip(ROWS.items(), slow, strict=True)
    ]
    return pytest.mark.parametrize("row", each)


@rows(is_checked=True)
def test_a_program_is_exact(row: Row) -> None:
    program = often(in_order(row.program), 1)
    expected = resident_facts(row.subject, program)
    model = poisoned(row.subject(), **{"self_check": "strict", **row.policy})
    assert changes(expected, observe(model, program)) == {}


@rows(is_checked=False)
def test_a_program_whose_visits_are_replayed_is_exact(row: Row) -> None:
    program = often(in_order(row.program), row.num_times)
    expected = resident_facts(row.subject, program)
    model = on_tapes(row.subject(), **row.policy)
    assert changes(expected, observe(model, program)) == {}
    captures = poros.runtime(model).captures
    assert captures and (captures.num_replays > 0) == row.replays
    assert row.replays or row.num_fewer or not captures.num_recorded


@pytest.mark.parametrize("mode", MODES)
def test_a_model_prepared_under_a_gradless_mode_is_exact(mode: str) -> None:
    def train_and_restore(model: Model) -> object:
        first = P.train(model)
        if is_streamed(layers_of(model)[0]):
            poros.restore(model)
        return first, P.train(model)

    def prepare(model: Model) -> Model:
        with MODES[mode]():
            return streamed(model)

    assert differing_facts(S.PLAIN, train_and_restore, prepare) == {}


# Controls: resident programs that have to differ, or the rows above would show nothing.

DIFFERENT: dict[str, tuple[Subject, Program, Subject, Program]] = {
    "autocast in fp32": (S.FP32, P.STEP, S.FP32, P.one_step(bf16)),
    "attention backends": (S.FP32_NO_DROPOUT, P.STEP, S.FP32_NO_DROPOUT, P.MATH_STEP),
    "dropout": (S.small(dropout=0.5), P.STEP, S.small(dropout=0.4), P.STEP),
    "an older hook on backward": (S.PLAIN, P.STEP, S.PLAIN, P.older_hook),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_control_programs_differ(name: str) -> None:
    subject, program, other_subject, other = DIFFERENT[name]
    assert changes(resident_facts(subject, program), resident_facts(other_subject, other))


# Controls: faults of the runtime that have to show, with the self-check off. Of casts, of order and
# of sums: ``test_written_programs``.


@in_place_of(RematerializeLayer, "backward")
def off_by_a_unit(genuine: Any, ctx: Any, *gradients: Any) -> Any:
    """Each gradient, in the last place of bf16."""
    return tuple(each if each is None else each * 1.0078125 for each in genuine(ctx, *gradients))


@in_place_of(LayerBody, "run")
def without_gradients_of_other_inputs(genuine: Any, self: LayerBody, args: Any, named: Any) -> Any:
    return genuine(self, (args[0], *(each.detach() for each in args[1:])), named)


def test_control_gradients_that_are_off_differ(monkeypatch: Patch) -> None:
    off_by_a_unit(monkeypatch)
    assert differing_facts(S.PLAIN, often(in_order(P.STEP)), on_tapes) != {}


def test_control_per_layer_inputs_without_a_gradient_differ(monkeypatch: Patch) -> None:
    without_gradients_of_other_inputs(monkeypatch)
    found = observe(streamed(S.adapter_below_the_layers(), self_check="off"), P.STEP)
    gone = resident_facts(S.adapter_below_the_layers, P.STEP).keys() - found.keys()
    assert len(gone) == 2 and not any("layers." in name for name in gone)


def test_control_generation_uses_the_adapters() -> None:
    model = streamed(S.PLAIN())
    expected = facts_of(P.generated(model))
    with torch.no_grad():
        layers_of(model)[1].mlp.up_proj.lora_B["default"].weight.mul_(2)
    assert changes(expected, facts_of(P.generated(model)))


# What is left behind.


def test_backward_works_after_the_model_was_deleted() -> None:
    found = []
    for prepare in (lambda model: model, streamed, on_tapes):
        model = prepare(S.NO_DROPOUT())
        parameters = P.trained(model)
        loss = P.loss_of(model)
        del model
        gc.collect()
        loss.backward()
        found.append({name: digest(each.grad) for name, each in parameters.items()})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("prepare", [streamed, on_tapes])
def test_a_loss_kept_after_backward_keeps_no_activations(prepare: Callable[[Any], Any]) -> None:
    """Many loops hold on to the last loss while the next forward runs."""
    model = prepare(S.PLAIN())
    seen: list[weakref.ref[torch.Tensor]] = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss = P.loss_of(model)
    assert len(seen) == 3
    loss.backward()
    del model
    gc.collect()
    assert [each() for each in seen if each() is not None] == []
