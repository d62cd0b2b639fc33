"""Sums up where the time of a recorded step went: kernels by kind, transfers, waits."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

KINDS = {
    "attention": r"flash|fmha|attention|softmax_warp",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|wgmma|splitk|::(add|b)?mm\b|::linear|matmul",
    "4-bit weights made dense": r"dequant",
    "our adapter kernels": r"_add_scaled|_scale\b|_masked|_compose|row_norm|_square|_assemble"
    r"|_without_product|_multiply\b|poros::(lora|dora)",
    "head and loss": r"_add_logits|log_softmax|nll_loss|cross_entropy",
    "optimizer": r"multi_tensor_apply|adam|lpnorm",
    "copies and casts on the device": r"copy|::(to|_to_copy|clone|contiguous)\b|CatArray",
    "element-wise and norms": r"elementwise|reduce|norm|silu|swiglu|rotary|rope|triton"
    r"|::(add|mul|sub|div|neg|pow|rsqrt|mean|sum|sigmoid|exp|where)_?\b",
}
"""Patterns of the names of kernels, or of a CPU's operators; the first that fits decides."""
OTHERS = "everything else"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


def step_time(trace: Path, wall_ms: float, num_micro_batches: int) -> dict[str, Any]:
    """Sum up a step that ``torch.profiler`` has recorded.

    Args:
        trace: As the profiler writes it.
        wall_ms: What the step took, recorded as it was.
        num_micro_batches: That the step consists of.

    Returns:
        ``wall_ms``; ``busy_ms`` (some kernel ran on the GPU) and ``idle_ms`` (none did: the GPU
        waited for the host or for a transfer); ``copy_ms`` (transfers from and to host memory,
        which run beside kernels); ``kinds`` (time of kernels by kind, the longest first; kernels
        that ran side by side count each); ``num_kernels``, ``num_launches`` (calls of the host that
        started kernels; one starts a whole CUDA graph) and ``num_micro_batches``. On a CPU
        operators take the place of kernels, each without the operators inside it, and there are no
        transfers and no launches.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    timed = [each for each in events if "dur" in each and "ts" in each]
    of = {kind: [each for each in timed if each.get("cat") == kind] for kind in _CATEGORIES}
    is_gpu = bool(of["kernel"])
    ran = [(each, each["dur"]) for each in of["kernel"]] if is_gpu else list(_alone(of["cpu_op"]))
    kinds: defaultdict[str, float] = defaultdict(float)
    for event, duration in ran:
        kinds[kind_of(str(event["name"]))] += duration / 1000
    busy_ms = _covered([event for event, _ in ran]) / 1000
    copies = [each for each in of["gpu_memcpy"] if "DtoD" not in str(each["name"])]
    calls = of["cuda_runtime"] + of["cuda_driver"]
    return {
        "wall_ms": wall_ms,
        "busy_ms": busy_ms,
        "idle_ms": max(0.0, wall_ms - busy_ms),
        "copy_ms": sum(each["dur"] for each in copies) / 1000,
        "kinds": dict(sorted(kinds.items(), key=lambda each: -each[1])),
        "num_kernels": len(ran),
        "num_launches": sum(str(each["name"]).startswith(_LAUNCHES) for each in calls),
        "num_micro_batches": num_micro_batches,
    }


_CATEGORIES = ("kernel", "gpu_memcpy", "cuda_runtime", "cuda_driver", "cpu_op")
"""Of the profiler's events, as far as they are read here."""


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator of that name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHERS)


def _covered(events: Iterable[Event]) -> float:
    """Return how long at least one of some events ran, in microseconds."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each["ts"]):
        last = event["ts"] + event["dur"]
        total += max(0.0, last - max(end, event["ts"]))
        end = max(end, last)
    return total


def _alone(operators: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield operators with the microseconds that none inside them took."""

    def thread(event: Event) -> str:
        return f"{event.get('pid')} {event.get('tid')}"

    for _, own in groupby(sorted(operators, key=thread), thread):
        around: list[list[Any]] = []  # operators that have not ended, and what is left of each
        for event in sorted(own, key=lambda each: (each["ts"], -each["dur"])):
            while around and around[-1][0]["ts"] + around[-1][0]["dur"] <= event["ts"]:
                yield tuple(around.pop())
            if around:
                around[-1][1] -= event["dur"]
            around.append([event, event["dur"]])
        for left in reversed(around):
            yield tuple(left)
