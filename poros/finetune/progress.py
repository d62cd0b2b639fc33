"""Shows the progress of a training run: a bar on a terminal, plain lines elsewhere."""

import io
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import TrainerCallback

from poros.reporting.telemetry import PREFIX

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_EVERY_S = 10.0
"""Without a terminal a line is printed that often, and for the first and the last step."""
_BAR = "step {n_fmt} of {total_fmt} |{bar}| {remaining} left{postfix}"
_PLAIN = "step {n_fmt} of {total_fmt}, {remaining} left{postfix}"


class Progress(TrainerCallback):
    """Shows step, time left, loss, tokens per second, bus rate, stall and memory.

    Args:
        console: The output. Without a terminal, lines without control characters are printed.
    """

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._bar: tqdm[Any] | None = None
        self._postfix: dict[str, str] = {}
        self._shown_at = -_PLAIN_EVERY_S
        self._logged_at = 0.0
        self._num_tokens = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar; a resumed run begins at its checkpoint's step."""
        self._logged_at = time.monotonic()
        is_terminal = self._console.is_terminal
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            file=self._console.file if is_terminal else io.StringIO(),
            dynamic_ncols=is_terminal,
            bar_format=_BAR if is_terminal else _PLAIN,
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the logged values."""
        if self._bar is None or not logs:
            return
        if "eval_loss" in logs:
            self._postfix["validation"] = f"{logs['eval_loss']:.4f}"
            self._show(self._bar, is_forced=True)
        if "loss" in logs:
            now = time.monotonic()
            self._add(logs, now - self._logged_at)
            self._logged_at = now
            self._bar.update(state.global_step - self._bar.n)
            self._show(self._bar, is_forced=state.global_step in (1, state.max_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Leave the terminal usable; may be called again, and after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _add(self, logs: dict[str, Any], elapsed: float) -> None:
        values = self._postfix
        values["loss"] = f"{logs['loss']:.4f}"
        num_tokens = float(logs.get("num_tokens", 0))
        # A resumed run counts its tokens from zero.
        fresh = num_tokens - self._num_tokens if num_tokens > self._num_tokens else num_tokens
        self._num_tokens = num_tokens
        if elapsed > 0 and fresh:
            values["tokens/s"] = f"{fresh / elapsed:,.0f}"
        if f"{PREFIX}h2d_gb" in logs:
            rate = logs[f"{PREFIX}h2d_gb_per_s"]
            values["bus"] = f"{rate:.1f} GB/s" if rate else "idle"
            stall = logs[f"{PREFIX}stall_ms"] / (10 * elapsed) if elapsed > 0 else 0.0
            values["stall"] = f"{stall:.0f} %"
        if f"{PREFIX}peak_gb" in logs:
            values["VRAM"] = f"{logs[f'{PREFIX}peak_gb']:.1f} GB"

    def _show(self, bar: "tqdm[Any]", *, is_forced: bool) -> None:
        bar.set_postfix_str(", ".join(f"{name} {text}" for name, text in self._postfix.items()))
        now = time.monotonic()
        if not self._console.is_terminal and (is_forced or now - self._shown_at >= _PLAIN_EVERY_S):
            self._shown_at = now
            self._console.print(str(bar), markup=False, highlight=False, soft_wrap=True)
