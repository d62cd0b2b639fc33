"""The kernels of ``poros.kernels.row_norm``, in Triton.

A product of float32 matrices is made of products of bfloat16 parts: a number is the sum of three,
each the rounded rest of those before it. Of the nine products of parts the six that matter in
float32 are summed; a product of two bfloat16 numbers is exact. So W and A are read as they are, no
copy of them is made, and PyTorch's settings for TF32 have no say.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from poros.kernels.launching import ceil_div, start_kernel


class Blocks(NamedTuple):
    """What a program multiplies. All but the last two are the order of sums: they are not tuned."""

    rows: int
    others: int
    """Rows of the second matrix."""
    columns: int
    """Of both, at a time."""
    columns_in_all: int
    """Of both, by one program: others take the rest, so that there are enough to fill a GPU."""
    num_warps: int
    num_stages: int


_LEAST = 16
"""Rows that a product on tensor cores has at least."""
_SMALL_RANK = 64
"""Up to here all of A's rows are in one block, and W is read once."""
_MOST_GRAM_BLOCKS = 256
"""Programs for A A^T, and so float32 blocks of 64 by 64 that hold its parts: 4 MiB."""
_ASSEMBLY = 256
"""Rows that a program assembles."""

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""How many bfloat16 numbers a number of this dtype is the sum of."""
_MULTIPLIED_AS = tl.bfloat16
"""What parts are when they are multiplied. Triton's interpreter cannot multiply bfloat16."""


@triton.jit
def _without_product(
    total, x, y, X_PARTS: tl.constexpr, Y_PARTS: tl.constexpr, DTYPE: tl.constexpr
):
    """``total`` - x @ y^T, the smallest products first."""
    # Tensor cores cut off what they should round, each time that they add to a sum: so the sum of
    # a block is made from zero, and rounded as it joins the others. It is subtracted because Triton
    # makes an addition part of the product again.
    y = tl.trans(y)
    x0 = x.to(tl.bfloat16)
    y0 = y.to(tl.bfloat16)
    own = tl.zeros(total.shape, tl.float32)
    if X_PARTS > 1:
        x_rest = x.to(tl.float32) - x0.to(tl.float32)
        x1 = x_rest.to(tl.bfloat16)
    if Y_PARTS > 1:
        y_rest = y.to(tl.float32) - y0.to(tl.float32)
        y1 = y_rest.to(tl.bfloat16)
    if X_PARTS > 2:
        x2 = (x_rest - x1.to(tl.float32)).to(tl.bfloat16)
        own = tl.dot(x2.to(DTYPE), y0.to(DTYPE), own)
    if Y_PARTS > 2:
        y2 = (y_rest - y1.to(tl.float32)).to(tl.bfloat16)
        own = tl.dot(x0.to(DTYPE), y2.to(DTYPE), own)
    if X_PARTS > 1 and Y_PARTS > 1:
        own = tl.dot(x1.to(DTYPE), y1.to(DTYPE), own)
    if X_PARTS > 1:
        own = tl.dot(x1.to(DTYPE), y0.to(DTYPE), own)
    if Y_PARTS > 1:
        own = tl.dot(x0.to(DTYPE), y1.to(DTYPE), own)
    return total - tl.dot(x0.to(DTYPE), y0.to(DTYPE), own)


@triton.jit
def _multiply(
    x,
    y,
    weights,
    parts,
    rows,
    others,
    columns,
    x_stride,
    x_step,
    WEIGHTED: tl.constexpr,
    X_PARTS: tl.constexpr,
    Y_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_IN_ALL: tl.constexpr,
):
    # x @ y^T over some columns: a block of it, or the sum of each of its rows times ``weights``.
    # Programs that read the same of x follow one another.
    num_others = tl.cdiv(others, OTHERS)
    num_sections = tl.cdiv(columns, COLUMNS_IN_ALL)
    which = tl.program_id(0) % num_others
    section = (tl.program_id(0) // num_others) % num_sections
    row = (tl.program_id(0) // (num_others * num_sections)) * ROWS + tl.arange(0, ROWS)
    other = which * OTHERS + tl.arange(0, OTHERS)
    is_row, is_other = row < rows, other < others
    x_line = x + row.to(tl.int64)[:, None] * x_stride
    y_line = y + other.to(tl.int64)[:, None] * columns
    start = section * COLUMNS_IN_ALL
    end = tl.minimum(start + COLUMNS_IN_ALL, columns)
    negative = tl.zeros((ROWS, OTHERS), tl.float32)
    for first in range(start, end, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        x_inside = is_row[:, None] & (column < end)
        y_inside = is_other[:, None] & (column < end)
        x_block = tl.load(x_line + column.to(tl.int64) * x_step, mask=x_inside, other=0.0)
        y_block = tl.load(y_line + column, mask=y_inside, other=0.0)
        negative = _without_product(negative, x_block, y_block, X_PARTS, Y_PARTS, DTYPE)
    total = -negative
    at = row.to(tl.int64)[:, None] * others + other[None, :]
    inside = is_row[:, None] & is_other[None, :]
    if WEIGHTED:
        weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        # Where there is no row of y, x may have made a NaN of the zeros in its place.
        sums = tl.sum(tl.where(inside, total * weight, 0.0), axis=1)
        part = (section * num_others + which).to(tl.int64)
        tl.store(parts + part * rows + row, sums, mask=is_row)
    else:
        tl.store(parts + section.to(tl.int64) * rows * others + at, total, mask=inside)


@triton.jit
def _assemble(square, cross, gram, norm, twice, squared, rows, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = row < rows
    total = tl.load(square + row, mask=inside) + twice * tl.load(cross + row, mask=inside)
    total = total + squared * tl.load(gram + row, mask=inside)
    # Not a maximum, which may lose a NaN; and Triton's other square root is not rounded correctly.
    total = tl.where(total < 0.0, 0.0, total)
    tl.store(norm + row, tl.sqrt_rn(total), mask=inside)


def row_norm(
    dense: torch.Tensor, square: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``row_norm.row_norm`` on a GPU, of a scaling that is not 0."""
    a, b = (_readable(each) for each in (a, b))
    cross = _weighted(dense, a, b)
    return assembled(square, cross, _weighted(b, _gram(a), b), scaling)


def assembled(
    square: torch.Tensor, cross: torch.Tensor, gram: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``row_norm.assembled_ref`` on a GPU, to the bit."""
    norm = torch.empty_like(square)
    rows = len(norm)
    if rows:
        start_kernel(
            _assemble,
            ceil_div(rows, _ASSEMBLY),
            *(square, cross, gram, norm, 2 * scaling, scaling * scaling, rows),
            SIZE=_ASSEMBLY,
        )
    return norm


def _readable(adapter: torch.Tensor) -> torch.Tensor:
    """In a dtype that the kernel knows, its rows one after another."""
    dtype = adapter.dtype if adapter.dtype in _PARTS else torch.float32
    return adapter.to(dtype).contiguous()


def _weighted(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each row of ``(x @ y.T) * weights``, in float32."""
    blocks = _blocks(len(y), is_exact=x.dtype == torch.bfloat16)
    parts = x.new_empty(_num_parts(x.shape[1], len(y), blocks), len(x), dtype=torch.float32)
    _launch(x, y, weights, parts, blocks)
    # PyTorch's sum has one order for a shape.
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _gram(a: torch.Tensor) -> torch.Tensor:
    """``a @ a.T`` in float32."""
    rank, columns = a.shape
    blocks = _gram_blocks(columns, rank)
    num_sections = ceil_div(columns, blocks.columns_in_all)
    parts = a.new_empty(num_sections, rank, rank, dtype=torch.float32)
    _launch(a, a, None, parts, blocks)
    return parts[0] if num_sections == 1 else parts.sum(0)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    parts: torch.Tensor,
    blocks: Blocks,
) -> None:
    rows, columns = x.shape
    num_others = ceil_div(len(y), blocks.others)
    num_sections = ceil_div(columns, blocks.columns_in_all)
    num_programs = ceil_div(rows, blocks.rows) * num_others * num_sections
    if not num_programs:
        return
    start_kernel(
        _multiply,
        num_programs,
        # What is not there is not looked at.
        *(x, y, y if weights is None else weights, parts, rows, len(y), columns, *x.stride()),
        WEIGHTED=weights is not None,
        X_PARTS=_PARTS[x.dtype],
        Y_PARTS=_PARTS[y.dtype],
        DTYPE=_MULTIPLIED_AS,
        ROWS=blocks.rows,
        OTHERS=blocks.others,
        COLUMNS=blocks.columns,
        COLUMNS_IN_ALL=blocks.columns_in_all,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _blocks(rank: int, is_exact: bool) -> Blocks:
    """For a product with A's rows; ``is_exact`` if the other matrix is in bfloat16.

    Sized by what compilers say for GPUs of 8.0 and 9.0: no registers spill, and less than the
    99 KiB of shared memory that the small ones have.
    """
    if rank > _SMALL_RANK:
        return Blocks(128, 64, 32, 1024, 8, 3 if is_exact else 2)
    others = max(_LEAST, _power_of_2(rank))
    columns = 128 // (1 if is_exact else 2) // (2 if others > 32 else 1)
    return Blocks(64, others, columns, 512, 4, 3)


def _gram_blocks(columns: int, rank: int) -> Blocks:
    size = min(64, max(_LEAST, _power_of_2(rank)))
    num_blocks = ceil_div(rank, size) ** 2
    num_sections = max(1, min(ceil_div(columns, 1024), _MOST_GRAM_BLOCKS // num_blocks))
    of_section = ceil_div(columns, num_sections)
    return Blocks(size, size, 32, ceil_div(of_section, 64) * 64, 4, 3)


def _num_parts(columns: int, rank: int, blocks: Blocks) -> int:
    return ceil_div(columns, blocks.columns_in_all) * ceil_div(rank, blocks.others)


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
