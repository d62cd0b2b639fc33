"""Operators of adapters in models on a GPU: streamed equals resident, LoRA equals PEFT, to the bit.

DoRA is within bounds of PEFT's modules; orders of products and grouped adapters: tests/unit.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, get_peft_model

import poros
from poros.gates import tiny
from tests.gpu.models import BF16, assert_streamed, differing, gradients, model_of, same

pytestmark = pytest.mark.gpu

FP32 = torch.float32
POLICIES: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 2, "cuda_graphs": True},
    {"slots": 4, "keep_last": 4},
    {"slots": 2, "block_size": 2, "offload_boundaries": True, "cuda_graphs": False},
]
DORA = {"r": 16, "lora_alpha": 16, "use_dora": True}
PATHS = ("flops", "f1:b1", "f1:b3", "f2:b4", "f2:b5")
AUTOCAST = pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
QUANTIZED = pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
DTYPE = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


@AUTOCAST
@QUANTIZED
@DTYPE
@pytest.mark.parametrize(
    ("operators", "dropout"), [*product(("dora", *PATHS), (0.0, 0.05)), ("grouped", 0.0)]
)
def test_streamed_equals_resident(
    operators: str,
    dtype: torch.dtype,
    dropout: float,
    quantize: bool,
    autocast: bool,
    tmp_path: Path,
) -> None:
    adapters = DORA if operators == "dora" else {}
    model = model_of(tmp_path, dtype=dtype, dropout=dropout, quantize=quantize, **adapters)
    plain = gradients(model, autocast)
    kernels = "grouped" if operators == "grouped" else "fused"
    paths = operators if operators in PATHS else "peft"
    poros.use_adapter_kernels(model, kernels, lora_paths=paths)
    expected = gradients(model, autocast)
    if operators == "grouped":
        # A 4-bit weight that multiplies in float32 is not what autocast multiplies in; without it,
        # adapters in float32 multiply in that.
        is_known = not (quantize and dtype is FP32) if autocast else dtype is FP32
        assert poros.kernel_stats(model)["num_grouped_adapters"] == 4 * 7 * is_known
        assert same(expected["random"], plain["random"])
    assert differing(gradients(model, autocast), expected) == []
    poros.restore(model)
    of_operators = {"adapter_kernels": kernels, "lora_paths": paths}
    # DoRA's recorded visits are in test_steps_on_gpu.
    policies, repeats = (POLICIES[::2], 2) if operators == "dora" else (POLICIES, 6)
    policies = [{**of_operators, **policy} for policy in policies]
    every = assert_streamed(model, expected, policies, repeats=repeats, autocast=autocast)
    for policy, stats in zip(policies, every, strict=True):
        if operators == "dora":
            assert stats["self_check"] == "passed" and stats["num_unfused_adapters"] == 0
        if operators in PATHS:
            # A 4-bit module gives back the dtype of its input, here float32, as autocast does not.
            assert stats["lora_paths"]["chosen"] or dropout or (autocast and quantize)
        may_run = operators in PATHS and autocast
        assert stats["num_replayed_visits"] or may_run or policy.get("cuda_graphs") is not True


@AUTOCAST
@QUANTIZED
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@DTYPE
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3"])
def test_lora_trains_as_with_peft(
    architecture: str,
    dtype: torch.dtype,
    dropout: float,
    quantize: bool,
    autocast: bool,
    tmp_path: Path,
) -> None:
    """Resident, and streamed, which leaves out last products."""
    config = tiny.small_config(architecture, num_layers=3, hidden_size=128)
    tiny.write_checkpoint(config, tmp_path / "checkpoint", dtype=dtype)
    base = tiny.load_base(tmp_path / "checkpoint", dtype=dtype, quantize=quantize, device="cuda")
    model = tiny.attach(base, dropout=dropout).train()
    expected = gradients(model, autocast)
    poros.use_adapter_kernels(model)
    assert differing(gradients(model, autocast), expected) == []
    poros.restore(model)
    (stats,) = assert_streamed(model, expected, [{"slots": 2}], autocast=autocast)
    assert stats["num_fused_adapters"] > 0 and not stats["fallbacks"]
    if architecture in ("qwen2", "llama", "mistral") and not (autocast and dtype is FP32):
        assert stats["num_left_out_adapters"] == 2 * 3


@QUANTIZED
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dora_is_within_rounding_of_peft(dropout: float, quantize: bool, tmp_path: Path) -> None:
    """In float32, with PyTorch's products in full: three layers are some hundred roundings deep."""
    options: dict[str, Any] = {"quantize": quantize, "dropout": dropout, "dtype": FP32, **DORA}
    model = model_of(tmp_path, num_layers=3, **options)
    expected = gradients(model)
    poros.use_adapter_kernels(model)
    found = gradients(model)
    assert same(found["random"], expected["random"])
    for name in expected.keys() - {"random"}:
        distance = (found[name].double() - expected[name].double()).abs().max()
        assert distance <= 2048 * 2.0**-24 * expected[name].double().abs().max() + 1e-10, name


@DTYPE
def test_peft_s_offload_initialises_as_a_base_on_the_gpu_does(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The same packed bytes. Either norm is rounded to bfloat16: they are neighbours at most."""
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=256)
    tiny.write_checkpoint(config, tmp_path / "checkpoint", dtype=dtype)
    found = []
    for is_offloaded in (True, False):
        base = tiny.load_base(tmp_path / "checkpoint", dtype=dtype)
        base = base if is_offloaded else base.to("cuda")
        runtime = LoraRuntimeConfig(ephemeral_gpu_offload=is_offloaded)
        options = {"target_modules": "all-linear", "use_dora": True, "runtime_config": runtime}
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=8, **options))
        found.append({name: each.detach() for name, each in model.named_parameters()})
    offloaded, resident = found
    names = [name for name in offloaded if "lora_" in name]
    assert len(names) == 2 * 7 * 3
    for name in names:
        assert offloaded[name].device.type == "cpu"
        expected = resident[name].cpu()
        if "magnitude" in name:
            assert ((offloaded[name] - expected).abs() <= 2**-7 * expected).all(), name
        else:
            assert same(offloaded[name], expected), name
