"""Ctrl-C where it is wanted: at one step of Python after another, and once more on its way out."""

import ctypes
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class Interrupts:
    """Runs something and interrupts it at chosen steps, as a signal's handler would.

    The interruption is queued when a step is traced and strikes where the interpreter looks for
    one next: at the start of a function or the end of a loop, wherever that is, also in a clean-up.

    Args:
        at: Numbers of steps, counted from 1.
        files: Ends of the names of source files whose steps count.
        functions: If given, only the steps of these functions count, by name.
        fine: Whether to count the steps of the interpreter instead of lines.
    """

    def __init__(
        self,
        at: Collection[int],
        files: tuple[str, ...],
        functions: Collection[str] = (),
        fine: bool = False,
    ) -> None:
        self.num_steps = 0
        self._at = frozenset(at)
        self._files = files
        self._functions = functions
        self._kind = "opcode" if fine else "line"
        self._thread = ctypes.c_ulong(threading.get_ident())

    def run(self, action: Callable[[], Any]) -> bool:
        """Whether ``action`` was interrupted."""
        sys.settrace(self._enter)
        try:
            action()
            # One that is still queued strikes here, not in the test.
            for _ in range(10):
                _nothing()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self._files):
            return None
        if self._functions and code.co_name not in self._functions:
            return None
        frame.f_trace_opcodes = self._kind == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._kind:
            self.num_steps += 1
            if self.num_steps in self._at:
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, error)
        return self._step


def _nothing() -> None:
    pass
