"""Rows of a matrix in page-locked host memory, read by the GPU itself, in Triton."""

import torch
import triton
import triton.language as tl

from poros.kernels.launching import start_kernel

_SIZE = 1024
"""Words of a row that a program reads at once."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Bytes are copied as the widest of these that divides a row, and the place of the first."""


@triton.jit
def _gather(into, matrix, indices, num_rows, num_words, SIZE: tl.constexpr):
    number = tl.program_id(0)
    row = tl.load(indices + number).to(tl.int64)
    for first in range(0, num_words, SIZE):
        at = first + tl.arange(0, SIZE)
        inside = (at < num_words) & (row >= 0) & (row < num_rows)
        words = tl.load(matrix + row * num_words + at, mask=inside)
        tl.store(into + number.to(tl.int64) * num_words + at, words, mask=inside)


def gather(matrix: torch.Tensor, indices: torch.Tensor, into: torch.Tensor) -> None:
    """Copy rows of a matrix in host memory into a tensor on the GPU.

    Args:
        matrix: Of shape (rows, columns), contiguous, page-locked for the GPU.
        indices: Integers of shape (number,), on the GPU.
        into: Of shape (number, columns), contiguous, in the dtype of the matrix.

    Streams:
        Queued on the current stream. An index out of range stops the GPU by an assertion there.
    """
    num_rows = len(matrix)
    torch._assert_async(
        ((indices >= 0) & (indices < num_rows)).all(),
        f"expected indices of rows of an embedding below {num_rows}, found another",
    )
    row = matrix[0].nbytes
    places = row | matrix.data_ptr() | into.data_ptr()
    word = next(each for each in _WORDS if places % each.itemsize == 0)
    # As bytes first: a view as wider words wants an even number of columns.
    words = [each.view(torch.uint8).view(word) for each in (into, matrix)]
    num_words = row // word.itemsize
    given = (*words, indices.contiguous(), num_rows, num_words)
    start_kernel(_gather, len(indices), *given, SIZE=_SIZE)
