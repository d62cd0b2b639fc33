"""Ctrl-C and a system's request to end: the run saves a checkpoint at the end of its step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAtStep(TrainerCallback):
    """Ends the run, with a checkpoint, at the end of the step in which it was asked to.

    Attributes:
        was_asked: Whether it was.
    """

    def __init__(self) -> None:
        self.was_asked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.was_asked:
            control.should_save = control.should_training_stop = True
        return control

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals in the body; a second one interrupts at once, as ever."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in _SIGNALS}

        def ask(number: int, frame: Any) -> None:
            self.was_asked = True
            for each, handler in before.items():
                signal.signal(each, handler)

        for each in _SIGNALS:
            signal.signal(each, ask)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
