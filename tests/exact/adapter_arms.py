"""A model with LoRA that is not zero, and one step of it: what tests of adapter kernels compare."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import poros
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any
autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Found:
    facts: dict[str, torch.Tensor]
    order: list[str]


def differences(left: Found, right: Found) -> list[str]:
    """The names of facts that have not the same bits in both."""
    names = [
        name
        for name in {**left.facts, **right.facts}
        if name not in left.facts
        or name not in right.facts
        or not same_bits(left.facts[name], right.facts[name])
    ]
    return names + (["order"] if left.order != right.order else [])


def adapted(bases: Bases, architecture: str = "qwen2", **options: Any) -> Model:
    """With LoRA that is not zero."""
    key = f"adapted {architecture} {options}"
    of_base = {name: options.pop(name) for name in ("dtype", "quantize") if name in options}
    adapters = options.pop("adapters", torch.float32)
    settings: dict[str, Any] = {"r": 8, "target_modules": SEVEN, "task_type": "CAUSAL_LM"}

    def make() -> Model:
        base = bases.base(architecture, num_layers=2, dropout=0.0, **of_base)
        model: Model = get_peft_model(base, LoraConfig(**{**settings, **options}))
        fill(model, adapters)
        return model.train()

    return bases.once(key, make)


def fill(model: Model, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = 0.1 * torch.randn(parameter.shape, generator=generator)
            # Magnitudes of DoRA are not the norms.
            parameter.data = (values + 3 if "magnitude" in name else values).to(dtype)


def with_kernels(model: Model, around: Callable[[], Any] = nullcontext, **choice: Any) -> Found:
    """A step of the resident model with our kernels."""
    poros.use_adapter_kernels(model, **choice)
    found = step(model, around)
    poros.restore(model)
    return found


def at(act: Callable[[Any], object], *endings: str) -> Callable[[Model], None]:
    """``act`` on each module whose name ends so."""

    def change(model: Model) -> None:
        for name, module in list(model.named_modules()):
            if name.endswith(endings):
                act(module)

    return change


def behind(hook: Callable[..., Any], *endings: str) -> Callable[[Model], None]:
    """A forward hook on each module whose name ends so."""
    return at(lambda module: module.register_forward_hook(hook), *endings)


def before(hook: Callable[..., Any], *endings: str) -> Callable[[Model], None]:
    return at(lambda module: module.register_forward_pre_hook(hook), *endings)


def nothing(model: Model) -> None:
    pass


def halve(module: Any, given: Any) -> Any:
    """A hook on what a module is given."""
    return (given[0] * 0.5,)


def halve_in_place(module: Any, given: Any) -> None:
    """In a way that no version counts."""
    given[0].data.mul_(0.5)


def several(model: Model) -> None:
    """A second adapter, which acts beside the first."""
    model.add_adapter("other", LoraConfig(r=4, target_modules=SEVEN))
    fill(model)
    model.base_model.set_adapter(["default", "other"])


def mlps(model: Model) -> list[Any]:
    return [layer.mlp for layer in model.base_model.model.model.layers]


def step(model: Model, around: Callable[[], Any] = nullcontext) -> Found:
    order: list[str] = []
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    handles = [
        each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, each in trained.items()
    ]
    torch.manual_seed(5)
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(2))
    with around():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    facts = {name: each.grad for name, each in trained.items() if each.grad is not None}
    for each in trained.values():
        each.grad = None
    for handle in handles:
        handle.remove()
    return Found({"loss": loss.detach(), "random": torch.get_rng_state(), **facts}, order)
