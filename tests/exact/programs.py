"""What users do within a step, as small functions of a model: losses, backwards, regions, hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import snapshots
from tests.exact.arms import Model, Program
from tests.snapshots import batches, bf16, layers_of

Context = Callable[[], AbstractContextManager[Any]]


def loss_of(model: Model, number: int = 0) -> torch.Tensor:
    return model(**batches()[number]).loss  # type: ignore[no-any-return]


def trained(model: Model) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def train(model: Model, **spec: Any) -> object:
    """Two steps of the reference loop, all that they compute."""
    return snapshots.run(model, **spec)


train_once = partial(train, num_steps=1)
train_under_autocast = partial(train, autocast_dtype=torch.bfloat16)


def gradients_now(model: Model) -> dict[str, torch.Tensor]:
    """Copies of the gradients, to compare beside those at the end."""
    parameters = model.named_parameters()
    return {name: each.grad.clone() for name, each in parameters if each.grad is not None}


# One step, and what may surround its forward and its backward.


def copies_of_saved() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def only_math() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)  # type: ignore[no-any-return]


def one_step(
    forward: Context = nullcontext,
    backward: Context = nullcontext,
    between: Callable[[Model], object] = lambda model: None,
) -> Program:
    def program(model: Model) -> object:
        model.train()
        with forward():
            loss = loss_of(model, 1)
        between(model)
        with backward():
            loss.backward()
        return loss

    return program


STEP = one_step()
STEP_UNDER_AUTOCAST = one_step(forward=bf16)


def step_and_flags(model: Model) -> object:
    """Flags are after backward what they were before."""
    one_step(between=lambda each: each.eval())(model)
    return [each.training for each in model.modules()]


# Backwards.


def different_losses(model: Model) -> None:
    out = model(**batches()[0], output_hidden_states=True)
    out.logits[:, :5].float().square().mean().backward(retain_graph=True)
    out.hidden_states[2].float().square().mean().backward(retain_graph=True)
    (out.loss + out.logits[:, 5:].float().mean()).backward()


def two_forwards(order: tuple[int, int]) -> Program:
    def program(model: Model) -> None:
        losses = [loss_of(model, 0), loss_of(model, 1)]
        for index in order:
            losses[index].backward()

    return program


def some_parameters(model: Model) -> object:
    loss = loss_of(model)
    wanted = {n: p for n, p in trained(model).items() if "layers.1.mlp" in n}
    found = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True)
    loss.backward(inputs=[next(iter(wanted.values()))])
    assert sum(p.grad is not None for p in model.parameters()) == 1
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


def sums(model: Model) -> None:
    """Gradients of several forwards and of a penalty."""
    squares = [each.float().square().sum() for each in trained(model).values()]
    loss = loss_of(model) + 0.01 * torch.stack(squares).sum()
    (loss + 3 * loss_of(model, 1)).backward()


def layer_outside_of_the_model(model: Model) -> object:
    seen: dict[str, Any] = {}
    handle = layers_of(model)[1].register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs, hidden=args[0]), with_kwargs=True
    )
    model(**batches()[1])
    handle.remove()
    hidden = seen.pop("hidden").detach().requires_grad_()
    seen["past_key_values"] = None
    torch.manual_seed(0)
    layers_of(model)[1](hidden, **seen).float().square().mean().backward()
    return hidden.grad


# Losses on what passes between the layers.


def loss_on_the_last_state(model: Model) -> object:
    out = model(**batches()[1], output_hidden_states=True)
    out.hidden_states[-1].float().square().mean().backward()
    return [(each, each.requires_grad) for each in out.hidden_states]


def loss_on_outputs(model: Model) -> None:
    """On what each layer gives, which a hook on it takes."""
    kept: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda m, args, output: kept.append(output))
        for layer in layers_of(model)
    ]
    total = torch.stack([loss_of(model, 1), *(each.float().square().mean() for each in kept)]).sum()
    for handle in handles:
        handle.remove()
    total.backward()


def hidden_states_alone(model: Model) -> object:
    """Asked for, and no loss on them."""
    out = model(**batches()[1], output_hidden_states=True)
    out.loss.backward()
    return [(each, each.requires_grad) for each in out.hidden_states]


def read_an_encoder(model: Model) -> object:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 5, 32, generator=generator).requires_grad_()
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids, encoder_hidden_states=states).loss.backward()
    assert states.grad is not None and states.grad.any()
    return states.grad


def routers_alone(model: Model) -> object:
    """A loss on nothing but the routers: without their channel there would be no gradient."""
    out = model(**batches()[1])
    assert len(out.router_logits) == 3
    (out.aux_loss + out.router_logits[1].square().mean()).backward()
    found = gradients_now(model)
    assert any(".layers.0." in name for name in found)
    return out.aux_loss, out.router_logits[1]


def train_below_the_layers(model: Model) -> object:
    trajectory = snapshots.run(model, num_steps=3)
    below = {n: g for n, g in trajectory.steps[0].gradients.items() if "layers." not in n}
    assert len(below) == 2 and all(bool(each.any()) for each in below.values())
    return trajectory


# Models without the head of a language model.


def _steps(model: Model, loss_of_step: Callable[[int], torch.Tensor]) -> object:
    """Two steps of an optimizer: losses, gradients and weights of each."""
    found: list[object] = []
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    for step in range(2):
        loss = loss_of_step(step)
        loss.backward()
        found.append(loss.detach().clone())
        gradients = gradients_now(model)
        assert gradients.keys() == trained(model).keys()
        assert all(bool(each.any()) for each in gradients.values())
        found.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: each.detach().clone() for name, each in trained(model).items()})
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
