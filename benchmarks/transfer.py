"""The rate of block copies while the wire is the bottleneck, beside plain copies in the same run.

Every copy of a streamed step is framed by two events on the copy stream. The achieved rate of a
phase is the bytes of its copies over the time from the start of the first to the end of the last,
so waiting between copies counts, and the turn of the step does not: there the next block has no
free slot, whoever copies. The plain rate is that of the same host bytes into the same memory, one
copy after the other, with nothing else on the device, framed in the same way.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import poros
from benchmarks import memory
from benchmarks.loops import make_optimizer
from benchmarks.report import Summary, TextRow, numbers, percentiles
from benchmarks.work import Work, batch_of
from poros.api import prepare_with
from poros.cuda_streams import CudaStreams
from poros.eager_streams import EagerStreams
from poros.streams import Event, gb_per_s

COLUMNS = (
    *("model", "quantization", "layers", "batch", "seq", "rank", "pass", "kind", "step", "phase"),
    *("num_copies", "num_bytes", "ms", "copying_ms", "step_ms", "runtime_gb_per_s", "stall_ms"),
)
"""One row per phase of a warm step (kind "poros") and per series of plain copies (kind "plain").
``ms`` runs from the first copy's start to the last one's end, ``copying_ms`` is the sum over the
copies; ``runtime_gb_per_s`` and ``stall_ms`` are the runtime's own figures, where it has them."""


@dataclass
class _Copy:
    """One copy: its bytes, and two points in time."""

    num_bytes: int
    block: int
    began: Any
    ended: Any


class TimedCudaStreams(CudaStreams):
    """CUDA streams whose copies are framed by events with times."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: list[_Copy] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._copies()
        # Behind the wait for the slot: waiting for it is not copying, but it is between copies.
        stream.wait_event(after)
        began.record(stream)
        event = super().copy(target, source, after=after)
        ended.record(stream)
        self.copies.append(_Copy(source.numel(), source.data_ptr(), began, ended))
        return event


class TimedEagerStreams(EagerStreams):
    """The streams of a CPU, with times."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: list[_Copy] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        began = time.perf_counter()
        event = super().copy(target, source, after=after)
        ended = time.perf_counter()
        self.copies.append(_Copy(source.numel(), source.data_ptr(), began, ended))
        return event


def measure(
    model: Any, device: torch.device, work: Work, schedule: Any, shape: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Train with two slots, and copy the same slabs plainly before and after, every pass."""
    is_cuda = device.type == "cuda"
    streams: Any = TimedCudaStreams(device) if is_cuda else TimedEagerStreams(device)
    policy = poros.StreamingPolicy(device=str(device), slots=2, self_check="off")
    prepare_with(model, policy, streams=streams)
    rows: list[dict[str, Any]] = []
    try:
        runtime = poros.runtime(model)
        blocks = {runtime.host_slab(block).data_ptr(): block for block in range(runtime.num_blocks)}
        batch = batch_of(model.config.vocab_size, work, device)
        optimizer = make_optimizer(model)
        model.train()
        for number in range(schedule.passes):
            phase_rows = [_plain(runtime, device, is_cuda)]
            for step in range(schedule.warm + schedule.steps):
                streams.copies.clear()
                took = _step(model, batch, optimizer, device)
                if step >= schedule.warm:
                    for row in _phases(streams.copies, blocks, is_cuda):
                        phase_rows.append(row | {"step": step - schedule.warm, "step_ms": took})
            own = _own_figures(runtime)
            for row in phase_rows:
                if row["kind"] == "poros":
                    row |= own
            phase_rows.append(_plain(runtime, device, is_cuda))
            common = {**shape, "batch": work.batch_size, "seq": work.seq_len, "pass": number}
            rows += [common | row for row in phase_rows]
    finally:
        poros.restore(model)
    return rows


def summarize(rows: Sequence[TextRow]) -> list[Summary]:
    """One line per phase, with its share of the plain rate."""
    plain = [_rate(row) for row in rows if row["kind"] == "plain"]
    plain_middle, plain_low, _ = percentiles(plain)
    lines = []
    for phase in ("forward", "backward", "with the turn"):
        own = [row for row in rows if row["phase"] == phase]
        if not own:
            continue
        middle, low, _ = percentiles([_rate(row) for row in own])
        alone = [_rate(row, "copying_ms") for row in own]
        line = {
            "phase": phase,
            "copies": own[0]["num_copies"],
            "GB": f"{float(own[0]['num_bytes']) / 1e9:.3f}",
            "plain GB/s": f"{plain_middle:.2f}",
            "plain p10": f"{plain_low:.2f}",
            "achieved GB/s": f"{middle:.2f}",
            "achieved p10": f"{low:.2f}",
            "each copy GB/s": f"{statistics.median(alone):.2f}",
            "share of plain": f"{middle / plain_middle:.1%}",
            "step ms": f"{statistics.median(numbers(own, 'step_ms')):.1f}",
        }
        for name, key in (("runtime GB/s", "runtime_gb_per_s"), ("stall ms", "stall_ms")):
            values = numbers(own, key)
            line[name] = f"{statistics.median(values):.2f}" if values else ""
        lines.append(line)
    return lines


def _rate(row: TextRow, time: str = "ms") -> float:
    return gb_per_s(float(row["num_bytes"]), float(row[time]))


def _step(model: Any, batch: Any, optimizer: Any, device: torch.device) -> float:
    memory.synchronize(device)
    began = time.perf_counter()
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    memory.synchronize(device)
    return (time.perf_counter() - began) * 1e3


def _phases(
    copies: Sequence[_Copy], blocks: Mapping[int, int], is_cuda: bool
) -> list[dict[str, Any]]:
    """The step's copies split at the turn: blocks go up in forward and down in backward.

    All of them together are a third row, which has the gap at the turn in it.
    """
    numbered = [blocks[copy.block] for copy in copies]
    turn = next((n for n in range(1, len(copies)) if numbered[n] <= numbered[n - 1]), len(copies))
    rows = []
    phases = {"forward": copies[:turn], "backward": copies[turn:], "with the turn": copies}
    for phase, own in phases.items():
        if own:
            rows.append({"kind": "poros", "phase": phase, **_span(own, is_cuda)})
    return rows


def _span(copies: Sequence[_Copy], is_cuda: bool) -> dict[str, Any]:
    def between(begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if is_cuda else (end - begin) * 1e3

    return {
        "num_copies": len(copies),
        "num_bytes": sum(copy.num_bytes for copy in copies),
        "ms": between(copies[0].began, copies[-1].ended),
        "copying_ms": sum(between(copy.began, copy.ended) for copy in copies),
    }


def _plain(runtime: Any, device: torch.device, is_cuda: bool) -> dict[str, Any]:
    """All slabs once, on a stream of their own, queued ahead of time."""
    slabs = [runtime.host_slab(block) for block in range(runtime.num_blocks)]
    streams: Any = TimedCudaStreams(device) if is_cuda else TimedEagerStreams(device)
    target = streams.allocate(max(map(len, slabs)))
    memory.synchronize(device)
    after = streams.record()
    for slab in slabs:
        streams.copy(target[: len(slab)], slab, after=after)
    memory.synchronize(device)
    return {"kind": "plain", **_span(streams.copies, is_cuda)}


def _own_figures(runtime: Any) -> dict[str, Any]:
    stats = runtime.stats()
    named = {"runtime_gb_per_s": "h2d_gb_per_s", "stall_ms": "stall_ms"}
    return {name: stats[key] for name, key in named.items() if stats.get(key) is not None}
