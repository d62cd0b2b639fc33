"""Logs streaming during training, in the Trainer's logs and in a file of events."""

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from poros.api import runtime
from poros.io.writing import writing
from poros.model.runtime import Runtime
from poros.reporting.step_times import step_times
from poros.utils.versions import library_versions

if TYPE_CHECKING:
    from transformers import Trainer

    from poros.planning.formula import MemoryPlan

logger = logging.getLogger(__name__)

PREFIX = "poros/"


def log_streaming(
    trainer: "Trainer",
    events: str | os.PathLike[str] | None = None,
    *,
    trace_step: int | None = None,
) -> None:
    """Add what streaming has done since the last log to a Trainer's logs.

    The values go wherever the Trainer's own values go (TensorBoard, the progress bar, the log
    history): ``poros/h2d_gb`` and ``poros/h2d_gb_per_s`` (copied to the device, and the rate of the
    completed copies), ``poros/stall_ms`` (time for which the device waited for them),
    ``poros/num_loads``, ``poros/num_hits``, ``poros/disk_stall_ms``, ``poros/peak_gb`` (peak of the
    allocated device memory so far; GPUs only), ``poros/tokens_per_s`` (if the Trainer logs
    ``num_tokens``; not in the first log of a start). GB is 1e9 bytes.

    Args:
        trainer: A Trainer of a prepared model.
        events: File to which one JSON object per line is appended: first versions, policy and
            sizes, then the log of each step, with the plan if it is new, evaluations, and at the
            end all counters and the result of the self-check. ``poros report`` draws it.
        trace_step: Optimizer step, counted from this start, that ``torch.profiler`` records into
            ``step_trace.json`` beside ``events``, which it needs. This step takes longer; where its
            time went is logged and written to ``events``.

    Streams:
        Reads counters on the host, and events; waits for nothing.

    Raises:
        PreparedModelError: If the model is not prepared.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    callback = _Telemetry(runtime(model), None if events is None else Path(events), trace_step)
    # Before the callbacks that pass the values on.
    trainer.callback_handler.callbacks.insert(0, callback)


class _Telemetry(TrainerCallback):
    def __init__(self, runtime: Runtime, events: Path | None, trace_step: int | None) -> None:
        self._runtime = runtime
        self._events = events
        self._trace_step = trace_step
        self._num_steps = 0
        self._profile: torch.profiler.profile | None = None
        self._last = runtime.stats()
        self._counted: tuple[float, float] | None = None  # tokens, and the time
        self._plan: MemoryPlan | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        runtime = self._runtime
        self._last = runtime.stats()
        about: dict[str, Any] = {"device": str(runtime.device), "policy": vars(runtime.policy)}
        about |= {"versions": library_versions(), "num_blocks": runtime.num_blocks}
        self._write({"event": "start", **about, **self._last})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps == self._trace_step and self._events is not None:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        profile, self._profile = self._profile, None
        if profile is None or self._events is None:
            return
        profile.stop()
        file = self._events.with_name("step_trace.json")
        profile.export_chrome_trace(str(file))
        times = step_times(file)
        said = ", ".join(f"{name} {value:,.0f}" for name, value in times.items())
        logger.info("poros: step %d was recorded; ms and launches: %s", state.global_step, said)
        self._write({"event": "step", "step": state.global_step, "times": times})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check = self._runtime.self_check
        counts = self._runtime.stats()
        self._write({"event": "end", "step": state.global_step, "check": check, **counts})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        if "eval_loss" in logs:
            self._write({"event": "evaluation", "step": state.global_step, **logs})
        if "loss" not in logs:
            return  # evaluations and the summary at the end are logged as well
        now, last = self._runtime.stats(), self._last
        keys = ("num_loads", "num_hits", "stall_ms", "disk_stall_ms")
        values = {key: now[key] - last[key] for key in keys}
        values["h2d_gb"] = (now["h2d_num_bytes"] - last["h2d_num_bytes"]) / 1e9
        values["h2d_gb_per_s"] = now["h2d_gb_per_s"]
        device = self._runtime.device
        if device.type == "cuda":
            values["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        if "num_tokens" in logs:
            counted = (float(logs["num_tokens"]), time.monotonic())
            if self._counted is not None:
                tokens, seconds = (b - a for a, b in zip(self._counted, counted, strict=True))
                values["tokens_per_s"] = tokens / max(seconds, 1e-9)
            self._counted = counted
        self._last = now
        named = {f"{PREFIX}{key}": value for key, value in values.items()}
        logs.update(named)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(named)
        event = {"event": "log", "step": state.global_step, **logs}
        plan = self._runtime.plan
        if plan is not None and plan is not self._plan:
            event |= {"plan": plan.as_dict(), "budget": self._runtime.sizer.budget}
        self._plan = plan
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self._events is None:
            return
        line = json.dumps({**event, "time": time.time()}, default=str) + "\n"
        with writing(self._events), self._events.open("a") as file:
            # The process that wrote the line before may have been killed within it.
            is_behind = event["event"] == "start" and file.tell() > 0
            file.write("\n" * is_behind + line)
