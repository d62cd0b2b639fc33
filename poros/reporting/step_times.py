"""Sums up where the time of a recorded step went, from a trace of ``torch.profiler``."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "splitk", "cublas"),
    "weights from 4 bit": ("dequantize",),
}
"""Parts of kernel names by kind; the first kind that fits counts."""
OTHERS = "element-wise and other kernels"


def step_times(trace: Path) -> dict[str, float]:
    """Sum up a step: what the GPU computed and copied, how long it was idle, and the launches.

    Args:
        trace: A trace that ``torch.profiler`` wrote.

    Returns:
        In ms: ``wall``, from the first event to the last; the kernels of each kind that there are;
        ``kernels``, the time in which at least one ran; ``idle``, the rest of the wall; ``copies
        to the GPU``, by a copy engine, while kernels run or not. And ``launches``, a number. Of a
        step on a CPU the wall alone.
    """
    found = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    events = [each for each in found if each.get("ph") == "X" and "dur" in each]
    times: dict[str, float] = defaultdict(float)
    begin = min((float(each["ts"]) for each in events), default=0.0)
    end = max((float(each["ts"]) + float(each["dur"]) for each in events), default=0.0)
    times["wall"] = (end - begin) / 1000
    kernels = [each for each in events if each.get("cat") == "kernel"]
    if not kernels:
        return dict(times)
    for each in kernels:
        times[_kind_of(str(each["name"]))] += float(each["dur"]) / 1000
    times["kernels"] = _num_us_with_any(kernels) / 1000
    times["idle"] = times["wall"] - times["kernels"]
    copies = [each for each in events if "HtoD" in str(each["name"])]
    times["copies to the GPU"] = sum(float(each["dur"]) for each in copies) / 1000
    launches = [each for each in events if str(each.get("cat", "")).startswith("cuda_")]
    times["launches"] = sum("Launch" in str(each["name"]) for each in launches)
    return dict(times)


def _kind_of(name: str) -> str:
    lower = name.lower()
    return next(
        (kind for kind, words in _KINDS.items() if any(word in lower for word in words)), OTHERS
    )


def _num_us_with_any(events: list[dict[str, Any]]) -> float:
    """Return the time in which at least one of the events ran, in microseconds."""
    total, until = 0.0, float("-inf")
    for begin, length in sorted((float(each["ts"]), float(each["dur"])) for each in events):
        total += max(0.0, begin + length - max(begin, until))
        until = max(until, begin + length)
    return total
