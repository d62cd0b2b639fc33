"""Adapter kernels with bits of their own, in each way that layers run: those of a resident model.

It takes the same kernels, by ``poros.use_adapter_kernels``. Which model and which adapters: in
``test_adapter_kernels``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

import poros
from tests.exact.adapter_arms import adapted, autocast
from tests.exact.arms import Bases
from tests.exact.recorded import recorded
from tests.exact.together import num_groups, own_loss, same, train, trained
from tests.support import AdversarialPrepare

Model = Any
FP32, DROPOUT = {"dtype": torch.float32}, {"lora_dropout": 0.1}
# What is asked for, and of which model.
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "grouped": ({"kernels": "grouped"}, {"adapters": torch.bfloat16}),
    **{paths: ({"lora_paths": paths}, FP32) for paths in ("flops", "f1:b1", "f1:b3", "f2:b5")},
    "f2:b4": ({"lora_paths": "f2:b4"}, {**FP32, "quantize": False}),
    "DoRA": ({}, {"use_dora": True, **DROPOUT}),
}
POLICIES: dict[str, dict[str, Any]] = {
    "two slots": {},
    "one kept": {"keep_last": 1},
    "all kept": {"keep_last": 2},
    "blocks of two layers": {"block_size": 2},
    "inputs on the host": {"offload_boundaries": True},
    "dense weights shared": {"share_dense": True},
    "a budget": {"slots": None, "vram_budget": "100MB"},
}
WAYS = [
    ("hostile", True, "inputs on the host", "plain"),
    ("eager", False, "all kept", "plain"),
    ("eager", True, "two slots", "autocast"),
    ("eager", False, "a budget", "plain"),
    ("hostile", False, "blocks of two layers", "plain"),
    ("hostile", True, "one kept", "autocast"),
    ("recorded", False, "all kept", "autocast"),
    ("recorded", True, "all kept", "autocast"),
    ("recorded", False, "blocks of two layers", "plain"),
    ("recorded", True, "two slots", "plain"),
    ("eager", False, "two slots", "autocast"),
    ("recorded", True, "inputs on the host", "plain"),
    ("recorded", True, "dense weights shared", "plain"),
    ("hostile", True, "dense weights shared", "plain"),
]
"""Whether streams are hostile or visits recorded, and whether micro-batches go together."""
AROUND = {"plain": nullcontext, "autocast": autocast}


def model_of(kernels: str, bases: Bases) -> Model:
    return adapted(bases, **KERNELS[kernels][1])


def resident(kernels: str, bases: Bases) -> Model:
    return poros.use_adapter_kernels(model_of(kernels, bases), **KERNELS[kernels][0])


def policy_of(kernels: str, **policy: Any) -> dict[str, Any]:
    choice = dict(KERNELS[kernels][0])
    return {"slots": 2, "adapter_kernels": choice.pop("kernels", "fused"), **choice, **policy}


def streamed(kernels: str, bases: Bases) -> Model:
    return poros.prepare(
        model_of(kernels, bases), loss="reference", device="cpu", **policy_of(kernels)
    )


def run(model: Model, around: str, together: bool) -> list[torch.Tensor]:
    def loss(model: Model, batch: Any) -> torch.Tensor:
        with AROUND[around]():
            return own_loss(model, batch)

    return train(model, together, sizes=(4,) * 4, loss=loss)


@cache
def expected(kernels: str, around: str, bases: Bases) -> list[torch.Tensor]:
    return run(resident(kernels, bases), around, False)


@pytest.mark.cover("values")
@pytest.mark.parametrize(("way", "together", "policy", "around"), WAYS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_training(
    kernels: str, way: str, together: bool, policy: str, around: str, bases: Bases
) -> None:
    model, chosen = model_of(kernels, bases), policy_of(kernels, **POLICIES[policy])
    captures = None
    if way == "recorded":
        captures, _ = recorded(model, **chosen)
    else:
        prepare: Any = poros.prepare if way == "eager" else AdversarialPrepare()
        prepare(model, **{"loss": "reference", "device": "cpu", **chosen})
    assert same(run(model, around, together), expected(kernels, around, bases))
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] == ("off" if way == "hostile" else "passed")
    # Of 4-bit weights in full precision tapes give other bits under autocast.
    is_replayed = around == "plain" or KERNELS[kernels][1] is not FP32
    assert captures is None or (captures.num_replays > 0) == is_replayed
    assert num_groups(model) == 4 * together


@pytest.mark.parametrize("kernels", KERNELS)
def test_autocast_around_the_backward_alone(kernels: str, bases: Bases) -> None:
    """It casts what a product is given, and not what is added to in place."""
    found = []
    for model in (resident(kernels, bases), streamed(kernels, bases)):
        torch.manual_seed(0)
        tokens = torch.arange(48).view(2, 24)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        with autocast():
            loss.backward()
        found.append([each.grad for each in trained(model)])
    assert same(*found)


@pytest.mark.cover("values")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kernels", KERNELS)
def test_evaluation_and_generation(kernels: str, around: Callable[[], Any], bases: Bases) -> None:
    tokens = torch.arange(24).view(2, 12)
    found = []
    for model in (resident(kernels, bases).eval(), streamed(kernels, bases).eval()):
        with around():
            written = model.generate(input_ids=tokens[:, :4], max_new_tokens=4, do_sample=False)
            parts = (tokens, tokens[:1, :1])
            found.append([written, *(model(input_ids=each).logits for each in parts)])
    assert same(*found)


@pytest.mark.parametrize("kernels", KERNELS)
def test_control_their_bits_are_others(kernels: str, bases: Bases) -> None:
    """Or what compares with them would compare nothing."""
    found = run(model_of(kernels, bases), "plain", False)
    assert not same(found, expected(kernels, "plain", bases))
