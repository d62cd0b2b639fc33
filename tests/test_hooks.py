"""Hooks on modules: exact if they are there all the time, refused if they come or go in between."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from snapshots import assert_same_run, batches, build, layers_of, run
from torch import nn
from torch.nn.modules import module as all_modules

import poros
from poros.errors import RematerializationError

Model = Any
Register = Callable[[Model, list[Any]], None]
INSIDE = ("mlp", "self_attn", "self_attn.q_proj", "input_layernorm", "mlp.down_proj.lora_A.default")


def scaled(values: Any) -> Any:
    values = values if isinstance(values, tuple) else (values,)
    return tuple(each if each is None else 1.5 * each for each in values)


def noisy(values: Any) -> Any:
    return tuple(each if each is None else each + torch.randn_like(each) for each in values)


def backward_hooks(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        for name in INSIDE:
            module = layer.get_submodule(name)
            handles.append(module.register_full_backward_hook(lambda m, gi, go: scaled(gi)))


def backward_pre_hooks(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        for name in INSIDE:
            module = layer.get_submodule(name)
            handles.append(module.register_full_backward_pre_hook(lambda m, go: scaled(go)))


def noise_in_backward_hooks(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        handles.append(layer.mlp.register_full_backward_hook(lambda m, gi, go: noisy(gi)))


def backward_hooks_of_layers(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        handles.append(layer.register_full_backward_pre_hook(lambda m, go: scaled(go)))


def older_backward_hooks(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        handles.append(layer.mlp.act_fn.register_backward_hook(lambda m, gi, go: scaled(gi)))


def forward_hooks(model: Model, handles: list[Any]) -> None:
    for layer in layers_of(model):
        handles.append(layer.mlp.register_forward_hook(lambda m, args, output: 1.5 * output))
        handles.append(layer.mlp.register_forward_pre_hook(lambda m, args: scaled(args)))


def notes_in_hooks(model: Model, handles: list[Any]) -> None:
    """Hooks that write down what they see, in the modules."""

    def forward(module: Any, args: Any, output: Any) -> None:
        module.num_calls = getattr(module, "num_calls", 0) + 1

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        module.norm = float(grad_output[0].norm())

    for layer in layers_of(model):
        handles.append(layer.mlp.register_forward_hook(forward))
        handles.append(layer.mlp.register_full_backward_hook(backward))


def of_mlps(hook: Callable[..., Any]) -> Callable[..., Any]:
    def global_hook(module: nn.Module, *values: Any) -> Any:
        return hook(module, *values) if type(module).__name__ == "Qwen2MLP" else None

    return global_hook


def global_forward(model: Model, handles: list[Any]) -> None:
    hook = of_mlps(lambda m, args, output: 1.5 * output)
    handles.append(all_modules.register_module_forward_hook(hook))


def global_forward_pre(model: Model, handles: list[Any]) -> None:
    hook = of_mlps(lambda m, args: scaled(args))
    handles.append(all_modules.register_module_forward_pre_hook(hook))


def global_backward(model: Model, handles: list[Any]) -> None:
    hook = of_mlps(lambda m, gi, go: scaled(gi))
    handles.append(all_modules.register_module_full_backward_hook(hook))


def global_backward_pre(model: Model, handles: list[Any]) -> None:
    hook = of_mlps(lambda m, go: scaled(go))
    handles.append(all_modules.register_module_full_backward_pre_hook(hook))


HOOKS: list[Register] = [
    backward_hooks,
    backward_pre_hooks,
    noise_in_backward_hooks,
    backward_hooks_of_layers,
    older_backward_hooks,
    forward_hooks,
    notes_in_hooks,
    global_forward,
    global_forward_pre,
    global_backward,
    global_backward_pre,
]
PASSIVE = (notes_in_hooks,)
OUTSIDE = (backward_hooks_of_layers,)


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for handle in found:
        handle.remove()


def with_hooks(register: Register, model: Model, handles: list[Any]) -> Model:
    for handle in handles:
        handle.remove()
    register(model, handles)
    return model


@pytest.mark.parametrize("self_check", ["strict", "off"])
@pytest.mark.parametrize("register", HOOKS, ids=lambda each: each.__name__)
def test_hooks_that_are_there_all_the_time_are_exact(
    register: Register, self_check: str, handles: list[Any]
) -> None:
    plain = run(build())
    expected = run(with_hooks(register, build(), handles), accumulation=2)
    assert (register in PASSIVE) or plain.steps[0].gradients.keys()
    found = run(
        with_hooks(register, poros.prepare(build(), self_check=self_check), handles),
        accumulation=2,
    )
    assert_same_run(expected, found)


@pytest.mark.parametrize("what", ["added", "removed"])
@pytest.mark.parametrize(
    "register", [each for each in HOOKS if each not in OUTSIDE], ids=lambda each: each.__name__
)
def test_hooks_that_come_or_go_between_are_refused(
    register: Register, what: str, handles: list[Any]
) -> None:
    model = poros.prepare(build())
    if what == "removed":
        register(model, handles)
    loss = model(**batches()[0]).loss
    if what == "added":
        register(model, handles)
    for handle in handles if what == "removed" else ():
        handle.remove()
    with pytest.raises(RematerializationError, match=r"layers\.2: .*hooks"):
        loss.backward()


def test_notes_that_hooks_take_do_not_stop_older_forwards(handles: list[Any]) -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        with_hooks(notes_in_hooks, model.train(), handles)
        torch.manual_seed(0)
        losses = [model(**batches()[index]).loss for index in range(2)]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        losses[0].backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    expected, prepared = found
    assert expected and all(torch.equal(expected[name], prepared[name]) for name in expected)
