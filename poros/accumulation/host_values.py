"""Questions of a model's code about its positions, answered without waiting for the device.

Models of transformers look whether the positions of a row begin anew in it, as those of packed rows
do, before they make its mask: Python waits until the GPU has computed all that was queued, the
backward of the step before with it, and then the GPU waits for Python.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

_QUESTIONS = frozenset({Tensor.__bool__, Tensor.item, Tensor.tolist})
_FOLLOWED = frozenset(
    {torch.arange, torch.diff}
    | {Tensor.__getitem__, Tensor.unsqueeze, Tensor.expand, Tensor.cumsum, Tensor.all, Tensor.any}
    | {Tensor.add, Tensor.sub, Tensor.eq, Tensor.ne, Tensor.__eq__}
)
"""They compute the same integers on every device."""
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset({_DATA.__get__, _DATA.__set__, Tensor.untyped_storage, Tensor.__dlpack__})
"""Edits through what they give are not counted: from such a call on nothing is known."""
_VALUES = "_poros_values"


class HostValues(TorchFunctionMode):
    """Integers that are made of Python's numbers in the body are computed on the host as well.

    Their values are known there for as long as nothing edits them. All others stay on the device,
    and who asks for them waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._knows_all_edits = True

    def __exit__(self, *_: Any) -> None:
        """No more; those that were entered since stay. If it is off already, nothing happens."""
        above: list[Any] = []
        while self in _get_current_function_mode_stack():
            above.append(_pop_mode())
        for mode in reversed(above[:-1]):
            _push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        self._knows_all_edits &= func not in _UNCOUNTED
        if func in _QUESTIONS and self._knows_all_edits:
            with suppress(KeyError):
                return func(_on_host(args[0]), *args[1:], **kwargs)
        found = func(*args, **kwargs)
        if func in _FOLLOWED and type(found) is Tensor and not found.is_floating_point():
            with suppress(KeyError):
                there = {name: _on_host(value) for name, value in kwargs.items()}
                if func is torch.arange:
                    there["device"] = "cpu"
                values = func(*map(_on_host, args), **there)
                if not found.is_inference():  # edits of these are not counted
                    found.__dict__[_VALUES] = found._version, values
        return found


def _on_host(value: Any) -> Any:
    """What is given, or the values of a tensor; KeyError if these are not known on the host."""
    if type(value) in (tuple, list):
        return type(value)(map(_on_host, value))
    if not isinstance(value, Tensor):
        return value
    version, values = value.__dict__[_VALUES]
    if version != value._version:
        raise KeyError(_VALUES)
    return values
