"""Hooks on modules, by what they do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from tests import snapshots
from tests.exact.arms import Model, Program
from tests.snapshots import layers_of

INSIDE = ("mlp", "self_attn", "self_attn.q_proj", "input_layernorm", "mlp.down_proj.lora_A.default")


def scaled(values: Any) -> Any:
    values = values if isinstance(values, tuple) else (values,)
    return tuple(each if each is None else 1.5 * each for each in values)


def noisy(values: Any) -> Any:
    return tuple(each if each is None else each + torch.randn_like(each) for each in values)


def note_call(module: Any, args: Any, output: Any) -> None:
    module.num_calls = getattr(module, "num_calls", 0) + 1


def note_norm(module: Any, grad_input: Any, grad_output: Any) -> None:
    module.norm = float(grad_output[0].norm())


def on(path: str, register: str, hook: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    return lambda layer: getattr(layer.get_submodule(path), register)(hook)


def of_mlps(register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[Model], Any]:
    """A hook on all modules there are, which minds one kind."""

    def global_hook(module: nn.Module, *values: Any) -> Any:
        return hook(module, *values) if type(module).__name__ == "Qwen2MLP" else None

    return lambda _: register(global_hook)


BACKWARD, BACKWARD_PRE = "register_full_backward_hook", "register_full_backward_pre_hook"
FORWARD, FORWARD_PRE = "register_forward_hook", "register_forward_pre_hook"

# On each layer.
OF_LAYERS: dict[str, list[Callable[[nn.Module], Any]]] = {
    "backward": [on(path, BACKWARD, lambda m, gin, gout: scaled(gin)) for path in INSIDE],
    "backward pre": [on(path, BACKWARD_PRE, lambda m, gout: scaled(gout)) for path in INSIDE],
    "noise in backward": [on("mlp", BACKWARD, lambda m, gin, gout: noisy(gin))],
    "backward of layers": [on("", BACKWARD_PRE, lambda m, gout: scaled(gout))],
    "older backward": [
        on("mlp.act_fn", "register_backward_hook", lambda m, gin, gout: scaled(gin))
    ],
    "forward": [
        on("mlp", FORWARD, lambda m, args, output: 1.5 * output),
        on("mlp", FORWARD_PRE, lambda m, args: scaled(args)),
    ],
    "notes": [on("mlp", FORWARD, note_call), on("mlp", BACKWARD, note_norm)],
}
# On all modules of the process.
GLOBAL: dict[str, Callable[[Model], Any]] = {
    "global forward": of_mlps(
        all_modules.register_module_forward_hook, lambda m, args, output: 1.5 * output
    ),
    "global forward pre": of_mlps(
        all_modules.register_module_forward_pre_hook, lambda m, args: scaled(args)
    ),
    "global backward": of_mlps(
        all_modules.register_module_full_backward_hook, lambda m, gin, gout: scaled(gin)
    ),
    "global backward pre": of_mlps(
        all_modules.register_module_full_backward_pre_hook, lambda m, gout: scaled(gout)
    ),
}
HOOKS = (*OF_LAYERS, *GLOBAL)
PASSIVE = ("notes",)
OUTSIDE = ("backward of layers",)


@contextmanager
def hooked(model: Model, which: str) -> Iterator[None]:
    """With the hooks in the body."""
    if which in GLOBAL:
        handles = [GLOBAL[which](model)]
    else:
        handles = [register(each) for each in layers_of(model) for register in OF_LAYERS[which]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def all_the_time(which: str) -> Program:
    def program(model: Model) -> object:
        with hooked(model, which):
            return snapshots.run(model, num_steps=1)

    return program


def notes_and_older_forwards(model: Model) -> None:
    """Notes that hooks take do not stop the backward of forwards before them."""
    with hooked(model, "notes"):
        losses = [model(**batch).loss for batch in snapshots.batches()]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        losses[0].backward()
