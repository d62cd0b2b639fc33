"""Where the time of a recorded step went."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.reporting.step_time import OTHERS, kind_of, step_time

# Names as an H100 has recorded them.
KERNELS = {
    "nvjet_tst_128x64_64x9_2x4_h_bz_coopB_TNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>": "matrix products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>": "4-bit weights made dense",
    "_dequantize": "4-bit weights made dense",
    "_add_scaled": "our adapter kernels",
    "_add_logits": "head and loss",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>": (
        "copies and casts on the device"
    ),
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>": (
        "element-wise and norms"
    ),
    "_silu_mul": "element-wise and norms",
    "something new": OTHERS,
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kernels_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def event(cat: str, name: str, ts: float, dur: float, tid: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_of_a_gpu_kernels_count_and_the_time_without_any(tmp_path: Path) -> None:
    """Two side by side are busy once; copies on the device are no transfers."""
    trace = write(
        tmp_path,
        [
            event("kernel", "nvjet_a", 0, 4000),
            event("kernel", "nvjet_b", 3000, 2000, tid=1),
            event("kernel", "flash_fwd", 7000, 1000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1000, 6000, tid=2),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1000, 500, tid=2),
            event("cuda_runtime", "cudaGraphLaunch", 0, 10),
            event("cuda_runtime", "cudaLaunchKernelExC", 20, 10),
            event("cuda_runtime", "cudaMemcpyAsync", 40, 10),
            event("cpu_op", "aten::mm", 0, 9000),
            {"ph": "i", "name": "without a duration", "ts": 3},
        ],
    )
    assert step_time(trace, 10.0, 2) == {
        "wall_ms": 10.0,
        "busy_ms": 6.0,
        "idle_ms": 4.0,
        "copy_ms": 6.0,
        "kinds": {"matrix products": 6.0, "attention": 1.0},
        "num_kernels": 3,
        "num_launches": 2,
        "num_micro_batches": 2,
    }


def test_of_a_cpu_operators_count_without_those_inside(tmp_path: Path) -> None:
    trace = write(
        tmp_path,
        [
            event("cpu_op", "poros::lora", 0, 10_000),
            event("cpu_op", "aten::mm", 1000, 4000),
            event("cpu_op", "aten::copy_", 2000, 1000),
            event("cpu_op", "aten::mul", 6000, 1000),
            event("cpu_op", "aten::mm", 0, 2000, tid=1),
        ],
    )
    found = step_time(trace, 12.0, 1)
    assert found["kinds"] == {
        "matrix products": 5.0,
        "our adapter kernels": 5.0,
        "copies and casts on the device": 1.0,
        "element-wise and norms": 1.0,
    }
    assert (found["busy_ms"], found["idle_ms"], found["copy_ms"]) == (10.0, 2.0, 0.0)


def test_of_a_real_trace_the_parts_add_up(tmp_path: Path) -> None:
    """All operators on one thread: what each takes alone is what all take together, to the ns."""
    with torch.profiler.profile() as profile:
        layer = torch.nn.Linear(64, 64)
        layer(torch.randn(8, 64)).relu().sum().backward(inputs=[layer.weight])
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = step_time(tmp_path / "trace.json", 1000.0, 1)
    assert found["busy_ms"] == pytest.approx(sum(found["kinds"].values()), abs=1e-3)
    assert found["kinds"]["matrix products"] > 0 and found["num_kernels"] > 5
