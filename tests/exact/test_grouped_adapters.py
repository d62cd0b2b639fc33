"""``adapter_kernels="grouped"`` on models: streamed equals resident, what shares, what is refused.

A resident model with ``poros.use_adapter_kernels(model, "grouped")`` is the reference. Its bits are
not PEFT's; how near they are is shown in ``tests/unit/test_grouped.py``. Recorded visits and
grouped micro-batches: ``test_kernel_ways``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import poros
from poros.config import StreamingPolicy
from poros.errors import PolicyError, PreparedModelError
from poros.gates.parity import check_architecture
from poros.kernels.adapters import tally_of
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe
from tests.covers import with_slow
from tests.exact.adapter_arms import SEVEN, Model, adapted, differences, step
from tests.exact.arms import Bases
from tests.exact.trainer_arms import two_steps
from tests.support import same_bits

BF16, FP32 = torch.bfloat16, torch.float32
GROUPED: dict[str, Any] = {"adapter_kernels": "grouped"}
DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
MIXED: dict[str, Any] = {"quantize": False, "dtype": BF16}
NARROW: dict[str, Any] = {"adapters": BF16}
FAST: dict[str, Any] = {"slots": 2}
KEPT: dict[str, Any] = {"slots": 2, "keep_last": 2}
OFFLOADED: dict[str, Any] = {"slots": 2, "offload_boundaries": True}
BLOCKS: dict[str, Any] = {"slots": 2, "block_size": 2}


def autocast() -> Any:
    return torch.autocast("cpu", dtype=BF16)


def without_a_cache() -> Any:
    return torch.autocast("cpu", dtype=BF16, cache_enabled=False)


def nothing(model: Model) -> None:
    pass


def attentions(model: Model) -> list[Any]:
    return [layer.self_attn for layer in model.base_model.model.model.layers]


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
    for attention in attentions(model):
        attention.k_proj.lora_dropout["default"] = nn.Dropout(0.5)


def tied(model: Model) -> None:
    for attention in attentions(model):
        attention.v_proj.lora_A["default"].weight = attention.q_proj.lora_A["default"].weight


def halve(module: nn.Module, given: Any) -> Any:
    return (given[0] * 0.5,)


def halve_in_place(module: nn.Module, given: Any) -> None:
    """In a way that no version counts."""
    given[0].data.mul_(0.5)


def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def hooked(name: str, hook: Any, is_before: bool = False) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for each, module in model.named_modules():
            if each.endswith(name):
                register = (
                    module.register_forward_pre_hook if is_before else module.register_forward_hook
                )
                register(hook)

    return change


class Row(NamedTuple):
    options: dict[str, Any]
    """Of ``adapted``."""
    policy: dict[str, Any] = FAST
    around: Callable[[], Any] = nullcontext
    change: Callable[[Model], None] = nothing
    architecture: str = "qwen2"
    num_grouped: int | None = 14
    """Calls of a forward with the operator; None if nobody counts."""
    is_near: bool = True
    """Whether PEFT's gradients are near: it keeps copies of inputs in the dtype of the adapters."""


ROWS = {
    "nf4": Row(NARROW),
    "nf4, float32": Row({"dtype": FP32}, OFFLOADED),
    "dense": Row(DENSE, BLOCKS),
    "dense, adapters narrower": Row({**DENSE, "adapters": BF16}, KEPT, num_grouped=0),
    "nf4, adapters wider": Row({}, num_grouped=0),
    "autocast, nf4": Row({}, around=autocast),
    "autocast, nf4, adapters in bfloat16": Row(NARROW, KEPT, autocast),
    "autocast, dense, float32": Row(DENSE, OFFLOADED, autocast),
    "autocast, dense, bfloat16": Row(MIXED, BLOCKS, autocast),
    "autocast without a cache": Row({}, FAST, without_a_cache),
    # A 4-bit weight that multiplies in float32 is not what autocast multiplies in.
    "autocast, nf4, float32": Row({"dtype": FP32}, around=autocast, num_grouped=0),
    "autocast, float32 norms": Row({}, FAST, autocast, wide_norms),
    "dropout": Row({"lora_dropout": 0.3}, OFFLOADED, autocast, num_grouped=0),
    "dropout in one": Row(NARROW, FAST, nullcontext, with_dropout, num_grouped=12),
    "ranks": Row(
        {"rank_pattern": {"q_proj": 3, "up_proj": 1}, "alpha_pattern": {"k_proj": 5}, **NARROW}
    ),
    "bias": Row({"lora_bias": True, **NARROW}, KEPT, num_grouped=0),
    "rslora": Row({"use_rslora": True, **NARROW}),
    "q and v": Row({"target_modules": ["q_proj", "v_proj"], **NARROW}, num_grouped=4),
    "k and down": Row({"target_modules": ["k_proj", "down_proj"], **NARROW}, num_grouped=4),
    "gate and up": Row({"target_modules": ["gate_proj", "up_proj"], **NARROW}, KEPT, num_grouped=4),
    "A frozen": Row(NARROW, FAST, nullcontext, frozen("lora_A")),
    "B frozen": Row(DENSE, FAST, autocast, frozen("q_proj.lora_B")),
    "one frozen": Row(NARROW, KEPT, nullcontext, frozen("gate_proj.lora")),
    "tied": Row(DENSE, FAST, nullcontext, tied),
    "tied, autocast": Row(DENSE, FAST, autocast, tied),
    "a hook before k": Row(NARROW, FAST, nullcontext, hooked("k_proj", halve, True)),
    "an uncounted edit": Row(
        NARROW, FAST, nullcontext, hooked("k_proj", halve_in_place, True), is_near=False
    ),
    "a hook behind k": Row(NARROW, FAST, nullcontext, hooked("k_proj", double)),
    "a hook on up": Row(NARROW, FAST, nullcontext, hooked("up_proj", double)),
    "a hook on down": Row({}, KEPT, autocast, hooked("down_proj", double)),
    "a hook on A": Row(
        NARROW, FAST, nullcontext, hooked("k_proj.lora_A.default", double), "qwen2", 12
    ),
    "phi3": Row({"target_modules": "all-linear", **NARROW}, architecture="phi3", num_grouped=8),
    "gemma3": Row({"target_modules": SEVEN, **NARROW}, architecture="gemma3"),
    "qwen3": Row(NARROW, KEPT, architecture="qwen3"),
    "mixtral": Row(
        {"target_modules": SEVEN[:4], "dtype": FP32}, architecture="mixtral", num_grouped=8
    ),
    "falcon": Row(
        {"target_modules": "all-linear", **NARROW}, architecture="falcon", num_grouped=None
    ),
    "opt": Row(
        {**DENSE, "target_modules": ["q_proj", "k_proj", "v_proj", "fc1"]},
        around=autocast,
        architecture="opt",
        num_grouped=8,
    ),
}


def grouped(model: Model) -> Model:
    return poros.use_adapter_kernels(model, "grouped")


def streamed(model: Model, **policy: Any) -> Model:
    return poros.prepare(model, loss="reference", device="cpu", **GROUPED, **policy)


# What they have comes together in others.
SLOW = ("nf4, float32", "dense", "autocast, dense, float32", "autocast, float32 norms", "dropout")
SLOW += ("bias", "rslora", "q and v", "A frozen", "tied", "a hook on down")


@pytest.mark.parametrize("name", with_slow(ROWS, SLOW))
def test_streamed_equals_resident(name: str, bases: Bases) -> None:
    row = ROWS[name]
    model = adapted(bases, row.architecture, **row.options)
    row.change(model)
    plain = step(model, row.around)
    expected = step(grouped(model), row.around)
    stats = poros.kernel_stats(model)
    assert row.num_grouped in (None, stats["num_grouped_adapters"])
    assert expected.facts.keys() == plain.facts.keys()
    # PEFT's draws in PEFT's order.
    assert same_bits(expected.facts["random"], plain.facts["random"])
    for key, fact in expected.facts.items():
        assert fact.dtype == plain.facts[key].dtype
        error = (fact - plain.facts[key]).double().norm()
        assert error <= 0.1 * plain.facts[key].double().norm() + 1e-5 or not row.is_near, key
    model = adapted(bases, row.architecture, **row.options)
    row.change(model)
    streamed(model, **row.policy)
    for _ in range(2):
        assert differences(step(model, row.around), expected) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    again = poros.runtime(model).stats()
    assert bool(again["num_grouped_adapters"]) == bool(stats["num_grouped_adapters"])


def test_its_bits_are_its_own(bases: Bases) -> None:
    """Or tests that compare with it would compare nothing."""
    model = adapted(bases, dtype=FP32)
    plain = step(model)
    assert differences(step(grouped(model)), plain)
    poros.restore(model)
    assert differences(step(model), plain) == []


@pytest.mark.parametrize(
    "architecture", with_slow(("llama", "gemma4", "qwen3_moe"), ("gemma4", "qwen3_moe"))
)
def test_the_gate_compares_with_a_resident_run_of_the_same_kernels(architecture: str) -> None:
    small: dict[str, Any] = {"num_steps": 2, "num_layers": 2, "hidden_size": 64, "dropout": 0.0}
    small["autocast_dtype"] = BF16
    report = check_architecture(architecture, **GROUPED, **small)
    assert report.exact, report.error

    def without(model: Any, **policy: Any) -> Any:
        return poros.prepare(model, **{**policy, "adapter_kernels": "peft", "slots": 2})

    if architecture == "llama":  # a control
        report = check_architecture("llama", prepare=without, **GROUPED, **small)
        assert not report.exact and report.num_differences > 0 and report.resident_repeats


# ------------------------------------------------------------------ who shares what


def test_an_error_leaves_nothing_behind(bases: Bases) -> None:
    model = grouped(adapted(bases, **NARROW))
    expected = step(model)

    def fail(module: nn.Module, given: Any) -> None:
        raise ZeroDivisionError

    attention = attentions(model)[0]
    handle = attention.v_proj.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step(model)
    handle.remove()
    tally = tally_of(model)
    assert tally is not None and tally.shared is None
    assert differences(step(model), expected) == []


@pytest.mark.parametrize("how", ["another tensor", "a counted edit", "another adapter"])
def test_only_this_very_input_is_shared(
    how: str, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention's own code gives k something else, of which no hook tells."""
    model = adapted(bases, **DENSE)
    attention = attentions(model)[0]
    kind = type(attention)
    genuine = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = type(self.k_proj).__call__

        def call(module: Any, given: torch.Tensor) -> Any:
            if module is self.k_proj and how == "another tensor":
                given = given * 0.5
            elif module is self.k_proj and how == "a counted edit":
                given.mul_(0.5)
            elif module is self.k_proj:
                module.scaling["default"] *= 0.5
            try:
                return own(module, given)
            finally:
                if module is self.k_proj and how == "another adapter":
                    module.scaling["default"] /= 0.5

        with monkeypatch.context() as patch:
            patch.setattr(type(self.k_proj), "__call__", call)
            return genuine(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=torch.arange(24)[None]).logits
        return found

    plain = logits()
    grouped(model)
    found = logits()
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(kind, "forward", genuine)
    assert not torch.allclose(logits(), found, rtol=1e-4, atol=1e-5)  # a control


# ------------------------------------------------------------------ what is refused, and planned


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_other_adapters_are_refused_and_nothing_is_changed(kind: str, bases: Bases) -> None:
    def made() -> Model:
        if kind == "dora":
            return adapted(bases, use_dora=True)
        config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
        return get_peft_model(bases.base(num_layers=2), config)

    model = made()
    before = [sorted(module.__dict__) for module in model.modules()]
    for refused in (grouped, lambda model: streamed(model, slots=2)):
        with pytest.raises(PolicyError, match=r"layers\.0\..* expected LoRA .*found.*fused"):
            refused(model)
    assert [sorted(module.__dict__) for module in model.modules()] == before
    poros.prepare(model, slots=2, device="cpu")


def test_other_orders_are_refused(bases: Bases) -> None:
    with pytest.raises(PolicyError, match="lora_paths: expected"):
        StreamingPolicy(lora_paths="flops", **GROUPED)
    with pytest.raises(PolicyError, match="lora_paths: expected"):
        poros.use_adapter_kernels(adapted(bases), "grouped", lora_paths="f1:b1")
    for first, second in (("fused", "grouped"), ("grouped", "fused")):
        model = poros.use_adapter_kernels(adapted(bases), first)
        assert poros.use_adapter_kernels(model, first) is model
        with pytest.raises(PreparedModelError, match="restore"):
            poros.use_adapter_kernels(model, second)
    model = streamed(adapted(bases), slots=2)
    assert streamed(model, slots=2) is model
    with pytest.raises(PreparedModelError, match="restore"):
        poros.prepare(model, loss="reference", device="cpu", slots=2)


def test_an_adapter_that_comes_later_and_is_no_lora_runs_as_fused(bases: Bases) -> None:
    model = grouped(adapted(bases))
    model.add_adapter("dora", LoraConfig(r=4, target_modules=SEVEN, use_dora=True))
    model.set_adapter("dora")
    step(model)
    stats = poros.kernel_stats(model)
    assert (stats["num_grouped_adapters"], stats["num_fused_adapters"]) == (0, 14)


def test_a_run_resumes_with_its_own_kernels(tmp_path: Path, bases: Bases) -> None:
    expected = two_steps(streamed(adapted(bases, dtype=FP32), slots=2), tmp_path, Trainer)
    found = two_steps(grouped(adapted(bases, dtype=FP32)), tmp_path, Trainer, resume=True)
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_a_plan_counts_it(bases: Bases) -> None:
    """It takes about as much memory as one operator for each projection, and less than PEFT."""
    planner = CostModel(Recipe.like(adapted(bases, adapters=BF16)))

    def peak(kernels: str) -> int:
        step = planner.cost(2, 64, "reference", kernels)
        return max(layer.peak for layer in step.layers)

    stacked = 5 * 8 * 64 * BF16.itemsize
    assert 0 < peak("grouped") <= peak("fused") + 2 * stacked < peak("peft")
