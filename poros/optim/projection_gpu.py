"""The tiles of ``poros.optim.projection``, in Triton: the same integers, the same bits."""

from typing import Any

import torch
import triton
import triton.language as tl

from poros.kernels.launching import ceil_div, start_kernel

_SIZE = 256
"""Counters of a program; each gives eight entries."""


@triton.jit
def _tile(
    out, quantiles, scale, seed, matrix, draw, stream,
    num_counters, first, num_columns, size, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < size
    counter = (at // num_columns) * num_counters + first + at % num_columns
    zero = tl.zeros_like(counter)
    second, third = (zero + matrix).to(tl.uint32), (zero + draw).to(tl.uint32)
    fourth = (zero + stream).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter.to(tl.uint32), second, third, fourth)
    base = out + at.to(tl.int64) * 8
    for number in tl.static_range(4):
        word = a if number == 0 else b if number == 1 else c if number == 2 else d
        low = tl.load(quantiles + (word & 0xFFFF).to(tl.int32), mask=inside, other=0.0)
        high = tl.load(quantiles + (word >> 16).to(tl.int32), mask=inside, other=0.0)
        tl.store(base + 2 * number, low * scale, mask=inside)
        tl.store(base + 2 * number + 1, high * scale, mask=inside)


def tile(projection: Any, num_counters: int, first: int, last: int) -> torch.Tensor:
    """float32 [rank, 8 * (last - first)]: entries of counters ``first`` to ``last`` of each row."""
    size = projection.rank * (last - first)
    device = projection.quantiles.device
    out = torch.empty((projection.rank, 8 * (last - first)), dtype=torch.float32, device=device)
    numbers = (projection.seed, projection.matrix, projection.draw, int(projection.stream))
    start_kernel(
        *(_tile, ceil_div(size, _SIZE), out, projection.quantiles, projection.rank**-0.5),
        *(*numbers, num_counters, first, last - first, size),
        SIZE=_SIZE,
    )
    return out
