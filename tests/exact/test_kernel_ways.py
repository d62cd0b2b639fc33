"""Adapter kernels: fused ones, with the bits of PEFT's modules, and some with bits of their own.

Compared are loss, every gradient, the order in which parameters get theirs, and the random state.
Those of DoRA, of ``adapter_kernels="grouped"`` and of ``lora_paths``: near the bits of PEFT's
modules, and in each way that layers run the bits of a resident model with the same kernels.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from torch import nn

import poros
from poros.config import LORA_ORDERS
from poros.kernels import lora
from poros.kernels.adapters import tally_of
from tests.exact.recorded import recorded
from tests.exact.subjects import Lost
from tests.loops import (
    SEVEN,
    Model,
    adapted,
    at,
    before,
    behind,
    bf16,
    differences,
    halve,
    halve_in_place,
    nothing,
    num_groups,
    own_loss,
    same,
    several,
    step,
    train,
    trained,
)
from tests.support import AdversarialPrepare, same_bits

BF16, FP32 = torch.bfloat16, torch.float32
Bits = dict[str, torch.Tensor]
ORDERS = ["flops", *LORA_ORDERS[1:]]
DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
MIXED: dict[str, Any] = {"quantize": False, "dtype": BF16}
NARROW: dict[str, Any] = {"adapters": BF16}


# Fused kernels, which have the bits of PEFT.

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


def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def fused(
    model: Model, around: Callable[[], Any] = nullcontext
) -> tuple[list[str], int, dict[str, int]]:
    """What our operators change of a step; calls with one of them, and the others by reason."""
    plain = step(model, around)
    tally = tally_of(poros.use_adapter_kernels(model))
    found = step(model, around)
    poros.restore(model)
    assert tally is not None
    return differences(plain, found), tally.num_fused, dict(tally.unfused)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("around", [nullcontext, bf16], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "phi3"])
def test_fused_kernels_change_no_bit(
    architecture: str, options: dict[str, Any], dtype: torch.dtype, around: Any, quantize: bool
) -> None:
    if "init_lora_weights" in options and quantize:
        options = {}  # it writes to the base
    targets = TARGETS[options.get("targets", "seven")][architecture == "phi3"]
    run = {"dtype": dtype, "quantize": quantize, **options, "target_modules": targets}
    run.pop("targets", None)
    model = adapted(architecture, **run)
    num_adapted = sum(hasattr(module, "lora_A") for module in model.modules())
    assert fused(model, around) == ([], num_adapted, {}) and num_adapted >= 2


def dora_with_hooks(model: Model) -> None:
    model.add_adapter("dora", LoraConfig(r=4, target_modules=SEVEN, use_dora=True))
    model.set_adapter("dora")
    behind(double, "lora_magnitude_vector.dora")(model)


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


A, DROPOUT = "lora_A.default", "lora_dropout.default"
# What makes PEFT's modules run as they are, and why; or ours run all the same.
PROGRAMS: dict[str, tuple[Callable[[Model], None], str]] = {
    "several": (several, "several active adapters"),
    # As ``lora_bias=True`` has it.
    "biases": (
        at(lambda b: setattr(b, "bias", nn.Parameter(b.weight[:, 0].clone())), "lora_B.default"),
        "a bias in the adapter",
    ),
    "DoRA with hooks": (dora_with_hooks, "DoraLinearVariant"),
    "hooks": (behind(double, "lora_B.default"), "hooks in the adapter"),
    "another class": (
        at(lambda module: setattr(module, "__class__", Own), A),
        "modules of other classes in the adapter",
    ),
    "own forward": (
        at(lambda module: setattr(module, "forward", lambda input: input * 0.5), DROPOUT),
        "hooks in the adapter",
    ),
    "transposed": (
        at(lambda a: setattr(a.weight, "data", a.weight.data.t().contiguous().t()), A),
        "tensors that are not contiguous",
    ),
    "a tensor": (
        at(lambda module: module.scaling.update(default=torch.tensor(1.5)), *SEVEN),
        "a scaling that is no number",
    ),
    "a rate that is a tensor": (
        at(lambda held: held.update({"default": nn.Dropout(torch.tensor(0.1))}), "lora_dropout"),
        "a rate of dropout that is no number",
    ),
    "dtypes, under autocast": (at(nn.Module.bfloat16, A), "matrices of several dtypes"),
    "an output that is lost": (behind(lambda *given: Lost.apply(given[2]), "1.mlp"), ""),
    "a product that is lost": (before(lambda _, given: Lost.apply(*given), "1.mlp.down_proj"), ""),
    "an edited product": (before(halve_in_place, "down_proj"), ""),
    "an edit below": (before(halve_in_place, "down_proj.base_layer"), ""),
    "another shape": (behind(lambda *given: given[2].mean(1, True), "up_proj.base_layer"), ""),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_programs_do_to_modules_has_the_bits_of_peft(case: str) -> None:
    """What the operator does not know runs as PEFT has it; hooks see and change the same."""
    change, reason = PROGRAMS[case]
    model, around = adapted(), bf16 if case.endswith("autocast") else nullcontext
    change(model)
    changed, *counted = fused(model, around)
    assert changed == [] and (not reason or counted == [0, {reason: 14}])


def test_control_a_wrong_operator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora, "add_scaled", lambda result, added, how: result + added.to(result.dtype) * how.scaling
    )
    assert "loss" in fused(adapted(lora_alpha=5))[0]


def test_control_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes between that hand A its gradient before B."""
    genuine = lora._AddLora.apply
    monkeypatch.setattr(
        lora._AddLora,
        "apply",
        lambda result, input, b, a, *rest: genuine(result, input, b[...], a[...], *rest),
    )
    assert fused(adapted())[0] == ["order"]


# Others: which model, and which adapters.


def streamed_and_resident(
    make: Callable[[], Model],
    kernels: dict[str, str],
    around: Callable[[], Any] = nullcontext,
    step: Callable[..., Bits] = step,
) -> tuple[Bits, Bits, dict[str, Any]]:
    """A resident step with PEFT's modules and one with ours, and what was counted of it.

    A streamed model has the bits of the latter, and counts the same.
    """
    model = make()
    plain = step(model, around)
    poros.use_adapter_kernels(model, **kernels)
    expected, stats = step(model, around), poros.kernel_stats(model)
    model = poros.prepare(make(), loss="reference", device="cpu", **fields_of(kernels))
    for _ in range(2):  # the first watches the casts
        assert differences(step(model, around), expected) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    again = poros.kernel_stats(model)
    for count in ("num_grouped_adapters", "num_unfused_adapters"):
        assert bool(again[count]) == bool(stats[count])
    assert set(again["lora_paths"]["chosen"]) == set(stats["lora_paths"]["chosen"])
    return plain, expected, stats


def fields_of(kernels: dict[str, str]) -> dict[str, Any]:
    """Of a policy, for the arguments of ``use_adapter_kernels``."""
    others = {key: value for key, value in kernels.items() if key != "kernels"}
    return {"slots": 2, "adapter_kernels": kernels.get("kernels", "fused"), **others}


def require_near(plain: Bits, found: Bits, share: float) -> None:
    """Dtypes and draws of PEFT, and gradients within ``share`` of theirs."""
    assert found.keys() == plain.keys()
    assert same_bits(found["random"], plain["random"])
    for key, fact in found.items():
        assert fact.dtype == plain[key].dtype
        error = (fact - plain[key]).double().norm()
        assert error <= share * plain[key].double().norm() + 1e-5, key


frozen = partial(at, lambda module: module.requires_grad_(False))
wide_norms = at(nn.Module.float, "norm")
"""As ``prepare_model_for_kbit_training`` has them."""


def tied(model: Model) -> None:
    for layer in model.base_model.model.model.layers:
        attention = layer.self_attn
        attention.v_proj.lora_A["default"].weight = attention.q_proj.lora_A["default"].weight


def beside_lora(model: Model) -> None:
    """Each module as its adapter says; those of LoRA are checked against PEFT's own."""
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["k_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "plain"])


class Row(NamedTuple):
    options: dict[str, Any]
    """Of ``adapted``."""
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
    "dense": Row(DENSE),
    "autocast, nf4, adapters in bfloat16": Row(NARROW, bf16),
    "autocast, dense, bfloat16": Row(MIXED, bf16),
    "autocast without a cache": Row({}, partial(bf16, cache_enabled=False)),
    # A 4-bit weight that multiplies in float32 is not what autocast multiplies in.
    "autocast, nf4, float32": Row({"dtype": FP32}, bf16, num_ours=0),
    "autocast, float32 norms": Row({}, bf16, wide_norms),
    # One of those that share an input.
    "dropout in one": Row(
        NARROW,
        change=at(lambda k: k.lora_dropout.update({"default": nn.Dropout(0.5)}), "k_proj"),
        num_ours=12,
    ),
    "ranks": Row(
        {"rank_pattern": {"q_proj": 3, "up_proj": 1}, "alpha_pattern": {"k_proj": 5}, **NARROW}
    ),
    "bias": Row({"lora_bias": True, **NARROW}, num_ours=0),
    "q and v": Row({"target_modules": ["q_proj", "v_proj"], **NARROW}, num_ours=4),
    "k and down": Row({"target_modules": ["k_proj", "down_proj"], **NARROW}, num_ours=4),
    "gate and up": Row({"target_modules": ["gate_proj", "up_proj"], **NARROW}, num_ours=4),
    "A frozen": Row(NARROW, change=frozen("lora_A")),
    "B frozen": Row(DENSE, bf16, frozen("q_proj.lora_B")),
    "one frozen": Row(NARROW, change=frozen("gate_proj.lora_A", "gate_proj.lora_B")),
    "tied": Row(DENSE, change=tied),
    "tied, autocast": Row(DENSE, bf16, tied),
    "a hook before k": Row(NARROW, change=before(halve, "k_proj")),
    "an uncounted edit": Row(NARROW, change=before(halve_in_place, "k_proj"), is_near=False),
    "a hook on up": Row(NARROW, change=behind(double, "up_proj")),
    "a hook on down": Row({}, bf16, behind(double, "down_proj")),
    "a hook on A": Row(NARROW, change=behind(double, "k_proj.lora_A.default"), num_ours=12),
    "phi3": Row({"target_modules": "all-linear", **NARROW}, architecture="phi3", num_ours=8),
    "mixtral": Row(
        {"target_modules": SEVEN[:4], "dtype": FP32}, architecture="mixtral", num_ours=8
    ),
    "falcon": Row({"target_modules": "all-linear", **NARROW}, architecture="falcon", num_ours=None),
    "opt": Row(
        {**DENSE, "target_modules": ["q_proj", "k_proj", "v_proj", "fc1"]},
        bf16,
        architecture="opt",
        num_ours=8,
    ),
}
DORA = {
    "nf4, adapters narrower, autocast": Row(NARROW, bf16),
    "dense, float32, rsLoRA": Row({"use_rslora": True, **DENSE}),
    "nf4, float32, rank 1, autocast": Row({"r": 1, "dtype": FP32}, bf16),
    "dense, rank 96": Row({"r": 96, **MIXED}),
    "dense, dropout, autocast": Row({"lora_dropout": 0.1, **DENSE}, bf16),
    "nf4, float32": Row({"dtype": FP32}),
    "LoRA beside it": Row(
        {"target_modules": ["q_proj", "down_proj"]}, change=beside_lora, num_ours=8
    ),
    "phi3": Row({"target_modules": "all-linear"}, architecture="phi3", num_ours=8),
    "gemma3": Row({"lora_dropout": 0.1}, architecture="gemma3"),
}
OWN = {
    **{f"grouped: {name}": ({"kernels": "grouped"}, row) for name, row in GROUPED.items()},
    **{f"dora: {name}": ({}, row) for name, row in DORA.items()},
}


@pytest.mark.parametrize("name", OWN)
def test_streamed_equals_resident(name: str) -> None:
    kernels, row = OWN[name]

    def make() -> Model:
        model = adapted(row.architecture, use_dora=not kernels, **row.options)
        row.change(model)
        return model

    plain, expected, stats = streamed_and_resident(make, kernels, row.around)
    count = "num_grouped_adapters" if kernels else "num_fused_adapters"
    assert row.num_ours in (None, stats[count])
    # A forward and backward of two layers is some hundred roundings deep.
    is_full = row.options.get("dtype") is FP32 and row.around is nullcontext
    if row.is_near and (kernels or is_full):
        require_near(plain, expected, 1e-4 if is_full else 0.1)


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_products(
    order: str, dtype: torch.dtype, quantize: bool, dropout: float, is_autocast: bool
) -> None:
    """On a resident model, which a streamed one equals in ``test_training_and_evaluation``."""
    model = adapted(dtype=dtype, quantize=quantize, lora_dropout=dropout)
    around = partial(bf16, enabled=is_autocast)
    plain = step(model, around)
    poros.use_adapter_kernels(model, lora_paths=order)
    expected, found = step(model, around), poros.kernel_stats(model)["lora_paths"]
    # 4-bit modules give back the dtype of their input, which is not what autocast multiplies in.
    is_known = not (is_autocast and quantize and dtype is FP32)
    keeps_order = not dropout or order in ("flops", "f1:b1", "f1:b2", "f1:b3")
    assert sum(found["chosen"].values()) == 14 * (is_known and keeps_order)
    assert order == "flops" or set(found["chosen"]) <= {order}
    assert all(("dropout" in each) == bool(dropout) for each in found["shapes"])
    assert not is_known or bool(found["as_peft"]) == (not keeps_order)
    assert not is_autocast or all("bfloat16 with bfloat16" in each for each in found["shapes"])
    require_near(plain, expected, 0.05)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", ["flops", "f1:b1", "f2:b4"])
def test_in_a_region_that_has_evaluated_and_of_inputs_that_no_norm_has_seen(
    order: str, dtype: torch.dtype
) -> None:
    """The projections of OPT get the input of their layer, which a recomputation has as a leaf."""
    tokens = torch.arange(48).view(2, 24)

    def step_behind_an_evaluation(model: Model, around: Any) -> Bits:
        @contextmanager
        def region() -> Any:
            with bf16():
                with torch.no_grad():
                    model(input_ids=tokens, use_cache=False)
                yield

        return step(model, region)

    for architecture, names in (("qwen2", SEVEN), ("opt", ["q_proj", "v_proj", "fc1", "fc2"])):
        options: Any = {"dtype": dtype, "quantize": False, "target_modules": names}
        make = partial(adapted, architecture, **options)
        _, expected, stats = streamed_and_resident(
            make, {"lora_paths": order}, step=step_behind_an_evaluation
        )
        assert len(expected) == 2 + 4 * len(names) and stats["lora_paths"]["chosen"]


# In which ways layers run.

# What is asked for, and of which model.
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "grouped": ({"kernels": "grouped"}, NARROW),
    "DoRA": ({}, {"use_dora": True, "lora_dropout": 0.1}),
    **{
        order: ({"lora_paths": order}, {"dtype": FP32, "quantize": place % 3 > 0})
        for place, order in enumerate(ORDERS)
    },
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
    ("recorded", True, "inputs on the host", "plain"),
    ("recorded", True, "dense weights shared", "plain"),
    ("hostile", True, "dense weights shared", "plain"),
]
"""Whether streams are hostile or visits recorded, and whether micro-batches go together."""
SIZES = (3, 3, 3)
AROUND = {"plain": nullcontext, "autocast": bf16}


def run(model: Model, around: str, together: bool) -> list[torch.Tensor]:
    """Training; a step whose backward alone is in a region; an evaluation and a generation.

    That region casts what a product is given, and not what is added to in place.
    """

    def loss(model: Model, batch: Any) -> torch.Tensor:
        with AROUND[around]():
            return own_loss(model, batch)

    found = train(model, together, sizes=SIZES, loss=loss)
    torch.manual_seed(0)
    tokens = torch.arange(48).view(2, 24)
    loss_of_all = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with bf16():
        loss_of_all.backward()
    found += [each.grad for each in trained(model)]
    model.eval()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            found += [model(input_ids=part).logits.clone() for part in (tokens, tokens[:1, :1])]
    written = model.generate(input_ids=tokens[:, :4], max_new_tokens=4, do_sample=False)
    return [*found, written]


def model_of(kernels: str) -> Model:
    return adapted(**KERNELS[kernels][1])


@cache
def expected(kernels: str, around: str) -> list[torch.Tensor]:
    model = poros.use_adapter_kernels(model_of(kernels), **KERNELS[kernels][0])
    return run(model, around, False)


@pytest.mark.cover("values")
@pytest.mark.parametrize(("way", "together", "policy", "around"), WAYS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_training_and_evaluation(
    kernels: str, way: str, together: bool, policy: str, around: str
) -> None:
    choice, options = KERNELS[kernels]
    model, chosen = model_of(kernels), {**fields_of(choice), **POLICIES[policy]}
    captures = None
    if way == "recorded":
        _, captures, _ = recorded(model, **chosen)
    else:
        prepare: Any = poros.prepare if way == "eager" else AdversarialPrepare()
        prepare(model, **{"loss": "reference", "device": "cpu", **chosen})
    assert same(run(model, around, together), expected(kernels, around))
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] == ("off" if way == "hostile" else "passed")
    # Of 4-bit weights in full precision tapes give other bits under autocast.
    is_4bit = options.get("dtype") is FP32 and options["quantize"]
    is_replayed = around == "plain" or not is_4bit
    assert captures is None or (captures.num_replays > 0) == is_replayed
    assert num_groups(model) == len(SIZES) * together


@pytest.mark.parametrize("kernels", ["grouped", "DoRA", "f1:b1"])
def test_control_their_bits_are_others(kernels: str) -> None:
    """Or what compares with them would compare nothing."""
    found = run(model_of(kernels), "plain", False)
    assert not same(found, expected(kernels, "plain"))
