"""What a run shows while it trains: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from poros.telemetry import PREFIX


class Panel(TrainerCallback):
    """Shows step, loss, tokens a second, the time that is left, wire, stall and memory.

    Args:
        show: Takes a line that stays.
        num_tokens: Gives the tokens so far.

    Attributes:
        num_steps: Done in this start of the run.
        seconds: Since the first of them began.
    """

    def __init__(self, show: Callable[[str], None], num_tokens: Callable[[], int]) -> None:
        self._show = show
        self._num_tokens = num_tokens
        self._live: Any = None
        self._begun: tuple[float, int] | None = None
        self.num_steps = 0
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = (time.perf_counter(), state.global_step)
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(refresh_per_second=4)
            self._live.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or self._begun is None:
            return
        if "loss" in logs:
            line = self._line(state, logs)
        elif "eval_loss" in logs:
            line = f"step {state.global_step}: validation loss {logs['eval_loss']:.4f}"
            if self._live is not None:
                self._live.console.print(line)
                return
        else:
            return
        if self._live is None:
            self._show(line)
        else:
            self._live.update(line)

    def _line(self, state: Any, logs: dict[str, Any]) -> str:
        begun, first = self._begun or (0.0, 0)
        self.seconds = time.perf_counter() - begun
        self.num_steps = done = state.global_step - first
        parts = [f"step {state.global_step}/{state.max_steps}", f"loss {float(logs['loss']):.4f}"]
        if done and self.seconds:
            parts.append(f"{self._num_tokens() / self.seconds:,.0f} tokens/s")
            left = (state.max_steps - state.global_step) * self.seconds / done
            parts.append(f"{duration(left)} left")
        wire = logs.get(f"{PREFIX}h2d_gb_per_s")
        if wire:
            parts.append(f"wire {wire:.1f} GB/s")
        stall = logs.get(f"{PREFIX}stall_ms")
        if stall is not None:
            parts.append(f"waited {stall:.0f} ms")
        peak = logs.get(f"{PREFIX}peak_gb")
        if peak:
            parts.append(f"GPU {peak:.2f} GB")
        return ", ".join(parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def duration(seconds: float) -> str:
    """In words: ``3 s``, ``12 min``, ``4.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
