"""Ends a run between two steps when a signal comes."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from poros.finetune.checkpoints import note_best

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping(TrainerCallback):
    """Ends a run at the next step, with a checkpoint, when a signal comes."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for the body; a second one acts as it always does."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = {each: signal.signal(each, self._came) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint of a run that goes on, wherever its folder is now."""
        note_best(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.signal is not None:
            control.should_save = control.should_training_stop = True
        return control

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
