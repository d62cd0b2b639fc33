"""Hazards of recomputing within the caller's graph: each ends in equal bits or in a typed error.

Slots are filled with NaN as soon as they are released, so that whatever reads one without asking
for its block shows. Compared are results, gradients, the order in which these arrive, and random
states.
"""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

import poros
from poros.errors import PorosError, RematerializationError, SlotStateError, UnsupportedModelError
from poros.gates.adversary import POISON
from tests.exact import programs as P
from tests.exact import regions as R
from tests.exact import subjects as S
from tests.exact.arms import Bases, Model, Program, Residents, Subject, observe, streamed
from tests.snapshots import batches, bf16, changes, digest, layers_of
from tests.support import AdversarialPrepare

GENERAL: dict[str, Any] = {"lane": "general", "self_check": "off"}


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


@contextmanager
def hooked(model: Model, path: str, hook: Callable[..., Any], layer: int = 1) -> Iterator[None]:
    handle = layers_of(model)[layer].get_submodule(path).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def first_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def inner_loss(path: str, *, alone: bool = True, around: Any = P.nullcontext) -> Program:
    def program(model: Model) -> None:
        kept: list[torch.Tensor] = []
        with hooked(model, path, lambda m, args, output: kept.append(first_of(output))):
            with around():
                loss = P.loss_of(model)
            inner = kept[0].float().square().mean()
            (inner if alone else loss + inner).backward()

    return program


def with_attentions(model: Model) -> object:
    out = model(**batches()[1], output_attentions=True)
    (out.loss + out.attentions[1].float().square().sum()).backward()
    return out.attentions


def attentions_alone(model: Model) -> object:
    out = model(**batches()[1], output_attentions=True)
    out.attentions[1].float().square().sum().backward()
    return out.attentions


# Hooks inside a layer, and what they draw.


def with_hook(hook: Callable[..., Any], path: str = "mlp") -> Program:
    def program(model: Model) -> object:
        with hooked(model, path, hook):
            loss = P.loss_of(model)
            loss.backward()
        return loss

    return program


def own_generator(model: Model) -> object:
    generator = torch.Generator().manual_seed(3)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.randn(output.shape, generator=generator).to(output.dtype)

    return with_hook(hook, "self_attn.o_proj")(model)


def own_permutation(model: Model) -> object:
    """Changes no sum over all."""
    generator = torch.Generator().manual_seed(3)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output[:, torch.randperm(output.shape[1], generator=generator)]

    return with_hook(hook, "post_attention_layernorm")(model)


def counter(model: Model) -> object:
    calls: list[int] = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * len(calls)

    return with_hook(hook, "input_layernorm")(model)


def python_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + random.random())


def numpy_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + float(np.random.rand()))


def torch_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + torch.randn_like(output)


def another_forward(*, gradients: bool) -> Program:
    """By a hook inside a layer, as it is called."""

    def program(model: Model) -> None:
        is_inside = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            if not is_inside:
                is_inside.append(1)
                with torch.set_grad_enabled(gradients):
                    P.loss_of(model, 1)
                is_inside.clear()

        with_hook(hook)(model)

    return program


def in_backward(inner: Callable[[Model], object]) -> Program:
    """Something that a hook on a tensor inside a layer does as its gradient arrives."""

    def program(model: Model) -> object:
        found: list[object] = []
        outputs: list[torch.Tensor] = []
        with hooked(model, "mlp", lambda m, args, output: outputs.append(output)):
            loss = P.loss_of(model)
            outputs[0].register_hook(lambda gradient: found.append(inner(model)))
            loss.backward()
        return [found, loss]

    return program


def forward_without_gradients(model: Model) -> object:
    with torch.no_grad():
        return P.loss_of(model, 1)


def forward_and_backward(model: Model) -> object:
    with torch.enable_grad():
        loss = P.loss_of(model, 1)
        loss.backward()
    return loss


# Saved-tensor hooks of the caller.


def saved_by(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Program:
    def program(model: Model) -> object:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = P.loss_of(model)
        loss.backward()
        return loss

    return program


def coarse(tensor: torch.Tensor) -> Any:
    is_float = tensor.dtype in (torch.float32, torch.bfloat16)
    return (tensor.detach().to(torch.float8_e5m2) if is_float else tensor), tensor.dtype


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn_like(tensor) if tensor.is_floating_point() else tensor


def whole_model_checkpointed(model: Model) -> object:
    loss = checkpoint(P.loss_of, model, use_reentrant=False)
    loss.backward()
    return loss


def checkpointed_inside(reentrant: bool) -> Program:
    def program(model: Model) -> object:
        mlp = layers_of(model)[1].mlp
        own = mlp.forward
        mlp.forward = lambda x: checkpoint(own, x, use_reentrant=reentrant)
        try:
            loss = P.loss_of(model)
            loss.backward()
        finally:
            del mlp.forward
        return loss

    return program


def saved_on_cpu_inside(model: Model) -> object:
    mlp = layers_of(model)[1].mlp
    own = mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            return own(x)

    mlp.forward = forward
    try:
        loss = P.loss_of(model)
        loss.backward()
    finally:
        del mlp.forward
    return loss


# Functions of others.


class KeepsAsItLikes(torch.autograd.Function):
    """A product that keeps its weight, and what it was given, in attributes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        kept = {"attribute": weight, "closure": lambda: weight}[how]
        ctx.kept = kept
        ctx.scale = x.abs().mean(-1, keepdim=True)
        return (x @ weight.T) * 1e-2 + x * ctx.scale.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        weight = ctx.kept() if callable(ctx.kept) else ctx.kept
        return (gradient @ weight) * 1e-2 + gradient * ctx.scale.sign(), None, None


def function_of_others(how: str, *, inner: bool = False) -> Program:
    def program(model: Model) -> object:
        kept: list[torch.Tensor] = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            weight = layers_of(model)[1].self_attn.o_proj.weight
            kept.append(KeepsAsItLikes.apply(output, weight, how))
            return kept[-1]

        with hooked(model, "mlp", hook):
            loss = P.loss_of(model)
            if inner:
                kept[0].float().square().mean().backward(retain_graph=True)
            loss.backward()
        return loss

    return program


# Backwards.


def from_another_thread(model: Model) -> object:
    loss = P.loss_of(model)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


def forward_in_another_thread(model: Model) -> object:
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(P.loss_of(model)))
    thread.start()
    thread.join()
    losses[0].backward()
    return losses


def create_graph(model: Model) -> None:
    loss = P.loss_of(model)
    torch.autograd.grad(loss, list(P.trained(model).values()), create_graph=True)


def functional_gradient(model: Model) -> object:
    trained = dict(P.trained(model))

    def loss_of(values: Any) -> Any:
        return torch.func.functional_call(model, values, kwargs=batches()[0]).loss

    return torch.func.grad(loss_of)({name: each.detach() for name, each in trained.items()})


def sum_of_two(model: Model) -> None:
    (P.loss_of(model) + P.loss_of(model, 1)).backward()


def retained_and_partial(model: Model) -> object:
    loss = P.loss_of(model)
    parameters = list(P.trained(model).values())
    found = [torch.autograd.grad(loss, parameters[n], retain_graph=True)[0] for n in (0, 9, -1)]
    loss.backward(retain_graph=True)
    loss.backward()
    return found


def step_within_backward(model: Model) -> None:
    """Each adapter is updated as soon as its gradient is there."""
    handles = []
    for each in P.trained(model).values():
        optimizer = torch.optim.SGD([each], lr=0.1)
        handles.append(each.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step()))
    for number in (0, 1, 0):
        P.loss_of(model, number).backward()
    for handle in handles:
        handle.remove()


def failing(where: str, error: type[BaseException]) -> Program:
    """An exception in the middle, and a step behind it."""

    def program(model: Model) -> object:
        def fail(*_: Any) -> None:
            raise error

        module = layers_of(model)[1].mlp
        if where == "forward":
            handle = module.register_forward_hook(fail)
        elif where == "backward":
            handle = module.register_full_backward_hook(fail)
        else:
            handle = P.trained(model)[where].register_hook(fail)
        with pytest.raises(error):
            P.loss_of(model).backward()
        handle.remove()
        model.zero_grad()
        torch.manual_seed(7)
        return P.STEP(model)

    return program


A_MATRIX = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"


def evaluated_between(model: Model) -> object:
    loss = P.loss_of(model)
    with torch.no_grad():
        P.loss_of(model, 1)
    loss.backward()
    return loss


def setting_between(model: Model) -> object:
    loss = P.loss_of(model)
    torch.backends.mkldnn.enabled = False
    try:
        loss.backward()
    finally:
        torch.backends.mkldnn.enabled = True
    return loss


def with_cache(model: Model) -> object:
    out = model(**batches()[0], use_cache=True)
    out.loss.backward()
    return out.loss


def inspected(model: Model) -> object:
    """Somebody looks at what a node has saved, as drawings of graphs do, and goes on."""
    kept: list[torch.Tensor] = []
    with hooked(model, "self_attn.o_proj", lambda m, args, output: kept.append(output)):
        loss = P.loss_of(model)
        node: Any = kept[0].grad_fn
        assert node is not None
        names = [name for name in dir(node) if name.startswith("_saved") or name == "saved_tensors"]
        assert [getattr(node, name) for name in names]
        loss.backward()
    return loss


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
    yield Row("saved as they are inside a layer", S.DENSE, saved_on_cpu_inside)
    for how in ("attribute", "closure"):
        subject = adapters_on("q_proj", "v_proj", quantize=False)
        for inner in (False, True):
            name = f"a function of others, {how}, {'inner loss' if inner else 'loss'}"
            yield Row(name, subject, function_of_others(how, inner=inner))
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
