"""Kernels of Triton started by what was compiled, past the dispatcher that looks for it.

For each call Triton's dispatcher binds arguments by name, describes each and looks up which
compilation fits, which takes several times as long as starting the kernel. Here that is done once
for each kind of arguments.
"""

from collections.abc import Mapping
from typing import Any

import torch


class Launcher:
    """One kernel.

    Args:
        kernel: What ``triton.jit`` made.
        **options: Of its compilation.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        num_programs: int,
        *arguments: Any,
        options: Mapping[str, int] | None = None,
        **constants: Any,
    ) -> None:
        """Queue the kernel on the current stream of its first argument's device.

        Args:
            num_programs: Of the only dimension.
            *arguments: In the kernel's order; the first is a tensor.
            options: More of the compilation.
            **constants: The others, which the kernel is compiled for, in its order.
        """
        device = arguments[0].device
        values = constants.values()
        key = (device, *values, *[_kind_of(argument) for argument in arguments])
        if options:
            key += tuple(options.values())
        compiled = self._compiled.get(key)
        if compiled is not None and torch._C._cuda_getDevice() == device.index:
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            compiled[num_programs, 1, 1](*arguments, *values, stream=stream)
            return
        options = {**self._options, **(options or {})}
        with torch.cuda.device_of(arguments[0]):
            compiled = self._kernel[num_programs,](*arguments, **constants, **options)
        if compiled is not None:  # as it is in Triton's interpreter
            self._compiled[key] = compiled


def ceil_div(size: int, of_each: int) -> int:
    """How many are needed for ``size``; Triton's own takes as long as starting a kernel."""
    return -(-size // of_each)


def _kind_of(argument: Any) -> Any:
    """What of an argument Triton compiles for."""
    kind = type(argument)
    if kind is float:
        return None
    if kind is int:
        return argument % 16 == 0, argument == 1, argument >= 2**31
    return argument.dtype, argument.data_ptr() % 16 == 0
