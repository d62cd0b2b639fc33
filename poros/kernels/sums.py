"""Sums over large tensors that take little memory: of rows, and of the bits."""

import math

import torch


def sum_of_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up all rows of a contiguous matrix, in ``dtype``.

    In two rounds of about as many rows each: to add up thousands of rows at once, a GPU takes
    memory for parts of the sums that is up to a quarter of a GB.
    """
    together = max(1, math.isqrt(len(rows)))
    number = len(rows) // together
    whole, rest = rows[: number * together], rows[number * together :]
    parts = whole.view(number, together, rows.shape[1]).sum(1, dtype=dtype)
    return parts.sum(0).add_(rest.sum(0, dtype=dtype))


def sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the bits of a tensor, by row and by column, each weighted by its place.

    Equal for equal bits, wherever they lie and in any order of summation; of values that were
    edited, or have changed places, others.

    Args:
        tensor: Of any shape and dtype.

    Returns:
        Of shape (2,), int64, on the same device; zeros of a tensor that is empty or not strided.

    Streams:
        Queued on the current stream; the host does not wait. Contiguous rows of whole words
        (eight bytes each) are not copied.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    is_whole = rows.shape[1] * rows.element_size() % 8 == 0
    begins_within = is_whole and int(rows.storage_offset()) * rows.element_size() % 8
    # A column is contiguous whatever its stride, which a view as other integers does not take.
    if begins_within or rows.stride(1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    words = rows.view(torch.int64 if is_whole else torch.uint8)
    sums = [sum_of_rows(words, torch.int64), words.sum(1, dtype=torch.int64)]
    # Odd ones, with which no bit is lost.
    weights = [torch.arange(1, 2 * len(each), 2, device=each.device) for each in sums]
    return torch.stack([(a * b).sum() for a, b in zip(sums, weights, strict=True)])
