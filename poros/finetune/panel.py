"""What is shown while a run trains: a panel on a terminal, plain lines elsewhere."""

import time
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from poros.reporting.telemetry import PREFIX
from poros.utils.formatting import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_PLAIN_EVERY_S = 10.0
"""Without a terminal a line comes that often, and for the first and the last step."""
_ORDER = ("step", "loss", "validation", "tokens/s", "left", "wire", "stall", "VRAM")
_SMOOTHING = 0.1
"""The weight of the newest step in the time of a step."""


class Panel(TrainerCallback):
    """Shows step, loss, tokens a second, time left, wire, stall and memory.

    Args:
        console: Where to.
        num_steps: Of the run.
    """

    def __init__(self, console: "Console", num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live: Live | None = None
        self._known: dict[str, str] = {}
        self._shown_at = -_PLAIN_EVERY_S
        self._logged_at = 0.0
        self._num_tokens = 0.0
        self._step = 0
        self._step_s: float | None = None
        self._is_first = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the panel."""
        self._step = state.global_step
        self._logged_at = time.monotonic()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
            self._live.update(self._table())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show what was logged."""
        if not logs:
            return
        if "eval_loss" in logs:
            self._known["validation"] = f"loss {logs['eval_loss']:.4f}"
            self._show(is_forced=True)
        if "loss" not in logs:
            return
        now = time.monotonic()
        elapsed, self._logged_at = now - self._logged_at, now
        num_done, self._step = state.global_step - self._step, state.global_step
        # The first step is checked, and a GPU warms up: it says little of those that follow.
        if not self._is_first and num_done:
            each = elapsed / num_done
            before = self._step_s
            self._step_s = each if before is None else before + _SMOOTHING * (each - before)
        self._fill(logs, elapsed)
        self._is_first = False
        self._show(is_forced=state.global_step in (1, self._num_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the panel."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, whatever happened."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _fill(self, logs: dict[str, Any], elapsed: float) -> None:
        values = self._known
        values["step"] = f"{self._step} of {self._num_steps}"
        values["loss"] = f"{logs['loss']:.4f}"
        num_tokens = float(logs.get("num_tokens", 0))
        # A run that goes on counts its tokens anew.
        fresh = num_tokens - self._num_tokens if num_tokens > self._num_tokens else num_tokens
        self._num_tokens = num_tokens
        if elapsed > 0 and fresh:
            values["tokens/s"] = f"{fresh / elapsed:,.0f}"
        if self._step_s is not None:
            values["left"] = duration(self._step_s * (self._num_steps - self._step))
        if f"{PREFIX}h2d_gb" in logs:
            rate = logs[f"{PREFIX}h2d_gb_per_s"]
            values["wire"] = f"{rate:.1f} GB/s" if rate else "idle"
            stall = logs[f"{PREFIX}stall_ms"] / (10 * elapsed) if elapsed > 0 else 0.0
            values["stall"] = f"{stall:.0f} %"
        if f"{PREFIX}peak_gb" in logs:
            values["VRAM"] = f"{logs[f'{PREFIX}peak_gb']:.1f} GB"

    @property
    def _values(self) -> dict[str, str]:
        """What is known so far, in order."""
        return {name: self._known[name] for name in _ORDER if name in self._known}

    def _show(self, *, is_forced: bool) -> None:
        if self._live is not None:
            self._live.update(self._table())
            return
        now = time.monotonic()
        if is_forced or now - self._shown_at >= _PLAIN_EVERY_S:
            self._shown_at = now
            line = "  ".join(f"{name} {value}" for name, value in self._values.items())
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _table(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        values = self._values or {
            "step": f"{self._step} of {self._num_steps}, the first is checked"
        }
        for _ in values:
            table.add_column(no_wrap=True)
        table.add_row(*(f"[dim]{name}[/dim]" for name in values))
        table.add_row(*values.values())
        whole = Table.grid()
        whole.add_row(ProgressBar(total=self._num_steps, completed=self._step, width=60))
        whole.add_row(table)
        return whole
