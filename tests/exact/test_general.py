"""Hazards of recomputing within the caller's graph: each ends in equal bits or in a typed error.

Slots are filled with NaN as soon as they are released, so that whatever reads one without asking
for its block shows. Compared are results, gradients, the order in which these arrive, and random
states.
"""

import gc
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.errors import PorosError, RematerializationError, SlotStateError, UnsupportedModelError
from poros.gates.adversary import POISON
from tests.exact import programs as P
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import Bases, Model, Program, Residents, Subject, observe, streamed
from tests.exact.hazards import (
    A_MATRIX,
    another_forward,
    attentions_alone,
    bitsandbytes_beside,
    checkpointed_inside,
    coarse,
    counter,
    create_graph,
    evaluated_between,
    failing,
    forward_and_backward,
    forward_in_another_thread,
    forward_without_gradients,
    from_another_thread,
    function_of_others,
    functional_gradient,
    hooked,
    in_backward,
    inner_loss,
    inspected,
    noisy,
    numpy_random,
    own_generator,
    own_permutation,
    python_random,
    retained_and_partial,
    saved_by,
    saved_inside,
    setting_between,
    step_within_backward,
    sum_of_two,
    torch_random,
    whole_model_checkpointed,
    with_attentions,
    with_cache,
    with_hook,
)
from tests.snapshots import bf16, changes, digest, layers_of
from tests.support import AdversarialPrepare

GENERAL: dict[str, Any] = {"self_check": "off"}


def prepared(model: Model, **policy: Any) -> Model:
    """Streamed on two slots, each poisoned as soon as it is released."""
    AdversarialPrepare()(model, **{"device": "cpu", "slots": 2, **GENERAL, **policy})
    manager = poros.runtime(model).manager
    genuine = manager.release

    def release(block: int) -> None:
        genuine(block)
        if not manager.is_pinned(block):
            slot = manager._ring.slot(block)
            manager.evict(block)
            slot.buffer.fill_(POISON)

    manager.release = release  # type: ignore[method-assign]
    return model


class Row(NamedTuple):
    name: str
    subject: Subject
    program: Program
    error: type[Exception] | None = None
    match: str = ""
    policy: dict[str, Any] = {}  # noqa: RUF012


def in_order(program: Program) -> Program:
    """The program, the order in which its gradients arrive, and all random states at its end."""

    def observed(model: Model) -> object:
        random.seed(3)
        np.random.seed(3)
        order: list[str] = []
        for name, each in P.trained(model).items():
            each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        result = program(model)
        return [result, order, random.random(), float(np.random.rand())]

    return observed


# Adapters.

PROJECTIONS = [
    *(f"self_attn.{each}" for each in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{each}" for each in ("gate_proj", "up_proj", "down_proj")),
]


def adapters_on(*targets: str, quantize: bool = True, **options: Any) -> Subject:
    def make(bases: Bases) -> Model:
        torch.manual_seed(2)
        base = bases.base(quantize=quantize, dropout=0.0)
        config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **options)
        return get_peft_model(base, config)

    return make


def shared_within(bases: Bases) -> Model:
    """One adapter module for two projections of equal shape."""
    model = S.NO_DROPOUT(bases)
    mlp = layers_of(model)[1].mlp
    mlp.gate_proj.lora_A, mlp.gate_proj.lora_B = mlp.up_proj.lora_A, mlp.up_proj.lora_B
    return model


# Losses on tensors from inside a layer.


def rows() -> Iterator[Row]:
    for quantize in (True, False):
        kind = "4 bits" if quantize else "dense"
        for targets in (["q_proj", "v_proj"], *([each] for each in PROJECTIONS)):
            name = f"adapters on {', '.join(targets)}, {kind}"
            yield Row(name, adapters_on(*targets, quantize=quantize), P.train)
        subject = adapters_on("q_proj", "v_proj", quantize=quantize)
        for path in (*PROJECTIONS, "self_attn", "mlp", "input_layernorm"):
            yield Row(f"a loss on {path} alone, {kind}", subject, inner_loss(path))
            both = inner_loss(path, alone=False, around=bf16)
            yield Row(f"a loss on {path} as well, {kind}", subject, both)
    for kernels in ("peft", "fused"):
        subject = adapters_on("q_proj", "v_proj")
        program, policy = inner_loss("mlp.down_proj"), {"adapter_kernels": "peft"}
        if kernels == "peft":
            yield Row("PEFT's own modules", subject, P.train, policy=policy)
            yield Row("PEFT's own modules, an inner loss", subject, program, policy=policy)
    yield Row("adapters of DoRA on v", adapters_on("v_proj", use_dora=True), P.train)
    yield Row("one adapter for two projections", shared_within, P.STEP_UNDER_AUTOCAST)
    yield Row("tied within, autocast", S.tied_within, R.own_region)
    yield Row("tied across, autocast", S.tied_across, R.own_region)
    yield Row("called twice, autocast", S.called_twice, R.own_region)
    for name in ("gemma4", "mixtral", "qwen2"):
        subject = S.small(name, attn_implementation="eager")
        yield Row(f"attentions of {name}", subject, with_attentions)
        yield Row(f"attentions of {name} alone", subject, attentions_alone)
    for name in ("mixtral", "qwen3_moe"):
        yield Row(f"routers of {name}", S.small(name), P.routers_alone)
    shared = S.small("gemma4_shared_kv", num_layers=4)
    yield Row("shared keys and values", shared, P.train)
    yield Row("shared keys and values, hidden states", shared, P.hidden_states_alone)
    # Hooks inside a layer.
    generator = RematerializationError, "the values that the forward"
    yield Row("own generator", S.PLAIN, own_generator, *generator)
    yield Row("own permutation", S.PLAIN, own_permutation, *generator)
    yield Row("counter", S.PLAIN, counter, *generator)
    yield Row("Python's generator", S.PLAIN, with_hook(python_random, "input_layernorm"))
    yield Row("NumPy's generator", S.PLAIN, with_hook(numpy_random, "input_layernorm"))
    yield Row("PyTorch's generator", S.PLAIN, with_hook(torch_random, "input_layernorm"))
    nested = SlotStateError, "one layer to run at a time"
    yield Row("a forward inside a layer", S.PLAIN, another_forward(gradients=False), *nested)
    yield Row("one with gradients", S.PLAIN, another_forward(gradients=True), *nested)
    yield Row("a forward inside a backward", S.PLAIN, in_backward(forward_without_gradients))
    yield Row("a step inside a backward", S.PLAIN, in_backward(forward_and_backward))
    # Saved-tensor hooks.
    yield Row("saved as they are", S.PLAIN, saved_by(lambda each: each, lambda each: each))
    changed, drawn = ((RematerializationError, match) for match in ("other values", "draw no"))
    yield Row(
        "saved coarsely", S.PLAIN, saved_by(coarse, lambda each: each[0].to(each[1])), *changed
    )
    yield Row("saved with noise", S.PLAIN, saved_by(noisy, lambda each: each), *drawn)
    yield Row("noise when read", S.PLAIN, saved_by(lambda each: each.clone(), noisy), *drawn)
    yield Row("saved on the host", S.PLAIN, R.on_the_host)
    yield Row("the whole model checkpointed", S.PLAIN, whole_model_checkpointed)
    for reentrant in (True, False):
        name = f"a module checkpointed, {'reentrant' if reentrant else 'not reentrant'}"
        yield Row(name, S.PLAIN, checkpointed_inside(reentrant))
    for alone in (False, True):
        name = f"saved as they are inside a layer, {'inner loss' if alone else 'loss'}"
        yield Row(name, S.DENSE, saved_inside(alone=alone))
    for how in ("attribute", "closure"):
        subject = adapters_on("q_proj", "v_proj", quantize=False)
        for where in ("within", "an inner loss", "beside", "beside, alone"):
            program = function_of_others(how, where)
            yield Row(f"a function of others, {how}, {where}", subject, program)
    yield Row("bitsandbytes beside a layer", adapters_on("q_proj", "v_proj"), bitsandbytes_beside)
    # Backwards.
    yield Row("backward in another thread", S.PLAIN, from_another_thread)
    yield Row("forward in another thread", S.PLAIN, forward_in_another_thread)
    yield Row("two forwards, one backward", S.PLAIN, sum_of_two)
    for order in ((0, 1), (1, 0)):
        yield Row(f"two forwards, backwards {order}", S.PLAIN, P.two_forwards(order))
    yield Row("two forwards in a region", S.FP32, R.forwards_in_one_region)
    yield Row("partial backwards", S.PLAIN, retained_and_partial)
    yield Row("updates within backward", S.PLAIN, step_within_backward)
    yield Row("create_graph", S.PLAIN, create_graph, UnsupportedModelError, "create_graph")
    peft = {"adapter_kernels": "peft"}
    refused = RematerializationError, "create_graph"
    yield Row("create_graph of PEFT's modules", S.FP32, create_graph, *refused, peft)
    match = "torch.func.grad"
    yield Row("torch.func.grad", S.NO_DROPOUT, functional_gradient, UnsupportedModelError, match)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        for where in ("forward", "backward", A_MATRIX):
            yield Row(f"{error.__name__} in {where[-20:]}", S.PLAIN, failing(where, error))
    yield Row("an evaluation in between", S.PLAIN, evaluated_between)
    yield Row("mkldnn off in between", S.FP32, setting_between)
    yield Row("use_cache", S.PLAIN, with_cache)
    yield Row("saved tensors looked at", S.PLAIN, inspected)
    for name, program in {
        "penalty": R.with_penalty(R.penalty),
        "penalty first": R.penalty_first,
        "penalty outside": R.penalty_outside,
        "penalty retained": R.retained,
    }.items():
        yield Row(f"{name} in a region", S.FP32_NO_DROPOUT, R.in_order(program))


ROWS = [row._replace(program=in_order(row.program)) for row in rows()]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_hazard_ends_in_equal_bits_or_in_a_typed_error(row: Row, residents: Residents) -> None:
    if row.error is None:
        assert residents.compare(row.subject, row.program, prepared, **row.policy) == {}
        return
    assert issubclass(row.error, PorosError)
    model = prepared(row.subject(residents.bases), **row.policy)
    before = {name: each.detach().clone() for name, each in P.trained(model).items()}
    with pytest.raises(row.error, match=row.match):
        row.program(model)
    for name, each in P.trained(model).items():
        assert torch.equal(before[name], each), name
    model.zero_grad()
    # All is well behind it.
    assert changes(residents.facts(row.subject, P.STEP), observe(model, P.STEP)) == {}


def test_the_model_may_be_deleted_in_between(residents: Residents) -> None:
    def program(model: Model) -> object:
        loss = P.loss_of(model)
        loss.backward()
        return loss

    expected = residents.facts(S.PLAIN, program)
    model = prepared(S.PLAIN(residents.bases)).train()
    parameters = P.trained(model)
    torch.manual_seed(5)
    loss = P.loss_of(model)
    del model
    gc.collect()
    loss.backward()
    for name, each in parameters.items():
        assert expected[f"gradient of {name}"] == digest(each.grad)


def test_what_functions_of_others_keep_is_said(bases: Bases) -> None:
    subject = adapters_on("q_proj", "v_proj", quantize=False)
    model = streamed(subject(bases), **GENERAL)
    P.STEP(model)
    assert poros.runtime(model).stats()["fallbacks"] == []
    function_of_others("attribute")(model)
    (line,) = poros.runtime(model).stats()["fallbacks"]
    assert "KeepsAsItLikes" in line


def test_hooks_that_keep_saved_tensors_are_said(bases: Bases) -> None:
    model = streamed(S.PLAIN(bases), **GENERAL)
    R.on_the_host(model)
    (line,) = poros.runtime(model).stats()["fallbacks"]
    assert "hooks of the caller" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_recomputation_may_be_interrupted(
    error: type[BaseException], residents: Residents
) -> None:
    model = prepared(S.PLAIN(residents.bases)).train()
    calls: list[int] = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error

    with hooked(model, "mlp", hook):
        loss = P.loss_of(model)
        flags, state = [each.training for each in model.modules()], torch.get_rng_state()
        with pytest.raises(error):
            loss.backward()
    assert flags == [each.training for each in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    model.zero_grad()
    assert changes(residents.facts(S.PLAIN, P.STEP), observe(model, P.STEP)) == {}
