"""Ctrl-C where it is wanted: at one step of Python after another."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parents[1]
_OURS = tuple(f"{_ROOT}/{each}/" for each in ("poros", "loaders", "gates", "tests"))


class Interrupts:
    """Runs something and interrupts it at a chosen step, as the handler of a signal would.

    Args:
        at: Number of the step, counted from 1; None counts only.
        files: Ends of the names of source files whose steps count.
        fine: Whether to count the steps of the interpreter instead of lines.
    """

    def __init__(self, at: int | None, files: tuple[str, ...], fine: bool = False) -> None:
        self.num_steps = 0
        self._at = at
        self._files = files
        self._kind = "opcode" if fine else "line"

    def run(self, action: Callable[[], Any]) -> bool:
        """Whether ``action`` was interrupted."""
        # What is interrupted as it is collected is reported there, by code that would be traced.
        report, sys.unraisablehook = sys.unraisablehook, lambda _: None
        if self._kind == "opcode":
            # Python 3.12 looks for a frame that wants these events when tracing is switched on, and
            # until it has seen one gives none.
            sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            next(_in_a_generator(action))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            sys.unraisablehook = report
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._counts(frame):
            return None
        frame.f_trace_opcodes = self._kind == "opcode"
        return self._step

    def _counts(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        if not name.endswith("contextlib.py"):
            return name.endswith(self._files)
        # What a library's own context managers leave behind is not for Poros to mend.
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename.endswith("contextlib.py"):
            caller = caller.f_back
        is_ours = caller is not None and caller.f_code.co_filename.startswith(_OURS)
        return is_ours and "contextlib.py" in self._files

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._kind:
            self.num_steps += 1
            if self.num_steps == self._at:
                raise KeyboardInterrupt
        return self._step


def _in_a_generator(action: Callable[[], Any]) -> Iterator[Any]:
    """``action()``; what it leaves as the exception being handled ends with it.

    An exception that a trace function raises at the end of an ``except`` leaves the handled one in
    ``sys.exc_info()``, for the rest of the thread. A generator has a place of its own for it.
    """
    yield action()
