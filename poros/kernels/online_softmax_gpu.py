"""The kernels of ``poros.kernels.online_softmax``, in Triton."""

# Kernels state no types, and what is decorated has none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from poros.kernels.online_softmax import Running

_WIDTH = 2048
"""Logits or columns that a program has in registers at a time."""


@triton.jit
def _add_logits(
    labels,
    most,
    total,
    of_label,
    label_slope,
    logits,
    slopes,
    slope,
    weights,
    shrunk,
    first,
    num_rows,
    HAS_SLOPES: tl.constexpr,
    WANTS_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # One program is one token: it reads its logits twice, the second time from the cache.
    token = tl.program_id(0)
    row = token.to(tl.int64) * num_rows
    smallest = float("-inf")
    largest = tl.full((WIDTH,), smallest, tl.float32)
    for start in range(0, num_rows, WIDTH):
        at = start + tl.arange(0, WIDTH)
        values = tl.load(logits + row + at, mask=at < num_rows, other=smallest)
        largest = tl.maximum(largest, values)
    before = tl.load(most + token)
    after = tl.maximum(before, tl.max(largest, axis=0))
    sums = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, num_rows, WIDTH):
        at = start + tl.arange(0, WIDTH)
        inside = at < num_rows
        values = tl.load(logits + row + at, mask=inside, other=smallest)
        powers = tl.exp(values - after)
        sums += tl.where(inside, powers, 0.0)
        if WANTS_WEIGHTS:
            if HAS_SLOPES:
                powers *= tl.load(slopes + row + at, mask=inside, other=0.0)
            else:
                powers *= slope
            tl.store(weights + row + at, powers.to(weights.dtype.element_ty), mask=inside)
    factor = tl.exp(before - after)
    tl.store(most + token, after)
    tl.store(total + token, tl.load(total + token) * factor + tl.sum(sums, axis=0))
    if WANTS_WEIGHTS:
        tl.store(shrunk + token, factor)
    place = tl.load(labels + token) - first
    if (place >= 0) & (place < num_rows):
        tl.store(of_label + token, tl.load(logits + row + place))
        if HAS_SLOPES:
            tl.store(label_slope + token, tl.load(slopes + row + place))
        else:
            tl.store(label_slope + token, slope)


@triton.jit
def _add_rows(
    so_far, label_rows, labels, shrunk, product, rows, first, num_rows, num_columns,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < num_columns
    at = token.to(tl.int64) * num_columns + column
    sums = tl.load(so_far + at, mask=inside) * tl.load(shrunk + token)
    tl.store(so_far + at, sums + tl.load(product + at, mask=inside), mask=inside)
    place = tl.load(labels + token) - first
    if (place >= 0) & (place < num_rows):
        own = tl.load(rows + place * num_columns + column, mask=inside)
        tl.store(label_rows + at, own, mask=inside)


def launch_add_logits(
    running: "Running",
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``online_softmax.add_logits`` on a GPU."""
    num_tokens, num_rows = logits.shape
    has_slopes = isinstance(slope, torch.Tensor)
    # What is not there is not looked at.
    weights = logits if dtype is None else torch.empty_like(logits, dtype=dtype)
    shrunk = running.most if dtype is None else torch.empty_like(running.most)
    _add_logits[(num_tokens,)](
        *running,
        logits,
        slope if has_slopes else logits,
        1.0 if has_slopes else slope,
        weights,
        shrunk,
        first,
        num_rows,
        HAS_SLOPES=has_slopes,
        WANTS_WEIGHTS=dtype is not None,
        WIDTH=_WIDTH,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return None if dtype is None else (weights, shrunk)


def launch_add_rows(
    rows_so_far: torch.Tensor,
    label_rows: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    shrunk: torch.Tensor,
    product: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """``online_softmax.add_rows`` on a GPU."""
    num_tokens, num_columns = rows_so_far.shape
    _add_rows[(num_tokens, triton.cdiv(num_columns, _WIDTH))](
        rows_so_far,
        label_rows,
        labels,
        shrunk,
        product,
        rows,
        first,
        len(rows),
        num_columns,
        WIDTH=_WIDTH,
        num_warps=8,
        enable_fp_fusion=False,
    )
