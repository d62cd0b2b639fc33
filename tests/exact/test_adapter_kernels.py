"""Fused adapter kernels on a resident model: the bits of PEFT's modules.

Compared are loss, every gradient, the order in which parameters get theirs, and the random state.
Kernels with bits of their own, and streamed models: ``test_kernel_ways``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

import poros
from poros.kernels import lora
from poros.kernels.adapters import tally_of
from tests.loops import (
    SEVEN,
    Model,
    adapted,
    at,
    before,
    behind,
    bf16,
    differences,
    halve_in_place,
    several,
    step,
    with_kernels,
)

BF16, FP32 = torch.bfloat16, torch.float32
TARGETS = {
    "seven": (SEVEN, "all-linear"),
    "qkv": (SEVEN[:3], ["qkv_proj"]),
    "o": (SEVEN[3:4], ["o_proj"]),
    "mlp": (SEVEN[4:], ["gate_up_proj"]),
}
"""And those of phi3."""
OPTIONS: list[dict[str, Any]] = [
    *({"targets": each, "lora_dropout": 0.05} for each in TARGETS),
    {"targets": "mlp"},
    {"use_rslora": True},
    {"adapters": BF16},
    {"adapters": BF16, "lora_dropout": 0.05},
    {"init_lora_weights": "olora"},
    {"r": 1},
    {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"up_proj": 7}},
]


def changed_by_fused(model: Model, around: Callable[[], Any] = nullcontext) -> list[str]:
    return differences(step(model, around), with_kernels(model, around))


def of_fused(model: Model, around: Callable[[], Any]) -> tuple[int, dict[str, int]]:
    """Calls with an operator of ours, and the others by reason."""
    tally = tally_of(poros.use_adapter_kernels(model))
    step(model, around)
    poros.restore(model)
    assert tally is not None
    return tally.num_fused, dict(tally.unfused)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("around", [nullcontext, bf16], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3"])
def test_fused_kernels_change_no_bit(
    architecture: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    around: Any,
    quantize: bool,
) -> None:
    if "init_lora_weights" in options and quantize:
        options = {}  # it writes to the base
    targets = TARGETS[options.get("targets", "seven")][architecture == "phi3"]
    run = {"dtype": dtype, "quantize": quantize, **options, "target_modules": targets}
    run.pop("targets", None)
    model = adapted(architecture, **run)
    assert changed_by_fused(model, around) == []
    num_adapted = sum(hasattr(module, "lora_A") for module in model.modules())
    assert of_fused(model, around) == (num_adapted, {}) and num_adapted >= 2


def louder(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 1.5


def dora_with_hooks(model: Model) -> None:
    model.add_adapter("dora", LoraConfig(r=4, target_modules=SEVEN, use_dora=True))
    model.set_adapter("dora")
    behind(louder, "lora_magnitude_vector.dora")(model)


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def transpose(module: Any) -> None:
    module.weight.data = module.weight.data.t().contiguous().t()


def with_bias(module: Any) -> None:
    """As ``lora_bias=True`` has it."""
    module.bias = nn.Parameter(torch.linspace(-1, 1, module.out_features))


def scaled_by_a_tensor(model: Model) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = torch.tensor(1.5)


class Lost(torch.autograd.Function):
    """Hands nothing on in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def broadcast(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result.mean(1, keepdim=True)


A, DROPOUT = "lora_A.default", "lora_dropout.default"
# What makes PEFT's modules run as they are, in which context, and why; or ours run all the same.
PROGRAMS: dict[str, tuple[Callable[[Model], None], str, Any]] = {
    "several": (several, "several active adapters", nullcontext),
    "biases": (at(with_bias, "lora_B.default"), "a bias in the adapter", nullcontext),
    "DoRA with hooks": (dora_with_hooks, "DoraLinearVariant", nullcontext),
    "hooks": (behind(louder, "lora_B.default"), "hooks in the adapter", nullcontext),
    "another class": (
        at(lambda module: setattr(module, "__class__", Own), A),
        "modules of other classes in the adapter",
        nullcontext,
    ),
    "own forward": (
        at(lambda module: setattr(module, "forward", lambda input: input * 0.5), DROPOUT),
        "hooks in the adapter",
        nullcontext,
    ),
    "transposed": (at(transpose, A), "tensors that are not contiguous", nullcontext),
    "a tensor": (scaled_by_a_tensor, "a scaling that is no number", nullcontext),
    "dtypes": (at(nn.Module.bfloat16, A), "matrices of several dtypes", bf16),
    "an output that is lost": (
        behind(lambda module, given, result: Lost.apply(result), "1.mlp"),
        "",
        nullcontext,
    ),
    "a product that is lost": (
        before(lambda module, given: Lost.apply(given[0]), "1.mlp.down_proj"),
        "",
        nullcontext,
    ),
    "an edited product": (before(halve_in_place, "down_proj"), "", nullcontext),
    "an edit below": (before(halve_in_place, "down_proj.base_layer"), "", nullcontext),
    "another shape": (behind(broadcast, "up_proj.base_layer"), "", nullcontext),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_programs_do_to_modules_has_the_bits_of_peft(case: str) -> None:
    """What the operator does not know runs as PEFT has it; hooks see and change the same."""
    change, reason, around = PROGRAMS[case]
    model = adapted()
    change(model)
    assert changed_by_fused(model, around) == []
    assert not reason or of_fused(model, around) == (0, {reason: 14})


def test_control_a_wrong_operator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora, "add_scaled", lambda result, added, how: result + added.to(result.dtype) * how.scaling
    )
    assert "loss" in changed_by_fused(adapted(lora_alpha=5))


def test_control_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes between that hand A its gradient before B."""
    genuine = lora._AddLora.apply
    monkeypatch.setattr(
        lora._AddLora,
        "apply",
        lambda result, input, b, a, *rest: genuine(result, input, b[...], a[...], *rest),
    )
    assert changed_by_fused(adapted()) == ["order"]
