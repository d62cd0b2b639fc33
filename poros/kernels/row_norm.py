"""The norm of each row of a weight and what LoRA adds to it, without forming what it adds.

For a weight W, matrices A and B and a scaling s ("High-Rank Adaptation via Factored Norms and Fused
Kernels", arXiv:2603.22276, equations 2 to 5)

    |W + s B A|^2 = |W|^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>        of each row

PEFT forms B A, of the size of W, from an identity matrix. The first term does not change in
training and is given.
"""

import torch

from poros.utils.devices import runs_triton


@torch.no_grad()
def square_of_rows(dense: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row.

    Args:
        dense: Of shape (rows, columns).

    Returns:
        float32, or float64 if ``dense`` is, of shape (rows,).

    Streams:
        Queued on the current stream. PyTorch's reduction makes no copy of ``dense``.

    Exactness:
        All arithmetic is float32. The order of sums depends on shape and device alone.
    """
    return torch.linalg.vector_norm(dense, dim=1, dtype=_computed_in(dense)).square_()


def row_norm(
    dense: torch.Tensor,
    square: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The norm of each row of ``dense + scaling * b @ a``. No autograd, whatever autocast is.

    Args:
        dense: W, of shape (rows, columns), in bfloat16, float16, float32 or float64.
        square: What ``square_of_rows`` gave of it.
        a: Of shape (rank, columns), in any dtype.
        b: Of shape (rows, rank), in any dtype.
        scaling: If 0, nothing but ``square`` is looked at.

    Returns:
        float32, or float64 if ``dense`` is, of shape (rows,). What is not finite in a row of W or
        B, or in A, does not become finite.

    Streams:
        Queued on the current stream. Besides its inputs a GPU holds A A^T in float32 and sums that
        are left in parts.

    Exactness:
        All arithmetic is float32, or float64 if ``dense`` is. On a GPU, products are of three parts
        in bfloat16, which lose no more than float32 does, whatever is allowed to cuBLAS; the order
        of sums depends on shapes and dtypes alone. From its three terms on, the bits of
        ``assembled_ref``.
    """
    if dense.is_meta:
        return square.new_empty(len(dense), dtype=_computed_in(dense))
    if scaling == 0 or not _takes_kernel(dense):
        return row_norm_ref(dense, square, a, b, scaling)
    from poros.kernels import row_norm_gpu

    return row_norm_gpu.row_norm(dense.detach(), square, a.detach(), b.detach(), scaling)


@torch.no_grad()
def row_norm_ref(
    dense: torch.Tensor,
    square: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """``row_norm`` in plain PyTorch; on a GPU its products are in TF32 if PyTorch's may be."""
    dtype = _computed_in(dense)
    square = square.to(dtype)
    if scaling == 0:
        return _root(square)
    with torch.autocast(dense.device.type, enabled=False):
        a, b = a.to(dtype), b.to(dtype)
        # A copy: on a CPU such a product hangs on where a weight of float32 lies in memory.
        cross = dense.to(dtype, copy=True).mm(a.t()).mul_(b).sum(1)
        gram = b.mm(a.mm(a.t())).mul_(b).sum(1)
        return assembled_ref(square, cross, gram, scaling)


def assembled_ref(
    square: torch.Tensor, cross: torch.Tensor, gram: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The norm from its three terms (equation 5), every step rounded; a NaN stays one."""
    return _root((square + 2 * scaling * cross + scaling * scaling * gram).clamp_min(0))


def divisor_of(norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By what DoRA's magnitude is divided (equation 6): ``norm``, but not next to nothing.

    Args:
        norm: As ``row_norm`` gave it; a NaN stays one.
        dtype: Of the weight: it says which norm is the least to divide by.
    """
    return norm.clamp_min(1e-6 if dtype in (torch.bfloat16, torch.float16) else 1e-12)


def _root(square: torch.Tensor) -> torch.Tensor:
    """Rounded correctly, which PyTorch's of float32 is not on every CPU."""
    return square.double().sqrt().to(square.dtype)


def _computed_in(dense: torch.Tensor) -> torch.dtype:
    return torch.float64 if dense.dtype == torch.float64 else torch.float32


def _takes_kernel(dense: torch.Tensor) -> bool:
    return dense.dtype != torch.float64 and runs_triton(dense.device)
