"""The one protocol of all step tables.

One model object, made once, is trained by every arm from the same base bytes and the same adapter
bytes on the same synthetic tokens, with the same optimizer; arms take turns, ``passes`` times,
every other pass in reverse order. After ``warm`` steps the peaks are reset and ``steps`` are timed
one by one, the device synchronised before each reading of the clock; then the forward alone is
timed. The bits of every loss and of the adapters at the end are kept, to be compared between arms.

Each timed step becomes one row: see ``COLUMNS``. Tables are computed from these rows alone.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import memory
from benchmarks.arms import Arm, Placed
from benchmarks.forecast import add_forecasts, copy_rate
from benchmarks.loops import OPTIMIZER, NotPossibleError, optimizer_settings
from benchmarks.work import Work, batch_of, bits_of, digest
from poros.errors import VRAMBudgetError

Row = dict[str, Any]

_SHAPE = ("model", "quantization", "layers", "batch", "seq", "rank")
_PEAKS = ("peak_allocated", "peak_requested", "peak_reserved", "peak_process")
_HOST = ("host_rss", "host_anonymous", "host_shared", "pinned_num_bytes")
_PER_STEP = ("num_loads", "num_hits", "h2d_num_bytes", "rows_num_bytes", "head_num_bytes")
_WHEN_THERE = ("stall_ms", "disk_stall_ms")
_CHOSEN = ("vram_budget", "offload_boundaries", "stream_embedding", "stream_head", "cuda_graphs")
_POROS = ("block_size", "num_slots", "keep_last", *_CHOSEN, "loss")
COLUMNS = (
    *("case", "arm", *_SHAPE, "pass", "turn", "step", "ms", "forward_ms", "loss_bits"),
    *("adapters_start", "adapters_end", *_PEAKS, *_HOST, *_POROS, *_PER_STEP, *_WHEN_THERE),
    *("copy_gb_per_s", "runtime_gb_per_s", "planned_num_bytes", "forecast_ms", "note"),
)
"""Sizes in bytes; loads, hits, bytes moved and stalls per step; an arm that did not run has one
row with the reason in ``note``. ``copy_gb_per_s`` is the plain copy's, ``runtime_gb_per_s`` what
the runtime says of its own copies, where it does."""


@dataclass(frozen=True)
class Schedule:
    warm: int = 6
    """More than it takes until visits are replayed."""
    steps: int = 5
    passes: int = 2
    forwards: int = 3


@dataclass(frozen=True)
class Case:
    arm: Arm
    work: Work


class Clock:
    """Times the steps of one turn; the loops call ``begin`` and ``end``."""

    def __init__(
        self,
        device: torch.device,
        schedule: Schedule,
        placed: Placed,
        base: Mapping[str, int],
    ) -> None:
        self._device, self._schedule, self._placed, self._base = device, schedule, placed, base
        self._number = 0
        self._began = 0.0
        self._before: Mapping[str, Any] = {}
        self.steps: list[Row] = []
        self.measured: Row = {}

    def begin(self) -> None:
        memory.synchronize(self._device)
        if self._number == self._schedule.warm:
            memory.reset_peaks(self._device)
            self._before = self._counters()
        self._began = time.perf_counter()

    def end(self, loss: torch.Tensor) -> None:
        memory.synchronize(self._device)
        ms = (time.perf_counter() - self._began) * 1e3
        if self._number >= self._schedule.warm:
            step = self._number - self._schedule.warm
            self.steps.append({"step": step, "ms": ms, "loss_bits": bits_of(loss)})
        self._number += 1
        if self._number == self._schedule.warm + self._schedule.steps:
            self._finish()
        self._placed.check()

    def _finish(self) -> None:
        self.measured |= memory.device_peaks(self._device, self._base) | memory.host_memory()
        after = self._counters()
        for key in (*_PER_STEP, *_WHEN_THERE):
            if after.get(key) is not None:
                self.measured[key] = (after[key] - (self._before[key] or 0)) / self._schedule.steps
        if after:
            self.measured["pinned_num_bytes"] = after["pinned_num_bytes"]
            if after.get("h2d_gb_per_s") is not None:
                self.measured["runtime_gb_per_s"] = after["h2d_gb_per_s"]

    def _counters(self) -> Mapping[str, Any]:
        runtime = self._placed.runtime
        return {} if runtime is None else runtime.stats()


class Bench:
    """A model and how it is measured.

    Args:
        model: With adapters, on the CPU.
        device: Where arms train it.
        schedule: Steps and passes.
        shape: Of the model, for the rows: ``model``, ``quantization``, ``layers``, ``rank``.
    """

    def __init__(
        self, model: Any, device: torch.device, schedule: Schedule, shape: Mapping[str, Any]
    ) -> None:
        self.model, self.device, self.schedule, self.shape = model, device, schedule, dict(shape)
        self._start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._start_digest = digest(model)
        self._expected: dict[str, Any] = {"optimizer": "AdamW", **OPTIMIZER}

    def run(self, cases: Sequence[Case]) -> list[Row]:
        """Every case, in turns; see the module's docstring.

        Raises:
            RuntimeError: If an arm did not start from the same adapters, did not train all of
                them, or used another optimizer.
        """
        rows: list[Row] = []
        failed: set[int] = set()
        for number in range(self.schedule.passes):
            order = list(enumerate(cases))
            for turn, (index, case) in enumerate(order if number % 2 == 0 else order[::-1]):
                if index in failed:
                    continue
                turn_rows = self._turn(case)
                if "note" in turn_rows[0]:
                    failed.add(index)
                else:
                    median = statistics.median(row["ms"] for row in turn_rows)
                    print(f"pass {number} {_label(case)}: {median:.1f} ms", flush=True)
                known = {"case": index, "pass": number, "turn": turn, "arm": case.arm.name}
                known |= {"batch": case.work.batch_size, "seq": case.work.seq_len, **self.shape}
                known["loss"] = case.arm.policy.get("loss", "reference")
                rows += [known | row for row in turn_rows]
        rows.sort(key=lambda row: (row["case"], row["pass"]))
        add_forecasts(self.model, rows)
        return rows

    def _turn(self, case: Case) -> list[Row]:
        note = ""
        try:
            return self._measure(case)
        except (NotPossibleError, VRAMBudgetError, torch.OutOfMemoryError) as error:
            note = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        # Only now is the traceback gone, and with it what its frames held on the device.
        gc.collect()
        memory.empty(self.device)
        print(f"{_label(case)}: {note}", flush=True)
        return [{"note": note}]

    def _measure(self, case: Case) -> list[Row]:
        model = self.model
        model.load_state_dict(self._start, strict=False)
        model.train()
        torch.manual_seed(0)
        gc.collect()
        base = memory.empty(self.device)
        batch = batch_of(model.config.vocab_size, case.work, self.device)
        common: Row = {"adapters_start": digest(model)}
        if common["adapters_start"] != self._start_digest:
            raise RuntimeError(f"{_label(case)}: expected the adapters of the other arms")
        with case.arm.place(model, self.device) as placed:
            clock = Clock(self.device, self.schedule, placed, base)
            num_steps = self.schedule.warm + self.schedule.steps
            optimizer = case.arm.loop(model, batch, clock, num_steps)
            self._require_same(optimizer, num_steps, clock)
            common |= {**clock.measured, "adapters_end": digest(model)}
            del optimizer
            common["forward_ms"] = self._forward_ms(batch)
            common |= _poros_row(placed.runtime, case.arm.policy)
            if placed.runtime is not None:
                common["copy_gb_per_s"] = copy_rate(placed.runtime, self.device)
        gc.collect()
        return [{**common, **step} for step in clock.steps]

    def _forward_ms(self, batch: Mapping[str, torch.Tensor]) -> float:
        """The forward alone, to the end of its work on the device."""
        times = []
        for _ in range(self.schedule.forwards):
            memory.synchronize(self.device)
            began = time.perf_counter()
            loss = self.model(**batch).loss
            memory.synchronize(self.device)
            times.append((time.perf_counter() - began) * 1e3)
            loss.backward()
            self.model.zero_grad()
            del loss
        return statistics.median(times)

    def _require_same(self, optimizer: Any, num_steps: int, clock: Clock) -> None:
        if len(clock.steps) != self.schedule.steps:
            raise RuntimeError(f"expected {num_steps} steps of the loop, found another number")
        settings = optimizer_settings(optimizer)
        if settings != self._expected:
            raise RuntimeError(f"expected the optimizer {self._expected}, found {settings}")
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad != (name in self._start):
                raise RuntimeError(f"{name}: expected the same parameters to be trained")
            if not parameter.requires_grad:
                continue
            state = optimizer.state.get(parameter, {})
            if "exp_avg" not in state or not bool(state["exp_avg"].any()):
                raise RuntimeError(f"{name}: expected a gradient, found none in {num_steps} steps")


def _label(case: Case) -> str:
    return f"{case.arm.name} ({case.work.batch_size} x {case.work.seq_len})"


def _poros_row(runtime: Any, policy: Mapping[str, Any]) -> Row:
    if runtime is None:
        return {}
    num_kept = runtime.num_blocks - runtime.num_streamed_blocks
    size = runtime.policy.block_size
    row: Row = {"block_size": size, "num_slots": runtime.num_slots + num_kept}
    row["keep_last"] = min(runtime.room.keep_last, num_kept * size)
    for key in _CHOSEN:
        if policy.get(key) is not None:
            row[key] = policy[key]
    return row
