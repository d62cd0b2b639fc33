"""Programs of users in which recomputing a layer is easily wrong, and what hooks do in them."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.exact import programs as P
from tests.exact.arms import Model, Program
from tests.snapshots import batches, layers_of


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


def attentions(*, alone: bool) -> Program:
    def program(model: Model) -> object:
        out = model(**batches()[1], output_attentions=True)
        inner = out.attentions[1].float().square().sum()
        (inner if alone else out.loss + inner).backward()
        return out.attentions

    return program


def attentions_without_gradients(model: Model) -> object:
    with torch.no_grad():
        found = model.eval()(**batches()[1], output_attentions=True).attentions
    assert len(found) == 3
    return [*found, P.STEP(model)]


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

    def program(model: Model) -> object:
        calls: list[int] = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            kept: torch.Tensor = _Kept.apply(output, len(calls), part)
            return kept

        return with_hook(hook, "input_layernorm")(model)

    return program


def older_hook(model: Model) -> object:
    handle = layers_of(model)[1].mlp.act_fn.register_backward_hook(
        lambda module, given, found: tuple(each if each is None else 1.5 * each for each in given)
    )
    try:
        return P.STEP(model)
    finally:
        handle.remove()


def python_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + random.random())


def numpy_random(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + float(np.random.rand()))


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


def whole_model_checkpointed(model: Model) -> object:
    loss = checkpoint(P.loss_of, model, use_reentrant=False)
    loss.backward()
    return loss


def with_forward(make: Callable[[Any], Callable[..., Any]]) -> Program:
    """A step in which a module inside a layer has another forward, made of its own."""

    def program(model: Model) -> object:
        mlp = layers_of(model)[1].mlp
        mlp.forward = make(mlp.forward)
        try:
            return P.STEP(model)
        finally:
            del mlp.forward

    return program


EMPTY_TENSOR_SAVED = with_forward(lambda own: lambda x: own(x) + x[..., :0].exp().sum())
"""By an operator inside a layer whose forward is the user's, as when experts get no token."""


def checkpointed_inside(reentrant: bool) -> Program:
    return with_forward(lambda own: lambda x: checkpoint(own, x, use_reentrant=reentrant))


def saved_inside(*, alone: bool) -> Program:
    """By hooks of a module inside a layer, which keep what they are given: a slot's memory too."""

    def program(model: Model) -> object:
        mlp = layers_of(model)[1].mlp
        own = mlp.forward
        kept: list[torch.Tensor] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
                kept.append(own(x))
            return kept[-1]

        mlp.forward = forward
        try:
            loss = P.loss_of(model)
            (kept[0].float().square().mean() if alone else loss).backward()
        finally:
            del mlp.forward
        return loss

    return program


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


def function_of_others(how: str, where: str = "within") -> Program:
    """Within a layer, or beside it, with a loss on its own result: as well, or alone."""

    def program(model: Model) -> object:
        kept: list[torch.Tensor] = []

        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            weight = layers_of(model)[1].self_attn.o_proj.weight
            kept.append(KeepsAsItLikes.apply(output, weight, how))
            return kept[-1] if where in ("within", "an inner loss") else None

        with hooked(model, "mlp", hook):
            loss = P.loss_of(model)
            if where != "within":
                kept[0].float().square().mean().backward(retain_graph=True)
            if where != "beside, alone":
                loss.backward()
        return loss

    return program


def bitsandbytes_beside(model: Model) -> None:
    """Its own product, which keeps the packed weight, in what only a hook knows."""
    kept: list[torch.Tensor] = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        weight = layers_of(model)[1].self_attn.o_proj.weight
        kept.append(bnb.matmul_4bit(output, weight.t(), quant_state=weight.quant_state))

    with hooked(model, "mlp", hook):
        P.loss_of(model)
        kept[0].float().square().mean().backward()


# Backwards.


def in_a_thread(target: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(target).result()


def from_another_thread(model: Model) -> object:
    loss = P.loss_of(model)
    in_a_thread(loss.backward)
    return loss


def forward_in_another_thread(model: Model) -> object:
    loss = in_a_thread(lambda: P.loss_of(model))
    loss.backward()
    return loss


def create_graph(model: Model) -> None:
    loss = P.loss_of(model)
    torch.autograd.grad(loss, list(P.trained(model).values()), create_graph=True)


def functional_gradient(model: Model) -> object:
    trained = dict(P.trained(model))

    def loss_of(values: Any) -> Any:
        return torch.func.functional_call(model, values, kwargs=batches()[0]).loss

    return torch.func.grad(loss_of)({name: each.detach() for name, each in trained.items()})


def retained_and_partial(model: Model) -> object:
    loss = P.loss_of(model)
    parameters = list(P.trained(model).values())
    found = [torch.autograd.grad(loss, parameters[n], retain_graph=True)[0] for n in (0, 9, -1)]
    loss.backward(retain_graph=True)
    loss.backward()
    return found


def interrupted(where: str) -> Program:
    """Ctrl-C in the middle, and a step behind it."""

    def program(model: Model) -> object:
        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        module = layers_of(model)[1].mlp
        if where == "forward":
            handle = module.register_forward_hook(fail)
        elif where == "backward":
            handle = module.register_full_backward_hook(fail)
        else:
            handle = P.trained(model)[where].register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            P.loss_of(model).backward()
        handle.remove()
        model.zero_grad()
        torch.manual_seed(7)
        return P.STEP(model)

    return program


A_MATRIX = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"


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
