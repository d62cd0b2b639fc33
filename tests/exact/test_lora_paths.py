"""``lora_paths`` on models: streamed equals resident, what is refused, what is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig

import poros
from poros.config import LORA_ORDERS, StreamingPolicy
from poros.errors import PolicyError, PreparedModelError
from poros.kernels.paths import LoraShape
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe
from tests.exact.adapter_arms import SEVEN, Found, Model, adapted, differences, step
from tests.exact.arms import Bases

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: dict[str, dict[str, Any]] = {
    "two slots": {"slots": 2},
    "all kept": {"slots": 2, "keep_last": 2},
    "blocks of two layers": {"slots": 2, "block_size": 2},
    "inputs on the host": {"slots": 2, "offload_boundaries": True},
}
PATHS = ["flops", *LORA_ORDERS[1:]]


def policy_of(paths: str) -> dict[str, Any]:
    """One for each order, in turn: they decide no order."""
    return list(POLICIES.values())[PATHS.index(paths) % len(POLICIES)]


def streamed(model: Model, **policy: Any) -> Model:
    return poros.prepare(model, loss="reference", device="cpu", **policy)


def chosen(model: Model) -> dict[str, int]:
    found: dict[str, int] = poros.kernel_stats(model)["lora_paths"]["chosen"]
    return found


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("paths", PATHS)
def test_streamed_equals_resident(
    paths: str, dtype: torch.dtype, quantize: bool, dropout: float, is_autocast: bool, bases: Bases
) -> None:
    def around() -> Any:
        return torch.autocast("cpu", dtype=BF16, enabled=is_autocast)

    options: Any = {"dtype": dtype, "quantize": quantize, "lora_dropout": dropout}
    model = adapted(bases, **options)
    plain = step(model, around)
    poros.use_adapter_kernels(model, lora_paths=paths)
    expected = step(model, around)
    found = poros.kernel_stats(model)["lora_paths"]
    # 4-bit modules give back the dtype of their input, which is not what autocast multiplies in.
    is_known = not (is_autocast and quantize and dtype is FP32)
    keeps_order = not dropout or paths in ("flops", "f1:b1", "f1:b2", "f1:b3")
    assert sum(found["chosen"].values()) == 14 * (is_known and keeps_order)
    assert paths == "flops" or set(found["chosen"]) <= {paths}
    assert not is_known or bool(found["as_peft"]) == (not keeps_order)
    if is_autocast:
        assert all("bfloat16 with bfloat16" in each for each in found["shapes"])
        for name, fact in expected.facts.items():
            assert fact.dtype == plain.facts[name].dtype
            if fact.is_floating_point():
                error = (fact - plain.facts[name]).float().norm()
                assert error <= 0.05 * plain.facts[name].float().norm() + 1e-6, name
    model = adapted(bases, **options)
    streamed(model, lora_paths=paths, **policy_of(paths))
    for _ in range(2):  # the first watches the casts
        assert differences(step(model, around), expected) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    again = poros.runtime(model).stats()["lora_paths"]
    assert set(again["chosen"]) == set(found["chosen"])
    assert again == poros.kernel_stats(model)["lora_paths"]


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("paths", ["flops", "f1:b1", "f2:b4"])
def test_in_a_region_that_has_evaluated_and_of_inputs_that_no_norm_has_seen(
    paths: str, dtype: torch.dtype, bases: Bases
) -> None:
    """The projections of OPT get the input of their layer, which a recomputation has as a leaf."""
    tokens = torch.arange(48).view(2, 24)

    def outcome(model: Model) -> Found:
        @contextmanager
        def around() -> Iterator[None]:
            with torch.autocast("cpu", dtype=BF16):
                with torch.no_grad():
                    model(input_ids=tokens, use_cache=False)
                yield

        return step(model, around)

    for architecture, names in (("qwen2", SEVEN), ("opt", ["q_proj", "v_proj", "fc1", "fc2"])):
        options: Any = {"dtype": dtype, "quantize": False, "target_modules": names}
        model = adapted(bases, architecture, **options)
        expected = outcome(poros.use_adapter_kernels(model, lora_paths=paths))
        assert len(expected.facts) == 2 + 4 * len(names) and chosen(model)
        model = streamed(adapted(bases, architecture, **options), slots=2, lora_paths=paths)
        for _ in range(2):
            assert differences(outcome(model), expected) == []


def test_another_order_gives_other_bits_and_peft_gives_pefts(bases: Bases) -> None:
    model = adapted(bases, dtype=FP32)
    plain = step(model)
    for paths in ("peft", "f1:b1", "f2:b5"):
        poros.use_adapter_kernels(model, lora_paths=paths)
        found = step(model)
        poros.restore(model)
        assert bool(differences(found, plain)) == (paths != "peft")
        facts = [(found.facts[name], plain.facts[name]) for name in plain.facts]
        close = [torch.allclose(*pair, rtol=1e-3, atol=1e-5) for pair in facts]
        assert all(close)


def test_the_plan_counts_the_workspaces(bases: Bases) -> None:
    planner = CostModel(Recipe.like(adapted(bases, dtype=FP32, quantize=False)))

    def peak(paths: str) -> int:
        step = planner.cost(1, 2, "reference", "fused", lora_paths=paths)
        return max(layer.peak for layer in step.layers)

    peaks = {paths: peak(paths) for paths in ("peft", "f1:b1", "f1:b3", "f2:b4", "f2:b5")}
    # Of few tokens, matrices of the size of the largest weight are what shows.
    config = planner.model.config
    largest = 4 * config.hidden_size * config.intermediate_size
    assert peaks["f2:b5"] >= peaks["peft"] + largest // 2
    assert peaks["f1:b3"] >= peaks["f1:b1"] + largest // 2


def shape(n: int = 4096, i: int = 768, o: int = 768, r: int = 64) -> LoraShape:
    return LoraShape(n, i, o, r, FP32, FP32)


# ------------------------------------------------------------------ policies


@pytest.mark.parametrize(
    ("paths", "kernels"),
    [
        ("f3:b1", "fused"),
        ("b5", "fused"),
        (None, "fused"),
        ("flops", "exact"),
        ("f1:b1", "peft"),
    ],
)
def test_what_cannot_work_is_refused(paths: Any, kernels: str, bases: Bases) -> None:
    with pytest.raises(PolicyError, match="lora_paths: expected"):
        StreamingPolicy(lora_paths=paths, adapter_kernels=kernels)
    if kernels != "peft":
        with pytest.raises(PolicyError, match="lora_paths: expected"):
            poros.use_adapter_kernels(adapted(bases), kernels, lora_paths=paths)


def test_stats_of_a_resident_model(bases: Bases) -> None:
    model = adapted(bases, dtype=FP32, quantize=False)
    with pytest.raises(PreparedModelError, match="use_adapter_kernels"):
        poros.kernel_stats(model)
    poros.use_adapter_kernels(model, lora_paths="f2:b5")
    step(model)
    stats = poros.kernel_stats(model)
    assert stats["num_fused_adapters"] == 14
    assert stats["lora_paths"]["chosen"] == {"f2:b5": 14} and not stats["lora_paths"]["as_peft"]
    assert set(stats["lora_paths"]["shapes"].values()) == {"f2:b5"}
    with pytest.raises(PreparedModelError, match="restore"):
        poros.use_adapter_kernels(model, lora_paths="f1:b1")
    poros.restore(model)
    poros.use_adapter_kernels(model)
    step(model)
    assert poros.kernel_stats(model)["lora_paths"]["chosen"] == {}


def test_dora_and_several_adapters_keep_their_order_by_name(bases: Bases) -> None:
    for options, reason in (({"use_dora": True}, "DoRA"), ({}, "several active adapters")):
        model = adapted(bases, **options)
        if not options:
            model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
            model.base_model.set_adapter(["default", "other"])
        poros.use_adapter_kernels(model, lora_paths="f1:b1")
        step(model)
        assert poros.kernel_stats(model)["lora_paths"]["as_peft"][reason] > 0


def test_with_tf32_nothing_is_merged_unless_asked(bases: Bases) -> None:
    before, shapes = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            model = adapted(bases, dtype=FP32, quantize=False)
            poros.use_adapter_kernels(model, lora_paths="flops")
            step(model)
            shapes.append(list(poros.kernel_stats(model)["lora_paths"]["shapes"]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert all("float32 with float32" in each for each in shapes[0])
    assert all("TF32" in each for each in shapes[1]) and not any("TF32" in s for s in shapes[0])
