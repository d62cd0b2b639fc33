"""Starts kernels of Triton."""

from typing import Any

import torch

SIZE = 2048
"""Elements of a program that goes over its tensors once."""


def start_kernel(kernel: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on the current stream of its first argument's device.

    Its products and sums are rounded each: none are fused.

    Args:
        kernel: What ``triton.jit`` made.
        num_programs: Of the only dimension.
        *arguments: In the kernel's order; the first is a tensor.
        **constants: What it is compiled for, and options of the compilation.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[num_programs,](*arguments, **constants, enable_fp_fusion=False)


def start_elementwise(kernel: Any, *arguments: Any, **constants: Any) -> None:
    """``start_kernel`` with a program for each ``SIZE`` elements of the first argument.

    The kernel gets the number of elements behind the arguments, and ``SIZE`` among the constants.
    """
    number = arguments[0].numel()
    start_kernel(kernel, ceil_div(number, SIZE), *arguments, number, **constants, SIZE=SIZE)


def ceil_div(size: int, of_each: int) -> int:
    """How many are needed for ``size``."""
    return -(-size // of_each)
