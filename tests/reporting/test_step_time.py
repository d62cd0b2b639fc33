"""Where the time of a recorded step went."""

import json
from pathlib import Path
from typing import Any

import torch

from poros.reporting.step_time import step_time


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
        "num_kernels": 3,
        "num_launches": 2,
        "num_micro_batches": 2,
    }


def test_of_a_cpu_nothing_is_summed_up(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile:
        torch.randn(8, 64).relu().sum()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert step_time(tmp_path / "trace.json", 1000.0, 1) == {}
