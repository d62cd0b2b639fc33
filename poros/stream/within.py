"""Contexts that are left now or never."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class Within(ExitStack):
    """Enters by calling ``fill`` with itself, and leaves by what was put on it then.

    A generator that is interrupted on its way out is finished when it is collected: at some later
    time, in the middle of something else, it would put an old state back. This would not.
    """

    def __init__(self, fill: Callable[[ExitStack], None]) -> None:
        super().__init__()
        self._fill = fill

    def __enter__(self) -> Self:
        try:
            self._fill(self)
        except BaseException:
            self.close()
            raise
        return self


def without_collector() -> Within:
    """Python's collector does not run in the body."""

    def fill(stack: ExitStack) -> None:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()

    return Within(fill)


class SavedTensorHooks:
    """As ``torch.autograd.graph.saved_tensors_hooks``; taken off with the frame at the latest.

    An interruption strikes between the body of a ``with`` and its end too. Hooks that stayed then
    would have whatever this thread computes next, in any model.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self._hooks = pack, unpack

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)

    def __exit__(self, *_: object) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and tuple(top) == self._hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def __del__(self) -> None:
        self.__exit__()


class FunctionMode(TorchFunctionMode):
    """As PyTorch's, and left without an error if it is off already."""

    def __exit__(self, *error: Any) -> None:
        # An interruption inside PyTorch's own handling of modes may have taken it off.
        if self in _get_current_function_mode_stack():
            super().__exit__(*error)


def on_plain_tensors(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in which no tensor subclass sees what is called with it.

    An interruption cannot leave it so: torch itself puts the state back, in C++, where a ``with``
    has a moment between its body and its end.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, {})
