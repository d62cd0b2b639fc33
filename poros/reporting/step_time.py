"""Sums up where the time of a recorded step went: kernels, transfers, waits."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


def step_time(trace: Path, wall_ms: float, num_micro_batches: int) -> dict[str, float]:
    """Sum up a step that ``torch.profiler`` has recorded on a GPU.

    Args:
        trace: As the profiler writes it.
        wall_ms: What the step took, recorded as it was.
        num_micro_batches: That the step consists of.

    Returns:
        ``wall_ms``; ``busy_ms`` (some kernel ran) and ``idle_ms`` (none did: the GPU waited for the
        host or for a transfer); ``copy_ms`` (transfers from and to host memory, which run beside
        kernels); ``num_kernels``, ``num_launches`` (calls of the host that started kernels; one
        starts a whole CUDA graph) and ``num_micro_batches``. Empty if no kernel ran, as on a CPU.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    timed = [each for each in events if "dur" in each and "ts" in each]
    kernels = [each for each in timed if each.get("cat") == "kernel"]
    if not kernels:
        return {}
    busy_ms = _covered(kernels) / 1000
    moved = [each for each in timed if each.get("cat") == "gpu_memcpy"]
    copies = [each for each in moved if "DtoD" not in str(each["name"])]
    calls = [each for each in timed if each.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "wall_ms": wall_ms,
        "busy_ms": busy_ms,
        "idle_ms": max(0.0, wall_ms - busy_ms),
        "copy_ms": sum(each["dur"] for each in copies) / 1000,
        "num_kernels": len(kernels),
        "num_launches": sum(str(each["name"]).startswith(_LAUNCHES) for each in calls),
        "num_micro_batches": num_micro_batches,
    }


def _covered(events: Iterable[Event]) -> float:
    """Return how long at least one of some events ran, in microseconds."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each["ts"]):
        last = event["ts"] + event["dur"]
        total += max(0.0, last - max(end, event["ts"]))
        end = max(end, last)
    return total
