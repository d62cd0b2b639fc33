"""The kernel of ``poros.kernels.copies``, in Triton. Casts round to the nearest, ties to even."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from poros.kernels.launching import ceil_div, start_kernel

_SIZE = 2048
"""Elements of a program."""
_MOST = 8
"""Tensors of a kernel."""


@triton.jit
def _copy_part(place, source, num_elements, first, SIZE: tl.constexpr):
    """Copy what this program has of one tensor; the number of the next one's first program."""
    number = tl.program_id(0) - first
    count = tl.cdiv(num_elements, SIZE)
    if (number >= 0) & (number < count):
        at = tl.multiple_of(number * SIZE, SIZE) + tl.arange(0, SIZE)
        inside = at < num_elements
        place = tl.multiple_of(place, 16)
        value = tl.load(tl.multiple_of(source, 16) + at, mask=inside)
        tl.store(place + at, value.to(place.dtype.element_ty), mask=inside)
    return first + count


_PLACES = [f"{kind}{number}" for kind in "ps" for number in range(_MOST)]
_COUNTS = [f"n{number}" for number in range(_MOST)]


# One compilation for each two dtypes: while a graph is recorded nothing can be compiled.
# fmt: off
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_PLACES)
def _copy(
    p0, p1, p2, p3, p4, p5, p6, p7, s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, n4, n5, n6, n7,
    SIZE: tl.constexpr,
):
    first = _copy_part(p0, s0, n0, 0, SIZE)
    first = _copy_part(p1, s1, n1, first, SIZE)
    first = _copy_part(p2, s2, n2, first, SIZE)
    first = _copy_part(p3, s3, n3, first, SIZE)
    first = _copy_part(p4, s4, n4, first, SIZE)
    first = _copy_part(p5, s5, n5, first, SIZE)
    first = _copy_part(p6, s6, n6, first, SIZE)
    _copy_part(p7, s7, n7, first, SIZE)
# fmt: on


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first: see ``poros.kernels.copies.fits_kernel``."""
    for begin in range(0, len(pairs), _MOST):
        part = [pair for pair in pairs[begin : begin + _MOST] if pair[0].numel()]
        if not part:
            continue
        sizes = [place.numel() for place, _ in part]
        missing = _MOST - len(part)
        places, sources = zip(*part, *[part[0]] * missing, strict=True)
        arguments: list[Any] = [*places, *sources, *sizes, *[0] * missing]
        num_programs = sum(ceil_div(size, _SIZE) for size in sizes)
        start_kernel(_copy, num_programs, *arguments, SIZE=_SIZE)


def compile_for(dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Have the kernel compiled that copies each of these dtypes into each."""
    examples = [torch.zeros(1, dtype=each, device=device) for each in dtypes]
    for place, source in product(examples, examples):
        copy([(place, source)])
