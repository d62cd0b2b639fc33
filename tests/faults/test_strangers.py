"""Tensors taken out of a layer, and trainable ones brought into it: they train as resident."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import poros
from tests.snapshots import batches, build, changes, digest, layers_of, outcome
from tests.support import prepare_plain

Model = Any


def on(targets: list[str], layers: list[int] | None = None, **changed: Any) -> Model:
    torch.manual_seed(2)
    base = build(**changed).unload()
    options = {} if layers is None else {"layers_to_transform": layers}
    return get_peft_model(
        base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    )


# From inside a layer: what is taken, and where the adapters are.
INSIDE = {
    "past no adapter": (["up_proj", "down_proj"], "self_attn.o_proj"),
    "past an adapter": (["o_proj"], "self_attn.o_proj"),
    "past the weights of the base": (["up_proj"], "mlp.down_proj"),
}


@pytest.mark.parametrize(("index", "quantize"), [(0, False), (2, True)])
@pytest.mark.parametrize("what", INSIDE)
def test_a_loss_on_what_a_hook_took_from_inside_a_layer(
    what: str, index: int, quantize: bool
) -> None:
    targets, module = INSIDE[what]
    found = []
    for prepare in (lambda model: model, lambda model: prepare_plain(model, slots=2)):
        model = prepare(on(targets, quantize=quantize, num_layers=5)).train()
        torch.manual_seed(0)
        taken: list[torch.Tensor] = []
        layers_of(model)[index].get_submodule(module).register_forward_hook(
            lambda *given, taken=taken: taken.append(given[-1])
        )
        (model(**batches()[1]).loss + taken[0].float().square().mean()).backward()
        found.append(outcome(model))
    assert changes(*found) == {}


def test_looking_at_what_is_inside_stays_exact_and_keeps_nothing() -> None:
    found = []
    for model in (build(), prepare_plain(build())):
        norms: list[torch.Tensor] = []
        layers_of(model)[1].mlp.register_forward_hook(
            lambda module, given, result, norms=norms: norms.append(result.detach().norm())
        )
        torch.manual_seed(0)
        model(**batches()[1]).loss.backward()
        found.append({"norm": digest(norms[0]), **outcome(model)})
    assert changes(*found) == {}


class Probe(nn.Module):
    """A small network on what is inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.detach().float()).square().mean()  # type: ignore[no-any-return]


def low() -> Model:
    """Its lowest adapter is in layer 2."""
    return on(["up_proj"], [2])


@pytest.mark.parametrize(("make", "index"), [(build, 0), (build, 2), (low, 0)])
def test_a_probe_on_detached_activations_trains_exactly(
    make: Callable[[], Model], index: int
) -> None:
    """What a hook computes from detached tensors is no part of the layer."""
    found = []
    for model in (make(), prepare_plain(make())):
        probe = Probe()
        losses: list[torch.Tensor] = []
        layers_of(model)[index].mlp.register_forward_hook(
            lambda module, given, result, probe=probe, losses=losses: losses.append(probe(result))
        )
        torch.manual_seed(0)
        (model(**batches()[1]).loss + losses[0]).backward()
        gradients = {f"probe {n}": digest(p.grad) for n, p in probe.named_parameters()}
        found.append({**gradients, **outcome(model)})
    assert changes(*found) == {}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_probe_whose_tensors_are_edited_is_refused(is_streamed: bool) -> None:
    """As autograd refuses it in a resident model."""
    model = prepare_plain(build()) if is_streamed else build()
    probe, losses, seen = Probe(), [], []

    def look(module: nn.Module, given: Any, result: torch.Tensor) -> None:
        seen.append(result.detach().float())
        losses.append(probe(seen[-1]))

    layers_of(model)[1].mlp.register_forward_hook(look)
    model(**batches()[1])
    seen[0].mul_(2)
    error = poros.RematerializationError if is_streamed else RuntimeError
    with pytest.raises(error, match=r"in.?place"):
        losses[0].backward()


def test_hooks_inside_leave_no_cycle() -> None:
    """A packed tensor that a node gave itself must not keep that node."""
    model = prepare_plain(build())
    layers_of(model)[1].mlp.register_forward_hook(lambda *_: None)
    model.train()
    model(**batches()[0]).loss.backward()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(value, torch.Tensor) for value in gc.get_objects())
        for _ in range(3):
            model(**batches()[0]).loss.backward()
        after = sum(isinstance(value, torch.Tensor) for value in gc.get_objects())
        assert after <= before + 2
    finally:
        gc.enable()


# Into a layer: a trainable tensor that a hook brings, switched on at some step.


def switched(model: Model, index: int, kind: str) -> dict[str, Any]:
    """Something trainable inside a layer that acts while ``on``."""
    state: dict[str, Any] = {"on": False, "scale": torch.ones(64, requires_grad=True)}
    module = layers_of(model)[index].self_attn

    def change(output: Any) -> Any:
        return (
            (output[0] * state["scale"].to(output[0].dtype), *output[1:]) if state["on"] else output
        )

    if kind == "hook":
        module.register_forward_hook(lambda module, given, output: change(output))
    elif kind == "global hook":
        state["handle"] = nn.modules.module.register_module_forward_hook(
            lambda each, given, output: change(output) if each is module else None
        )
    else:
        own = module.forward
        module.forward = lambda *args, **kwargs: change(own(*args, **kwargs))
    return state


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["hook", "global hook", "forward"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_trainable_tensor_from_elsewhere_is_trained(index: int, kind: str, first: int) -> None:
    """Layer 0 is below the lowest adapter, layer 2 is not; the first step is checked."""
    found = []
    for prepare in (lambda model: model, prepare_plain):
        model = prepare(on(["up_proj"], [1, 2])).train()
        state = switched(model, index, kind)
        torch.manual_seed(0)
        try:
            for number in range(2):
                state["on"] = number == first
                model(**batches()[0]).loss.backward()
        finally:
            if "handle" in state:
                state["handle"].remove()
        found.append({"scale": digest(state["scale"].grad), **outcome(model)})
    assert changes(*found) == {}
    assert poros.runtime(model).self_check["status"] == "passed"
