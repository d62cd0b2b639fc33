"""What streaming does during training, in the Trainer's own logs and in a file of events."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from poros import __version__
from poros.api import runtime
from poros.model.runtime import Runtime

if TYPE_CHECKING:
    from transformers import Trainer

    from poros.planning.formula import MemoryPlan

PREFIX = "poros/"


def log_streaming(trainer: "Trainer", events: str | os.PathLike[str] | None = None) -> None:
    """Have a Trainer log what streaming has done since its last log.

    With the Trainer's own values, so wherever those go (TensorBoard, the progress bar, the log
    history): ``poros/h2d_gb`` and ``poros/h2d_gb_per_s`` (moved to the device, and the rate of the
    copies that are complete), ``poros/stall_ms`` (for how long the device waited for them),
    ``poros/num_loads``, ``poros/num_hits``, ``poros/disk_stall_ms``, ``poros/peak_gb`` (allocated
    on the device so far; GPUs only). GB is 1e9 bytes.

    Args:
        trainer: Of a prepared model.
        events: A file to which one JSON object per line is appended: first versions, policy and
            sizes, then what was logged at each step, with the plan where it is new.

    Streams:
        Reads counters on the host, and events; waits for nothing.

    Raises:
        PreparedModelError: If the model is not prepared.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    callback = _Telemetry(runtime(model), None if events is None else Path(events))
    # Before the callbacks that hand the values on.
    trainer.callback_handler.callbacks.insert(0, callback)


class _Telemetry(TrainerCallback):
    def __init__(self, runtime: Runtime, events: Path | None) -> None:
        self._runtime = runtime
        self._events = events
        self._last = runtime.stats()
        self._plan: MemoryPlan | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = self._runtime.stats()
        self._write(_start(self._runtime))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return  # evaluations and the summary at the end are logged as well
        now, last = self._runtime.stats(), self._last
        keys = ("num_loads", "num_hits", "stall_ms", "disk_stall_ms")
        values = {key: now[key] - last[key] for key in keys}
        values["h2d_gb"] = (now["h2d_num_bytes"] - last["h2d_num_bytes"]) / 1e9
        values["h2d_gb_per_s"] = now["h2d_gb_per_s"]
        device = self._runtime.device
        if device.type == "cuda":
            values["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        self._last = now
        named = {f"{PREFIX}{key}": value for key, value in values.items()}
        logs.update(named)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(named)
        event = {"event": "log", "step": state.global_step, **logs}
        if self._runtime.plan is not self._plan and self._runtime.plan is not None:
            event["plan"] = self._runtime.plan.as_dict()
        self._plan = self._runtime.plan
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self._events is None:
            return
        with self._events.open("a") as file:
            file.write(json.dumps(event, default=str) + "\n")


def _start(runtime: Runtime) -> dict[str, Any]:
    import bitsandbytes
    import peft
    import transformers

    return {
        "event": "start",
        "versions": {
            "poros": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "bitsandbytes": bitsandbytes.__version__,
        },
        "device": str(runtime.device),
        "policy": vars(runtime.policy),
        "num_blocks": runtime.num_blocks,
        **runtime.stats(),
    }
