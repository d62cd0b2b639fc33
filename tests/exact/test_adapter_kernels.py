"""Adapter kernels on a resident model beside PEFT's modules, and streamed beside resident.

"fused" has the bits of PEFT's modules: compared are loss, every gradient, the order in which
parameters get theirs, and the random state. Those of DoRA, of ``adapter_kernels="grouped"`` and of
``lora_paths`` have bits of their own, near PEFT's, and a resident model with the same kernels is
the reference of a streamed one. In which ways layers run: ``test_kernel_ways``.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from torch import nn

import poros
from poros.config import LORA_ORDERS
from poros.kernels import lora
from poros.kernels.adapters import tally_of
from tests.exact.adapter_arms import (
    SEVEN,
    Found,
    Model,
    adapted,
    at,
    autocast,
    before,
    behind,
    differences,
    nothing,
    several,
    step,
    with_kernels,
)
from tests.exact.arms import Bases
from tests.support import same_bits

BF16, FP32 = torch.bfloat16, torch.float32
without_a_cache = partial(autocast, cache_enabled=False)
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
@pytest.mark.parametrize("around", [nullcontext, autocast], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3"])
def test_fused_kernels_change_no_bit(
    architecture: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    around: Any,
    quantize: bool,
    bases: Bases,
) -> None:
    if "init_lora_weights" in options and quantize:
        options = {}  # it writes to the base
    targets = TARGETS[options.get("targets", "seven")][architecture == "phi3"]
    run = {"dtype": dtype, "quantize": quantize, **options, "target_modules": targets}
    run.pop("targets", None)
    model = adapted(bases, architecture, **run)
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


def halve_in_place(module: nn.Module, given: Any) -> None:
    """In a way that no version counts."""
    given[0].data.mul_(0.5)


def halve(module: nn.Module, given: Any) -> Any:
    return (given[0] * 0.5,)


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
    "dtypes": (at(nn.Module.bfloat16, A), "matrices of several dtypes", autocast),
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
def test_what_programs_do_to_modules_has_the_bits_of_peft(case: str, bases: Bases) -> None:
    """What the operator does not know runs as PEFT has it; hooks see and change the same."""
    change, reason, around = PROGRAMS[case]
    model = adapted(bases)
    change(model)
    assert changed_by_fused(model, around) == []
    assert not reason or of_fused(model, around) == (0, {reason: 14})


def test_control_a_wrong_operator_is_seen(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora, "add_scaled", lambda result, added, how: result + added.to(result.dtype) * how.scaling
    )
    assert "loss" in changed_by_fused(adapted(bases, lora_alpha=5))


def test_control_another_order_is_seen(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes between that hand A its gradient before B."""
    genuine = lora._AddLora.apply
    monkeypatch.setattr(
        lora._AddLora,
        "apply",
        lambda result, input, b, a, *rest: genuine(result, input, b[...], a[...], *rest),
    )
    assert changed_by_fused(adapted(bases)) == ["order"]


# ------------------------------------------------------------------ bits of their own


def streamed_and_resident(
    make: Callable[[], Model],
    kernels: dict[str, str],
    policy: dict[str, Any],
    around: Callable[[], Any] = nullcontext,
    step: Callable[..., Found] = step,
) -> tuple[Found, Found, dict[str, Any]]:
    """A resident step with PEFT's modules and one with ours, and what was counted of it.

    A streamed model has the bits of the latter, and counts the same.
    """
    model = make()
    plain = step(model, around)
    poros.use_adapter_kernels(model, **kernels)
    expected, stats = step(model, around), poros.kernel_stats(model)
    given = {**kernels, "adapter_kernels": kernels.get("kernels", "fused")}
    given.pop("kernels", None)
    model = poros.prepare(make(), loss="reference", device="cpu", slots=2, **given, **policy)
    for _ in range(2):  # the first watches the casts
        assert differences(step(model, around), expected) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    again = poros.kernel_stats(model)
    for count in ("num_grouped_adapters", "num_unfused_adapters"):
        assert bool(again[count]) == bool(stats[count])
    assert set(again["lora_paths"]["chosen"]) == set(stats["lora_paths"]["chosen"])
    return plain, expected, stats


def require_near(plain: Found, found: Found, share: float) -> None:
    """Dtypes and draws of PEFT, and gradients within ``share`` of theirs."""
    assert found.facts.keys() == plain.facts.keys()
    assert same_bits(found.facts["random"], plain.facts["random"])
    for key, fact in found.facts.items():
        assert fact.dtype == plain.facts[key].dtype
        error = (fact - plain.facts[key]).double().norm()
        assert error <= share * plain.facts[key].double().norm() + 1e-5, key


def frozen(part: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.requires_grad_(False)

    return change


def wide_norms(model: Model) -> None:
    """As ``prepare_model_for_kbit_training`` has them."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()


def with_dropout(model: Model) -> None:
    """One of those that share an input."""
    at(lambda module: module.lora_dropout.update({"default": nn.Dropout(0.5)}), "k_proj")(model)


def tied(model: Model) -> None:
    for layer in model.base_model.model.model.layers:
        attention = layer.self_attn
        attention.v_proj.lora_A["default"].weight = attention.q_proj.lora_A["default"].weight


def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def beside_lora(model: Model) -> None:
    """Each module as its adapter says; those of LoRA are checked against PEFT's own."""
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["k_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "plain"])


DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
MIXED: dict[str, Any] = {"quantize": False, "dtype": BF16}
NARROW: dict[str, Any] = {"adapters": BF16}
KEPT: dict[str, Any] = {"keep_last": 2}
OFFLOADED: dict[str, Any] = {"offload_boundaries": True}
BLOCKS: dict[str, Any] = {"block_size": 2}
POLICIES: tuple[dict[str, Any], ...] = ({}, KEPT, BLOCKS, OFFLOADED)


class Row(NamedTuple):
    options: dict[str, Any]
    """Of ``adapted``."""
    policy: dict[str, Any] = {}  # noqa: RUF012
    around: Callable[[], Any] = nullcontext
    change: Callable[[Model], None] = nothing
    architecture: str = "qwen2"
    num_ours: int | None = 14
    """Calls of a forward with the operator; None if nobody counts."""
    is_near: bool = True
    """Whether PEFT's gradients are near: it keeps copies of inputs in the dtype of the adapters."""


GROUPED = {
    "nf4": Row(NARROW),
    "nf4, adapters wider": Row({}, num_ours=0),
    "dense": Row(DENSE, BLOCKS),
    "dense, adapters narrower": Row({**DENSE, **NARROW}, KEPT, num_ours=0),
    "autocast, nf4, adapters in bfloat16": Row(NARROW, KEPT, autocast),
    "autocast, dense, bfloat16": Row(MIXED, BLOCKS, autocast),
    "autocast without a cache": Row({}, {}, without_a_cache),
    # A 4-bit weight that multiplies in float32 is not what autocast multiplies in.
    "autocast, nf4, float32": Row({"dtype": FP32}, around=autocast, num_ours=0),
    "autocast, float32 norms": Row({}, {}, autocast, wide_norms),
    "dropout": Row({"lora_dropout": 0.3}, OFFLOADED, autocast, num_ours=0),
    "dropout in one": Row(NARROW, {}, nullcontext, with_dropout, num_ours=12),
    "ranks": Row(
        {"rank_pattern": {"q_proj": 3, "up_proj": 1}, "alpha_pattern": {"k_proj": 5}, **NARROW}
    ),
    "bias": Row({"lora_bias": True, **NARROW}, KEPT, num_ours=0),
    "rslora": Row({"use_rslora": True, **NARROW}, OFFLOADED),
    "q and v": Row({"target_modules": ["q_proj", "v_proj"], **NARROW}, num_ours=4),
    "k and down": Row({"target_modules": ["k_proj", "down_proj"], **NARROW}, num_ours=4),
    "gate and up": Row({"target_modules": ["gate_proj", "up_proj"], **NARROW}, KEPT, num_ours=4),
    "A frozen": Row(NARROW, {}, nullcontext, frozen("lora_A")),
    "B frozen": Row(DENSE, {}, autocast, frozen("q_proj.lora_B")),
    "one frozen": Row(NARROW, KEPT, nullcontext, frozen("gate_proj.lora")),
    "tied": Row(DENSE, {}, nullcontext, tied),
    "tied, autocast": Row(DENSE, {}, autocast, tied),
    "a hook before k": Row(NARROW, {}, nullcontext, before(halve, "k_proj")),
    "an uncounted edit": Row(
        NARROW, {}, nullcontext, before(halve_in_place, "k_proj"), is_near=False
    ),
    "a hook behind k": Row(NARROW, {}, nullcontext, behind(double, "k_proj")),
    "a hook on up": Row(NARROW, {}, nullcontext, behind(double, "up_proj")),
    "a hook on down": Row({}, KEPT, autocast, behind(double, "down_proj")),
    "a hook on A": Row(NARROW, {}, nullcontext, behind(double, "k_proj." + A), num_ours=12),
    "phi3": Row({"target_modules": "all-linear", **NARROW}, architecture="phi3", num_ours=8),
    "gemma3": Row(NARROW, architecture="gemma3"),
    "qwen3": Row(NARROW, KEPT, architecture="qwen3"),
    "mixtral": Row(
        {"target_modules": SEVEN[:4], "dtype": FP32}, architecture="mixtral", num_ours=8
    ),
    "falcon": Row({"target_modules": "all-linear", **NARROW}, architecture="falcon", num_ours=None),
    "opt": Row(
        {**DENSE, "target_modules": ["q_proj", "k_proj", "v_proj", "fc1"]},
        around=autocast,
        architecture="opt",
        num_ours=8,
    ),
}
LIKE_GEMMA = {"target_modules": SEVEN, "lora_dropout": 0.1}
DORA = {
    **{
        f"{options}, {name}": Row(options | of_base, policy, around)
        for place, options in enumerate(
            ({"adapters": BF16}, {"use_rslora": True}, {"r": 1}, {"r": 96}, {"lora_dropout": 0.1})
        )
        for name, of_base, policy, around in (
            ("nf4", {"dtype": (BF16, FP32)[place % 2]}, POLICIES[place % 4], autocast),
            ("dense", (MIXED, DENSE)[place % 2], POLICIES[-1 - place % 4], nullcontext),
        )
    },
    "dense, float32, autocast": Row(DENSE, around=autocast),
    "nf4, float32": Row({"dtype": FP32}),
    "LoRA beside it": Row(
        {"target_modules": ["q_proj", "down_proj"]}, change=beside_lora, num_ours=8
    ),
    "phi3": Row({"target_modules": "all-linear"}, architecture="phi3", num_ours=8),
    "gemma3": Row(LIKE_GEMMA, architecture="gemma3"),
}
OWN = {
    **{f"grouped: {name}": ({"kernels": "grouped"}, row) for name, row in GROUPED.items()},
    **{f"dora: {name}": ({}, row) for name, row in DORA.items()},
}


@pytest.mark.parametrize("name", OWN)
def test_streamed_equals_resident(name: str, bases: Bases) -> None:
    kernels, row = OWN[name]

    def make() -> Model:
        model = adapted(bases, row.architecture, use_dora=not kernels, **row.options)
        row.change(model)
        return model

    plain, expected, stats = streamed_and_resident(make, kernels, row.policy, row.around)
    count = "num_grouped_adapters" if kernels else "num_fused_adapters"
    assert row.num_ours in (None, stats[count])
    if kernels and row.is_near:  # of DoRA in test_kernel_use, in full precision
        require_near(plain, expected, 0.1)


ORDERS = ["flops", *LORA_ORDERS[1:]]


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_products(
    order: str, dtype: torch.dtype, quantize: bool, dropout: float, is_autocast: bool, bases: Bases
) -> None:
    options: Any = {"dtype": dtype, "quantize": quantize, "lora_dropout": dropout}
    plain, expected, stats = streamed_and_resident(
        partial(adapted, bases, **options),
        {"lora_paths": order},
        POLICIES[ORDERS.index(order) % 4],
        partial(autocast, enabled=is_autocast),
    )
    found = stats["lora_paths"]
    # 4-bit modules give back the dtype of their input, which is not what autocast multiplies in.
    is_known = not (is_autocast and quantize and dtype is FP32)
    keeps_order = not dropout or order in ("flops", "f1:b1", "f1:b2", "f1:b3")
    assert sum(found["chosen"].values()) == 14 * (is_known and keeps_order)
    assert order == "flops" or set(found["chosen"]) <= {order}
    assert not is_known or bool(found["as_peft"]) == (not keeps_order)
    assert not is_autocast or all("bfloat16 with bfloat16" in each for each in found["shapes"])
    require_near(plain, expected, 0.05)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", ["flops", "f1:b1", "f2:b4"])
def test_in_a_region_that_has_evaluated_and_of_inputs_that_no_norm_has_seen(
    order: str, dtype: torch.dtype, bases: Bases
) -> None:
    """The projections of OPT get the input of their layer, which a recomputation has as a leaf."""
    tokens = torch.arange(48).view(2, 24)

    def step_behind_an_evaluation(model: Model, around: Any) -> Found:
        @contextmanager
        def region() -> Any:
            with autocast():
                with torch.no_grad():
                    model(input_ids=tokens, use_cache=False)
                yield

        return step(model, region)

    for architecture, names in (("qwen2", SEVEN), ("opt", ["q_proj", "v_proj", "fc1", "fc2"])):
        options: Any = {"dtype": dtype, "quantize": False, "target_modules": names}
        make = partial(adapted, bases, architecture, **options)
        _, expected, stats = streamed_and_resident(
            make, {"lora_paths": order}, {}, step=step_behind_an_evaluation
        )
        assert len(expected.facts) == 2 + 4 * len(names) and stats["lora_paths"]["chosen"]
