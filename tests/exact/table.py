"""Programs that a prepared model computes with the bits of a resident one, in the same order."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.exact import hazards as H
from tests.exact import programs as P
from tests.exact import provocations as V
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import Program, Subject
from tests.snapshots import bf16


class Row(NamedTuple):
    name: str
    subject: Subject
    program: Program
    policy: dict[str, Any] = {}  # noqa: RUF012
    replays: bool = True
    """Whether visits of some layers may be replayed."""
    num_times: int = 0
    """The first shows what is to be recorded, the second proves it, the third replays it."""


PEFT: dict[str, Any] = {"adapter_kernels": "peft"}
CHECKED: dict[str, Any] = {"self_check": "strict"}
"""As kinds of adapters without a record have to be."""
UNCHECKED: dict[str, Any] = {"self_check": "off"}
"""The self-check itself runs hooks, restores PyTorch's random states alone, and takes gradients as
reentrant checkpoints refuse."""
KINDS: dict[str, dict[str, Any]] = {
    "head saved": {"modules_to_save": ["lm_head"]},
    "dora, norms saved": {"use_dora": True, "modules_to_save": ["input_layernorm"]},
}
SHARED = S.small("gemma4_shared_kv", num_layers=4)
MEETINGS = {  # of gradients of adapters, within a region or not
    "float16": R.half,
    "without a cache": R.without_a_cache,
    "a region of the model": R.own_region,
    "behind a penalty": R.behind_a_penalty,
    "beside a penalty": R.beside_a_penalty,
    "behind an evaluation": R.behind_an_evaluation,
    "a penalty first": R.penalty_first,
    "a penalty beside a backward of its own": R.retained,
    "regions of their own": R.regions_of_their_own,
    "a penalty outside of accelerate": R.penalty_by_accelerate,
    "a penalty, no cache": R.with_penalty(R.penalty, R.uncached),
}
MATH_STEP = P.one_step(forward=P.only_math)


def backwards() -> Iterator[Row]:
    yield Row("different losses", S.PLAIN, P.different_losses, replays=False)
    yield Row("gradients of some parameters", S.PLAIN, P.some_parameters, replays=False)
    yield Row("partial backwards", S.PLAIN, H.retained_and_partial)
    name, policy = "partial backwards, inputs on the host", {"offload_boundaries": True}
    yield Row(name, S.PLAIN, H.retained_and_partial, policy)
    yield Row("backward in another thread", S.PLAIN, H.from_another_thread)
    yield Row("forward in another thread", S.PLAIN, H.forward_in_another_thread)
    yield Row("a backward below another", S.PLAIN, P.backward_below_an_earlier_one, replays=False)
    yield Row("a layer called outside of the model", S.PLAIN, P.layer_outside_of_the_model)
    for where in ("forward", "backward", H.A_MATRIX):
        yield Row(f"Ctrl-C in {where[-20:]}", S.PLAIN, H.interrupted(where), UNCHECKED)
    yield Row("saved tensors looked at", S.PLAIN, H.inspected)
    yield Row("zero_grad in between", S.two_adapters, P.one_step(between=lambda m: m.zero_grad()))


def losses() -> Iterator[Row]:
    """On what passes between the layers, and on what is inside them.

    A state that feeds the next layer and a loss has a gradient of three terms: a resident run adds
    the loss's, the residual path's, then the norm's.
    """
    yield Row("a loss on the last state", S.PLAIN, P.loss_on_the_last_state, replays=False)
    yield Row("losses on what layers give", S.PLAIN, P.loss_on_outputs)
    yield Row("hidden states alone", S.NO_DROPOUT, P.hidden_states_alone, replays=False)
    yield Row("hidden states of gemma4", SHARED, P.hidden_states_alone, replays=False)
    yield Row("shared keys and values", SHARED, P.train_once, replays=False)
    for name in ("mixtral", "qwen3_moe"):
        yield Row(f"router logits of {name}", S.small(name), P.routers_alone, replays=False)
    for name, program in {
        "gemma4": H.attentions(alone=False),
        "mixtral": H.attentions(alone=True),
        "qwen2": H.attentions_without_gradients,
    }.items():
        subject = S.small(name, attn_implementation="eager")
        yield Row(f"attentions of {name}", subject, program, replays=False)
    yield Row("states of an encoder", S.decoder, P.read_an_encoder)
    below = S.adapter_below_the_layers, P.train_below_the_layers
    yield Row("an adapter below the layers", *below, replays=False)
    subject = S.adapters_on("q_proj", "v_proj")
    yield Row("an inner loss, PEFT", subject, H.inner_loss("mlp.down_proj"), PEFT)
    for kind in (list, dict):
        program = V.through(V.with_argument(lambda kwargs, kind=kind: kwargs.update(found=kind())))  # type: ignore[misc]
        yield Row(f"a {kind.__name__} as argument", S.PLAIN, program)
    program = V.with_argument(lambda kwargs: kwargs["shared_kv_states"].update(notes=[]))
    yield Row("a list in shared states", SHARED, V.through(program), replays=False)


def surroundings() -> Iterator[Row]:
    """What surrounds a forward is replayed at its recomputation."""
    yield Row("flags behind a step", S.PLAIN, P.step_and_flags)
    full = S.small(dtype=torch.float32, quantize=False)
    for name, subject, step in (
        # With dropout there is one backend only.
        ("math attention", S.FP32_NO_DROPOUT, MATH_STEP),
        ("math attention twice", S.NO_DROPOUT, P.one_step(P.only_math, P.only_math)),
        ("autocast around backward", S.PLAIN, P.one_step(backward=bf16)),
        ("autocast around backward, float32", full, P.one_step(backward=bf16)),
        ("autocast around both", S.PLAIN, P.one_step(bf16, bf16)),
        ("autocast, float32", full, P.STEP_UNDER_AUTOCAST),
    ):
        yield Row(name, subject, step)
    for reentrant in (True, False):
        name = f"a module checkpointed, {'reentrant' if reentrant else 'not reentrant'}"
        policy = UNCHECKED if reentrant else {}
        yield Row(name, S.PLAIN, H.checkpointed_inside(reentrant), policy)
    yield Row("an operator in a layer that saves an empty tensor", S.PLAIN, H.EMPTY_TENSOR_SAVED)
    for alone in (False, True):
        name = f"saved as they are inside a layer, {'inner loss' if alone else 'loss'}"
        yield Row(name, S.DENSE, H.saved_inside(alone=alone))


def adapters() -> Iterator[Row]:
    for name, options in KINDS.items():
        yield Row(f"{name} on all layers", S.on_layers([0, 1, 2], **options), P.train_once)
    yield Row("adapters of DoRA on v", S.adapters_on("v_proj", use_dora=True), P.train_once)
    yield Row("PEFT's own modules", S.adapters_on("q_proj", "v_proj"), P.train_once, PEFT)
    for name, program in {
        "train": P.train_once,
        "no cache": P.one_step(forward=R.uncached),
        "autocast": P.STEP_UNDER_AUTOCAST,
        "a region of the model": R.own_region,
    }.items():
        yield Row(f"one adapter for two projections, {name}", S.shared_within, program)
    yield Row("two parameters that are added", S.shifted, P.gradients_of_their_own)
    yield Row("vblora", S.vblora, P.train_once, CHECKED, replays=False)
    for name, program in MEETINGS.items():
        # Where casts are there before the layers are, it is not seen when gradients arrive.
        is_before = name in ("a penalty first", "behind a penalty", "behind an evaluation")
        yield Row(f"an adapter, {name}", S.FP32_DENSE, program, replays=not is_before)


def readers() -> Iterator[Row]:
    """Without the head of a language model. Reward models: ``test_trl``."""
    score = "AutoModelForSequenceClassification"
    yield Row("a classifier", S.reading(score), P.classify, num_times=3)
    yield Row("a classifier, llama", S.reading(score, "llama"), P.classify, num_times=3)
    # A run has four forwards, which are enough to replay some.
    yield Row("embeddings", S.reading("AutoModel", "qwen3"), P.contrast, num_times=2)
    yield Row("embeddings of gemma3", S.reading("AutoModel", "gemma3"), P.contrast, num_times=2)


def hooked() -> Iterator[Row]:
    yield Row("an older hook on backward", S.PLAIN, H.older_hook, replays=False)
    for name, hook in {"Python's": H.python_random, "NumPy's": H.numpy_random}.items():
        program = H.with_hook(hook, "input_layernorm")
        yield Row(f"{name} generator in a hook", S.PLAIN, program, UNCHECKED)
    for part in ("seed", "padding"):
        yield Row(f"an operator that leaves its {part} unwritten", S.PLAIN, H.kept_by_kernels(part))
    inner = H.forward_without_gradients, H.forward_and_backward
    yield Row("a forward inside a backward", S.PLAIN, H.in_backward(inner[0]))
    yield Row("a step inside a backward", S.PLAIN, H.in_backward(inner[1]))
    subject = S.adapters_on("q_proj", "v_proj", quantize=False)
    places = ("within", "an inner loss", "beside", "beside, alone")
    for place, where in enumerate(places):
        how = ("attribute", "closure")[place % 2]
        program = H.function_of_others(how, where)
        yield Row(f"a function of others, {how}, {where}", subject, program)
    subject = S.adapters_on("q_proj", "v_proj")
    yield Row("bitsandbytes beside a layer", subject, H.bitsandbytes_beside)


EACH = (*backwards(), *losses(), *surroundings(), *adapters(), *readers(), *hooked())
ROWS = [row._replace(num_times=row.num_times or 2 + row.replays) for row in EACH]
