"""The kernel of ``poros.kernels.online_softmax``, in Triton."""

import torch
import triton
import triton.language as tl

from poros.kernels.launching import start_kernel

_WIDTH = 2048
"""Logits or columns that a program has in registers at a time."""


@triton.jit
def _add_logits(
    labels,
    most,
    total,
    of_label,
    label_slope,
    sums,
    label_rows,
    logits,
    slopes,
    slope,
    head,
    weights,
    first,
    num_rows,
    num_columns,
    HAS_SLOPES: tl.constexpr,
    WANTS_ROWS: tl.constexpr,
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
    parts = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, num_rows, WIDTH):
        at = start + tl.arange(0, WIDTH)
        inside = at < num_rows
        values = tl.load(logits + row + at, mask=inside, other=smallest)
        powers = tl.exp(values - after)
        parts += tl.where(inside, powers, 0.0)
        if WANTS_ROWS:
            if HAS_SLOPES:
                powers *= tl.load(slopes + row + at, mask=inside, other=0.0)
            else:
                powers *= slope
            tl.store(weights + row + at, powers.to(weights.dtype.element_ty), mask=inside)
    shrunk = tl.exp(before - after)
    tl.store(most + token, after)
    tl.store(total + token, tl.load(total + token) * shrunk + tl.sum(parts, axis=0))
    place = tl.load(labels + token) - first
    is_here = (place >= 0) & (place < num_rows)
    if is_here:
        tl.store(of_label + token, tl.load(logits + row + place))
        if HAS_SLOPES:
            tl.store(label_slope + token, tl.load(slopes + row + place))
        else:
            tl.store(label_slope + token, slope)
    if WANTS_ROWS:
        line = token.to(tl.int64) * num_columns
        # Seldom after the first slices: so the sums are mostly left where they are.
        if after > before:
            for start in range(0, num_columns, WIDTH):
                at = start + tl.arange(0, WIDTH)
                inside = at < num_columns
                scaled = tl.load(sums + line + at, mask=inside) * shrunk
                tl.store(sums + line + at, scaled, mask=inside)
        if is_here:
            for start in range(0, num_columns, WIDTH):
                at = start + tl.arange(0, WIDTH)
                inside = at < num_columns
                own = tl.load(head + place * num_columns + at, mask=inside)
                tl.store(label_rows + line + at, own, mask=inside)


def launch(
    running: tuple[torch.Tensor, ...],
    num_columns: int,
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    head: torch.Tensor,
) -> torch.Tensor | None:
    """``online_softmax.add_logits`` on a GPU.

    ``num_columns`` is that of the state's sums of rows; 0 if they are not wanted.
    """
    num_tokens, num_rows = logits.shape
    has_slopes = isinstance(slope, torch.Tensor)
    weights = torch.empty_like(logits, dtype=head.dtype) if num_columns else None
    start_kernel(
        _add_logits,
        num_tokens,
        *running,
        logits,
        # What is not there is not looked at.
        slope if has_slopes else logits,
        1.0 if has_slopes else float(slope),
        head,
        logits if weights is None else weights,
        first,
        num_rows,
        num_columns,
        HAS_SLOPES=has_slopes,
        WANTS_ROWS=weights is not None,
        WIDTH=_WIDTH,
        num_warps=8,
    )
    return weights
