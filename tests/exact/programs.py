"""What users do within a step, as functions of a model: losses, backwards, regions, hooks.

Here is what the language of the fuzzer cannot say; for the rest: ``test_written_programs``.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests import loops
from tests.comparing import changes
from tests.loops import Model, Program, batches, bf16, layers_of

Context = Callable[[], AbstractContextManager[Any]]

fp16 = partial(torch.autocast, "cpu", dtype=torch.float16)


def loss_of(model: Model, number: int = 0) -> torch.Tensor:
    return model(**batches()[number]).loss  # type: ignore[no-any-return]


def trained(model: Model) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


train: Program = loops.run
"""Two steps of the reference loop, all that they compute."""
train_under_autocast = partial(loops.run, autocast_dtype=torch.bfloat16)


# One step, and what may surround its forward and its backward.


def one_step(forward: Context = nullcontext, backward: Context = nullcontext) -> Program:
    def program(model: Model) -> object:
        model.train()
        with forward():
            loss = loss_of(model, 1)
        with backward():
            loss.backward()
        return loss

    return program


STEP = one_step()
MATH_STEP = one_step(forward=partial(sdpa_kernel, SDPBackend.MATH))


# Backwards.


def partial_backwards(model: Model) -> object:
    """Gradients of some parameters, and whole ones, of one graph."""
    loss = loss_of(model)
    parameters = list(trained(model).values())
    found = [torch.autograd.grad(loss, parameters[n], retain_graph=True)[0] for n in (0, 9, -1)]
    loss.backward(retain_graph=True, inputs=parameters[9:10])
    assert sum(each.grad is not None for each in parameters) == 1
    loss.backward(retain_graph=True)
    loss.backward()
    return found


def backward_below_an_earlier_one(model: Model) -> None:
    """The first stops within the layers, and the second starts below that point."""
    out = model(**batches()[0], output_hidden_states=True)
    last = layers_of(model)[2].mlp.up_proj.lora_A["default"].weight
    torch.autograd.grad(out.loss, last, retain_graph=True)
    out.hidden_states[2].float().square().mean().backward()


def gradients_of_their_own(model: Model) -> None:
    """Each has memory of its own, also where autograd gives several parameters one tensor."""
    for number in (0, 1):
        loss_of(model, number).backward()
    gradients = [each.grad for each in trained(model).values() if each.grad is not None]
    assert len({each.untyped_storage().data_ptr() for each in gradients}) == len(gradients)


@contextmanager
def caught_inputs(model: Model, index: int) -> Iterator[dict[str, Any]]:
    """What layer ``index`` is called with."""
    seen: dict[str, Any] = {}

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs, hidden=args[0] if args else kwargs["hidden_states"])

    with layers_of(model)[index].register_forward_pre_hook(look, with_kwargs=True):
        yield seen


@contextmanager
def forward_replaced(kind: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """The class runs another forward."""
    own, kind.forward = kind.forward, forward
    try:
        yield
    finally:
        kind.forward = own


def turned_around(kind: Any) -> Callable[..., Any]:
    """A forward of the user, in the place of the class's own, that changes its result."""
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return -own(self, *args, **kwargs)

    return forward


def class_with_another_forward(kind: Any, forward: Callable[..., Any]) -> Program:
    """Steps before a class runs another forward, the last of them replayed; then; and after."""

    def program(model: Model) -> object:
        found = [train(model) for _ in range(3)]
        with forward_replaced(kind, forward):
            found.append(train(model))
        return [*found, train(model)]

    return program


def layer_outside_of_the_model(model: Model) -> object:
    with caught_inputs(model, 1) as seen:
        model(**batches()[1])
    hidden = seen.pop("hidden").detach().requires_grad_()
    seen["past_key_values"] = None
    torch.manual_seed(0)
    layers_of(model)[1](hidden, **seen).float().square().mean().backward()
    return hidden.grad


def in_a_thread(target: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(target).result()


def from_another_thread(model: Model) -> object:
    loss = loss_of(model)
    in_a_thread(loss.backward)
    return loss


def forward_in_another_thread(model: Model) -> object:
    loss = in_a_thread(lambda: loss_of(model))
    loss.backward()
    return loss


def create_graph(model: Model) -> None:
    loss = loss_of(model)
    torch.autograd.grad(loss, list(trained(model).values()), create_graph=True)


def functional_gradient(model: Model) -> object:
    values = {name: each.detach() for name, each in trained(model).items()}
    call = partial(torch.func.functional_call, model, kwargs=batches()[0])
    return torch.func.grad(lambda given: call(given).loss)(values)


# Losses on what passes between the layers.


def attentions(model: Model) -> object:
    """Those of an evaluation, and a loss on nothing but them."""
    with torch.no_grad():
        evaluated = model.eval()(**batches()[1], output_attentions=True).attentions
    out = model.train()(**batches()[1], output_attentions=True)
    out.attentions[1].float().square().sum().backward()
    assert len(evaluated) == len(out.attentions) > 1
    return [*evaluated, *out.attentions]


def read_an_encoder(model: Model) -> object:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, 32, generator=generator).requires_grad_()
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids, encoder_hidden_states=states).loss.backward()
    assert states.grad is not None and states.grad.any()
    return states.grad


def train_below_the_layers(model: Model) -> object:
    trajectory = loops.run(model, num_steps=3)
    below = {n: g for n, g in trajectory.steps[0].gradients.items() if "layers." not in n}
    assert len(below) == 2 and all(bool(each.any()) for each in below.values())
    return trajectory


# Evaluations and generations.

NUM_NEW_TOKENS = 4


def generated(model: Model, **options: Any) -> object:
    """Greedy tokens and the logits of every step."""
    batch = batches()[0]
    out = model.eval().generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        # Some versions of transformers cannot weight it by the mask of a prompt.
        **({"output_router_logits": False} if hasattr(model.config, "num_local_experts") else {}),
        **{"do_sample": False, **options},
    )
    assert out.sequences.shape[1] == 12 + NUM_NEW_TOKENS and len(out.logits) == NUM_NEW_TOKENS
    return out.sequences, list(out.logits)


def evaluated_under_autocast(model: Model, mode: Context) -> object:
    """Losses and logits of all batches, with training between."""

    def outputs() -> object:
        outs = [model.eval()(**batch) for batch in batches()]
        return [
            {n: each for n, each in out.items() if isinstance(each, torch.Tensor)} for out in outs
        ]

    without, found = loops.facts_of(outputs()), []
    for _ in range(2):
        with mode(), bf16():
            found.append(outputs())
        assert changes(without, loops.facts_of(found[-1])), "autocast changes bits"
        found.append(train_under_autocast(model))
    return found


# Models without the head of a language model.


def _steps(model: Model, loss_of_step: Callable[[int], torch.Tensor]) -> object:
    """Two steps of an optimizer: losses, gradients and weights of each."""
    found: list[object] = []
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    for step in range(2):
        loss = loss_of_step(step)
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in trained(model).items()}
        assert all(bool(each.any()) for each in gradients.values())
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: each.detach().clone() for name, each in trained(model).items()}
        found += [loss.detach().clone(), gradients, weights]
    return found


def _rows(number: int) -> dict[str, torch.Tensor]:
    return {key: each for key, each in batches()[number % 2].items() if key != "labels"}


def classify(model: Model) -> object:
    """The model's own loss, of labels: a regression, with one class."""
    model.train()
    # Of the dtype of the logits: the loss of older releases of PyTorch takes no others.
    labels = torch.tensor([0.5, -1.0], dtype=next(model.parameters()).dtype)
    return _steps(model, lambda number: model(**_rows(number), labels=labels).loss)


def contrast(model: Model) -> object:
    """Mean pooling, and a loss between the rows of two forwards."""
    model.train()

    def embedded(number: int) -> torch.Tensor:
        rows = _rows(number)
        states, mask = model(**rows).last_hidden_state, rows["attention_mask"][..., None]
        pooled = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled.float(), dim=-1)

    def loss(number: int) -> torch.Tensor:
        similarities = embedded(number) @ embedded(number + 1).T / 0.1
        return torch.nn.functional.cross_entropy(similarities, torch.arange(len(similarities)))

    return _steps(model, loss)


# Autocast regions: one cast of an adapter decides when its gradient arrives, and where it meets
# those of penalties and of further forwards.


def penalty(model: Model) -> torch.Tensor:
    """In reverse, so that the casts of a region are not made in the order of the layers."""
    matrices = [each for name, each in model.named_parameters() if "lora_A" in name]
    terms = [(each @ each.T).square().sum() for each in reversed(matrices)]
    return 0.1 * torch.stack(terms).sum()


def in_region(
    before: Callable[[Model], object] = loops.nothing,
    behind: Callable[[Model], object] = loops.nothing,
    penalized: str = "",
    is_cached: bool = True,
) -> Program:
    """A forward in a region, and its backward behind it; ``penalized``: inside or outside."""

    def program(model: Model) -> None:
        with bf16(cache_enabled=is_cached):
            before(model)
            loss = loss_of(model)
            loss = loss + penalty(model) if penalized == "inside" else loss
        (loss + penalty(model) if penalized == "outside" else loss).backward()
        behind(model)

    return program


REGION = in_region()
PENALTY_INSIDE = in_region(penalized="inside", is_cached=False)
PENALTY_OUTSIDE = in_region(penalized="outside")


def penalty_by_accelerate(model: Model) -> None:
    """The forward of the model is a region, as Accelerate makes it; the penalty is behind it."""
    with other_forward(model, bf16()):
        (loss_of(model) + penalty(model)).backward()


def retained(model: Model) -> None:
    """The first forward has had its backward, and takes part in another."""
    with bf16():
        first = loss_of(model)
        first.backward(retain_graph=True)
        second = loss_of(model, 1)
    (first + second).backward()


IN_REGIONS: dict[str, tuple[Program, bool]] = {
    "without a cache, then with one": (in_region(behind=REGION, is_cached=False), True),
    "a penalty without a cache": (PENALTY_INSIDE, True),
    # Where casts are there before the layers are, it is not seen when gradients arrive.
    "behind a penalty": (in_region(lambda model: penalty(model).backward()), False),
    "behind an evaluation": (in_region(torch.no_grad()(loss_of)), False),
    "retained": (retained, True),
}
"""And whether their visits may be replayed."""


def updates_in_one_region(
    model: Model, fused: bool, lr: float = 1e-2, numbers: tuple[int, ...] = (0, 1)
) -> None:
    """The whole training within one region, on batches of these numbers."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=lr, fused=fused)
    with bf16():
        for number in numbers:
            loss_of(model, number).backward()
            optimizer.step()


# Hooks inside a layer, and forwards of users.


@contextmanager
def hooked(model: Model, path: str, hook: Callable[..., Any]) -> Iterator[None]:
    """A forward hook on a module of layer 1."""
    with layers_of(model)[1].get_submodule(path).register_forward_hook(hook):
        yield


@contextmanager
def other_forward(module: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """A module has a forward that is made of its own."""
    module.forward = make(module.forward)
    try:
        yield
    finally:
        del module.forward


def with_hook(hook: Callable[..., Any], path: str = "mlp") -> Program:
    def program(model: Model) -> object:
        with hooked(model, path, hook):
            loss = loss_of(model)
            loss.backward()
        return loss

    return program


def inner_loss(model: Model) -> None:
    """Beside the model's, on what a projection gives."""
    kept: list[torch.Tensor] = []
    with hooked(model, "mlp.down_proj", lambda m, args, output: kept.append(output)):
        loss = loss_of(model)
        (loss + kept[0].float().square().mean()).backward()


def own_permutation(model: Model) -> object:
    """Of a generator of its own; changes no sum over all."""
    generator = torch.Generator().manual_seed(3)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output[:, torch.randperm(output.shape[1], generator=generator)]

    return with_hook(hook, "post_attention_layernorm")(model)


def with_numbered_hook(hook: Callable[[torch.Tensor, int], torch.Tensor]) -> Program:
    """It is given the number of its call."""

    def program(model: Model) -> object:
        numbers = count(1)
        return with_hook(lambda m, args, out: hook(out, next(numbers)), "input_layernorm")(model)

    return program


class _Kept(torch.autograd.Function):
    """Keeps what attention kernels do: log-sums in whole rows of 32, and the seeds of dropout."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: int, part: str) -> torch.Tensor:
        count = hidden.shape[-2]
        sums = torch.zeros(1, 2, -(-count // 32) * 32)
        if part == "padding":
            sums[..., count:] = call
        elif part == "rows":
            sums[..., : count + 1] = call
        seed = torch.tensor(call * (part == "seed"))
        state = torch.tensor([call * (part == "seed")] * 2).to(torch.uint64)
        ctx.save_for_backward(hidden, sums, seed, state)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _ = ctx.saved_tensors
        return gradient, None, None


def kept_by_kernels(part: str) -> Program:
    """Other values in ``part`` of what an operator saves, each time it runs beside a hook."""
    return with_numbered_hook(lambda output, call: _Kept.apply(output, call, part))


def older_hook(model: Model) -> object:
    def larger(module: Any, given: Any, found: Any) -> Any:
        return tuple(each if each is None else 1.5 * each for each in given)

    with layers_of(model)[1].mlp.act_fn.register_backward_hook(larger):
        return STEP(model)


def python_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + random.random() + float(np.random.rand()))


def another_forward(*, gradients: bool) -> Program:
    """By a hook inside a layer, as it is called."""

    def program(model: Model) -> None:
        is_inside = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            if not is_inside:
                is_inside.append(1)
                with torch.set_grad_enabled(gradients):
                    loss_of(model, 1)
                is_inside.clear()

        with_hook(hook)(model)

    return program


def in_backward(*, gradients: bool) -> Program:
    """A forward, or a step, by a hook on a tensor inside a layer as its gradient arrives."""

    def program(model: Model) -> object:
        found: list[object] = []
        outputs: list[torch.Tensor] = []

        def run(gradient: torch.Tensor) -> None:
            with torch.set_grad_enabled(gradients):
                loss = loss_of(model, 1)
            if gradients:
                loss.backward()
            found.append(loss)

        with hooked(model, "mlp", lambda m, args, output: outputs.append(output)):
            loss = loss_of(model)
            outputs[0].register_hook(run)
            loss.backward()
        return [found, loss]

    return program


def inspected(model: Model) -> object:
    """Somebody looks at what a node has saved, as drawings of graphs do, and goes on."""
    kept: list[torch.Tensor] = []
    with hooked(model, "self_attn.o_proj", lambda m, args, output: kept.append(output)):
        loss = loss_of(model)
        node: Any = kept[0].grad_fn
        names = [name for name in dir(node) if name.startswith("_saved") or name == "saved_tensors"]
        assert [getattr(node, name) for name in names]
        loss.backward()
    return loss


def whole_model_checkpointed(model: Model) -> object:
    loss = checkpoint(loss_of, model, use_reentrant=False)
    loss.backward()
    return loss


def with_forward(make: Callable[[Any], Callable[..., Any]]) -> Program:
    """A step in which a module inside a layer has another forward, made of its own."""

    def program(model: Model) -> object:
        with other_forward(layers_of(model)[1].mlp, make):
            return STEP(model)

    return program


EMPTY_TENSOR_SAVED = with_forward(lambda own: lambda x: own(x) + x[..., :0].exp().sum())
"""By an operator inside a layer whose forward is the user's, as when experts get no token."""


def checkpointed_inside(reentrant: bool) -> Program:
    return with_forward(lambda own: lambda x: checkpoint(own, x, use_reentrant=reentrant))


def saved_inside(*, alone: bool) -> Program:
    """By hooks of a module inside a layer, which keep what they are given: a slot's memory too."""

    def program(model: Model) -> object:
        kept: list[torch.Tensor] = []

        def keeping(own: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
                kept.append(own(x))
            return kept[-1]

        with other_forward(layers_of(model)[1].mlp, lambda own: partial(keeping, own)):
            loss = loss_of(model)
            (kept[0].float().square().mean() if alone else loss).backward()
        return loss

    return program


# Functions of others.


class KeepsAsItLikes(torch.autograd.Function):
    """A product that keeps its weight, and what it was given, in attributes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = weight
        ctx.scale = x.abs().mean(-1, keepdim=True)
        return (x @ weight.T) * 1e-2 + x * ctx.scale.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return (gradient @ ctx.kept) * 1e-2 + gradient * ctx.scale.sign(), None


def function_of_others(model: Model) -> object:
    other = layers_of(model)[1].self_attn.o_proj
    return with_hook(lambda m, args, output: KeepsAsItLikes.apply(output, other.weight))(model)


def bitsandbytes_beside(model: Model) -> None:
    """Its own product, which keeps the packed weight, in what only a hook knows."""
    kept: list[torch.Tensor] = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        weight = layers_of(model)[1].self_attn.o_proj.weight
        kept.append(bnb.matmul_4bit(output, weight.t(), quant_state=weight.quant_state))

    with hooked(model, "mlp", hook):
        loss_of(model)
        kept[0].float().square().mean().backward()
