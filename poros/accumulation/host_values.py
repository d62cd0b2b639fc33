"""Questions of a model's code about its positions, answered without waiting for the device.

Models of transformers look whether the positions of a row begin anew in it, as those of packed rows
do, before they make its mask: Python waits until the GPU has computed all that was queued, the
backward of the step before with it, and then the GPU waits for Python.

Note: Where
    A mode that sees functions changes what some of PyTorch's modules do (``nn.TransformerEncoder``
    leaves its fast path), and does not see each edit of a tensor (``Tensor.set_``). So it is on
    while code of libraries runs that does neither: that of the module that holds the layers, and of
    the modules beside them, up to the first layer.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from poros.kernels.forwards import (
    HOOKS,
    PatchedForward,
    has_hooks,
    is_forward_of_liger,
    is_of_library,
)
from poros.stream.boundary import is_streamed

_QUESTIONS = frozenset({Tensor.__bool__, Tensor.item, Tensor.tolist})
_FOLLOWED = frozenset(
    {torch.arange, torch.diff}
    | {Tensor.__getitem__, Tensor.unsqueeze, Tensor.expand, Tensor.cumsum, Tensor.all, Tensor.any}
    | {Tensor.add, Tensor.sub, Tensor.eq, Tensor.ne, Tensor.__eq__}
)
"""They compute the same integers on every device."""
_DTYPES = (torch.int64, torch.int32, torch.bool)
_MOST_ELEMENTS = 2**20


class HostValues(TorchFunctionMode):
    """Integers that are made of Python's numbers in the body are computed on the host as well.

    Their values are known there for as long as nothing edits them. All others stay on the device,
    and who asks for them waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}
        """By id: a tensor, its version, and its values on the host."""

    def enter(self, holder: nn.Module) -> None:
        """Begin with the code of the module that holds the layers, if a library has written it."""
        beside = list(_beside_layers(holder))
        hooks = [hook for each in beside for kind in HOOKS for hook in getattr(each, kind)]
        if len(hooks) == 2 and not has_hooks() and all(map(_is_of_library, beside)):
            self.__enter__()  # the hooks are ours, before and behind what holds the layers

    def __exit__(self, *_: Any) -> None:
        """No more; those that were entered since stay. If it is off already, nothing happens."""
        self._known.clear()
        above: list[Any] = []
        while any(each is self for each in _get_current_function_mode_stack()):
            above.append(_pop_mode())
        for mode in reversed(above[:-1]):
            _push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _QUESTIONS:
            with suppress(KeyError):
                return func(self._on_host(args[0]), *args[1:], **kwargs)
        found = func(*args, **kwargs)
        if (
            func in _FOLLOWED
            and type(found) is Tensor
            and found.dtype in _DTYPES
            and found.numel() <= _MOST_ELEMENTS
            and not found.is_inference()  # edits of these are not counted
        ):
            with suppress(KeyError):
                there = {name: self._on_host(value) for name, value in kwargs.items()}
                if func is torch.arange:
                    there["device"] = "cpu"
                values = func(*map(self._on_host, args), **there)
                self._known[id(found)] = found, found._version, values
        return found

    def _on_host(self, value: Any) -> Any:
        """What is given, or the values of a tensor; KeyError if these are not known on the host."""
        if type(value) in (tuple, list):
            return type(value)(map(self._on_host, value))
        if not isinstance(value, Tensor):
            return value
        _, version, values = self._known[id(value)]
        if version != value._version:
            raise KeyError(id(value))
        return values


def _beside_layers(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not is_streamed(child):
            yield from _beside_layers(child)


def _is_of_library(module: nn.Module) -> bool:
    """Whether nothing but code of libraries runs where the module is called."""
    kind, own = type(module), module.__dict__.get("forward")
    is_known = own is None or isinstance(own, PatchedForward) or is_forward_of_liger(own)
    is_theirs = is_of_library(kind) and is_of_library(kind.forward)
    return is_known and is_theirs and not module._compiled_call_impl
