"""Operators of adapters in models on a GPU: streamed equals resident, LoRA equals PEFT, to the bit.

DoRA, grouped adapters and other orders of LoRA's products are within bounds of PEFT's modules.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, get_peft_model

import poros
from poros.config import LORA_ORDERS
from poros.gates import tiny
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch
from poros.kernels.use import patch
from tests.exact.writing import DTYPES, PROGRAMS
from tests.gpu.models import BF16, Model, assert_streamed, differing, gradients, model_of, same
from tests.unit import grouped_case, lora_case

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
    model = tiny.attach_lora(base, dropout=dropout).train()
    expected = gradients(model, autocast)
    poros.use_adapter_kernels(model)
    assert differing(gradients(model, autocast), expected) == []
    poros.restore(model)
    (stats,) = assert_streamed(model, expected, [{"slots": 2}], autocast=autocast)
    assert stats["num_fused_adapters"] > 0 and not stats["fallbacks"]
    if architecture in ("qwen2", "llama", "mistral") and not (autocast and dtype is FP32):
        assert stats["num_left_out_adapters"] == 2 * 3


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3"])
def test_dora_of_other_architectures(architecture: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, architecture, num_layers=3, dropout=0.1, **DORA)
    poros.use_adapter_kernels(model)
    expected = gradients(model)
    poros.restore(model)
    assert_streamed(model, expected, [{"slots": 2}])


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_writable_as_those_of_peft(
    program: str, dtypes: tuple[torch.dtype, torch.dtype], quantize: bool, tmp_path: Path
) -> None:
    """Programs that write to them in place: resident, streamed, and replayed where possible."""
    (architecture, options, change, is_recorded), (dtype, adapters) = PROGRAMS[program], dtypes
    model = model_of(
        tmp_path, architecture, dtype=dtype, quantize=quantize, num_layers=2, **options
    )
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.data = each.data.to(adapters)
    change(model)
    plain = gradients(model)
    of_lora = () if "use_dora" in options else ("grouped",)
    for kernels in ("fused", "exact", *of_lora):
        poros.use_adapter_kernels(model, kernels)
        resident = gradients(model)
        poros.restore(model)
        policy = {"adapter_kernels": kernels, "cuda_graphs": True}
        (stats,) = assert_streamed(model, resident, [policy], repeats=6)
        assert stats["self_check"] == "passed"
        # Falcon's layers are not recorded on a GPU.
        assert (stats["num_replayed_visits"] > 0) == (is_recorded and architecture != "falcon")
        if kernels == "exact" or (kernels == "fused" and "use_dora" not in options):
            assert differing(resident, plain) == [], kernels


@pytest.mark.parametrize(("bias", "scaling"), [(False, 1.0), (True, 2.0 / 3.0)])
@pytest.mark.parametrize("rank", [8, 64, 512])
@pytest.mark.parametrize("size", lora_case.SIZES)
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_every_order_is_within_its_bound(
    kind: str, size: str, rank: int, bias: bool, scaling: float
) -> None:
    case = lora_case.Case(kind, size, rank, bias, scaling, device="cuda")
    for order in LORA_ORDERS:
        assert max(lora_case.excess(case, order, case.run(order))) <= 1, order


@pytest.fixture
def _one_rounding() -> Any:
    """Products are written once: no parts of them are reduced in 16 bits, and none is in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision
    matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision = False, "ieee"
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.fp32_precision = before


@pytest.mark.usefixtures("_one_rounding")
@DTYPE
def test_grouped_results_and_gradients_are_within_their_bounds(dtype: torch.dtype) -> None:
    case = grouped_case.Case.random(dtype, "cuda")
    exact = grouped_case.exact_case(dtype, "cuda")
    results, found = case.run()
    assert max(grouped_case.result_shares(case, results)) <= 1
    assert max(grouped_case.gradient_shares(case, found)) <= 1
    assert grouped_case.result_shares(exact, exact.run()[0]) == [0.0]
    off = exact._replace(scalings=[each * (1 + 2.0**-6) for each in exact.scalings])
    assert min(grouped_case.result_shares(exact, off.run()[0])) > 1  # a control


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


def peak(model: Model, num_tokens: int) -> int:
    gradients(model, num_tokens=num_tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(model, num_tokens=num_tokens)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_of_dora_nothing_is_as_large_as_the_weight_but_one_weight(
    dropout: float, tmp_path: Path
) -> None:
    """With few tokens: the peak beyond the gradients is one dense projection and small change."""
    model = model_of(tmp_path, num_layers=3, hidden_size=2048, dropout=dropout, **DORA)
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
