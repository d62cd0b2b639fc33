"""DoRA of models on a GPU: streamed equals resident to the bit; PEFT's modules within rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, get_peft_model

import poros
from poros.gates import tiny
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch
from poros.kernels.use import patch
from tests.gpu.models import gradients, model_of, same

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
Model = Any


def dora(folder: Path, architecture: str = "qwen2", **options: Any) -> Model:
    adapters = {"r": 16, "lora_alpha": 16, "dropout": 0.0, "use_dora": True}
    return model_of(folder, architecture, num_layers=3, **{**adapters, **options})


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_streamed_equals_resident(
    dtype: torch.dtype, dropout: float, quantize: bool, autocast: bool, tmp_path: Path
) -> None:
    model = dora(tmp_path, quantize=quantize, dropout=dropout, dtype=dtype)
    poros.use_adapter_kernels(model)
    expected = gradients(model, autocast)
    assert all(same(expected[name], each) for name, each in gradients(model, autocast).items())
    poros.restore(model)
    for policy in ({"slots": 2}, {"slots": 2, "keep_last": 2}):
        poros.prepare(model, loss="reference", **policy)
        for _ in range(2):
            found = gradients(model, autocast)
            assert found.keys() == expected.keys()
            assert [name for name in expected if not same(found[name], expected[name])] == []
        assert poros.runtime(model).self_check["status"] == "passed"
        assert poros.runtime(model).stats()["num_unfused_adapters"] == 0
        poros.restore(model)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    model = dora(tmp_path, architecture, dropout=0.1)
    poros.use_adapter_kernels(model)
    expected = gradients(model)
    poros.restore(model)
    poros.prepare(model, loss="reference", slots=2)
    for _ in range(2):
        found = gradients(model)
        assert [name for name in expected if not same(found[name], expected[name])] == []


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_is_within_rounding_of_peft(dropout: float, quantize: bool, tmp_path: Path) -> None:
    """In float32, with PyTorch's products in full: three layers are some hundred roundings deep."""
    model = dora(tmp_path, quantize=quantize, dropout=dropout, dtype=FP32)
    expected = gradients(model)
    poros.use_adapter_kernels(model)
    found = gradients(model)
    assert same(found["random"], expected["random"])
    for name in expected.keys() - {"random"}:
        distance = (found[name].double() - expected[name].double()).abs().max()
        assert distance <= 2048 * 2.0**-24 * expected[name].double().abs().max() + 1e-10, name


def peak(model: Model, num_tokens: int) -> int:
    gradients(model, num_tokens=num_tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(model, num_tokens=num_tokens)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_is_as_large_as_the_weight_but_one_weight(dropout: float, tmp_path: Path) -> None:
    """With few tokens: the peak beyond the gradients is one dense projection and small change."""
    model = dora(tmp_path, hidden_size=2048, dropout=dropout)
    largest = max(
        module.weight.quant_state.shape.numel()
        for module in model.modules()
        if type(module).__name__ == "Linear4bit"
    )
    of_gradients = sum(4 * each.numel() for each in model.parameters() if each.requires_grad)
    theirs = peak(model, 8)
    patch(model, torch.device("cuda"), KernelStats())
    ours = peak(model, 8)
    unpatch(model.modules())
    assert ours < of_gradients + 2 * largest + 16 * 2**20
    assert theirs > ours + 3 * largest


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
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
