"""The softmax of logits that come a slice of the vocabulary at a time.

Of each token there is the largest logit so far, the sum of exponentials relative to it, and the
sum of the head's rows weighted by these exponentials; a larger logit scales both sums down to it
(algorithm 3 of Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867).
"""

from typing import NamedTuple

import torch

from poros.devices import runs_triton


class Running(NamedTuple):
    """What is known of each token after some slices. All of shape (tokens,), on one device.

    Attributes:
        labels: int64; the row of the head that is the token's label, or none of them.
        most: float32; the largest logit so far, at least float32's smallest number.
        total: float32; the sum of ``exp(logit - most)``.
        of_label: float32; the label's logit, if it has come.
        slope: float32; the derivative of the label's logit, if it has come.
    """

    labels: torch.Tensor
    most: torch.Tensor
    total: torch.Tensor
    of_label: torch.Tensor
    slope: torch.Tensor

    @classmethod
    def of(cls, labels: torch.Tensor) -> "Running":
        """That of no slice."""
        like = torch.zeros_like(labels, dtype=torch.float32)
        # Not minus infinity: its distance to itself is not a number.
        most = torch.full_like(like, torch.finfo(torch.float32).min)
        return cls(labels, most, like, torch.zeros_like(like), torch.ones_like(like))


def add_logits(
    running: Running,
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Take in the logits of the next rows of the head.

    Args:
        running: Written to.
        first: The row of the head that the first column is of.
        logits: float32, of shape (tokens, rows), contiguous. May be written to.
        slope: The derivative of each logit by the product that it was made of, shaped like them,
            or one number for all.
        dtype: That of the weights; None if none are wanted, as where nothing gets a gradient.

    Returns:
        Of each row and token its weight, ``exp(logit - most) * slope``, of the shape of ``logits``
        in ``dtype``; and of each token by what former sums have to be multiplied, float32. None if
        no weights are wanted.

    Exactness:
        All arithmetic is float32; weights are rounded once. The kernel's exponential and order of
        sums are not those of the reference.
    """
    if logits.is_meta:
        weights = None if dtype is None else torch.empty_like(logits, dtype=dtype)
        return None if weights is None else (weights, torch.empty_like(running.most))
    if runs_triton(logits.device):
        from poros.kernels.online_softmax_gpu import launch_add_logits

        return launch_add_logits(running, first, logits, slope, dtype)
    return add_logits_ref(running, first, logits, slope, dtype)


def add_logits_ref(
    running: Running,
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``add_logits`` in plain PyTorch."""
    is_here, place = places(running.labels, first, logits.shape[1])

    def take_labels_own(into: torch.Tensor, values: torch.Tensor | float) -> None:
        if isinstance(values, torch.Tensor):
            values = values.gather(1, place[:, None])[:, 0]
        into.copy_(torch.where(is_here, values, into))

    take_labels_own(running.of_label, logits)
    take_labels_own(running.slope, slope)
    most = torch.maximum(running.most, logits.amax(dim=1))
    shrunk = torch.exp(running.most - most)
    running.most.copy_(most)
    weights = logits.sub_(most[:, None]).exp_()
    running.total.mul_(shrunk).add_(weights.sum(dim=1))
    if dtype is None:
        return None
    if isinstance(slope, torch.Tensor) or slope != 1.0:
        weights *= slope
    return weights.to(dtype), shrunk


def add_rows(
    rows_so_far: torch.Tensor,
    label_rows: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    shrunk: torch.Tensor,
    product: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Add a slice's weighted rows to each token's sum, and note the label's row if it is there.

    Args:
        rows_so_far: float32, of shape (tokens, columns), contiguous; becomes itself times
            ``shrunk`` plus ``product``, rounded at each operation.
        label_rows: Of shape (tokens, columns), in the dtype of ``rows``, contiguous; written to.
        labels: As in ``Running``.
        first: The row of the head that the first of ``rows`` is.
        shrunk: As ``add_logits`` gives it.
        product: float32, shaped like ``rows_so_far``.
        rows: Of shape (rows, columns), contiguous.

    Exactness:
        The kernel gives the bits of the reference.
    """
    if runs_triton(rows.device):
        from poros.kernels.online_softmax_gpu import launch_add_rows

        launch_add_rows(rows_so_far, label_rows, labels, first, shrunk, product, rows)
    elif not rows.is_meta:
        add_rows_ref(rows_so_far, label_rows, labels, first, shrunk, product, rows)


def add_rows_ref(
    rows_so_far: torch.Tensor,
    label_rows: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    shrunk: torch.Tensor,
    product: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """``add_rows`` in plain PyTorch."""
    rows_so_far.mul_(shrunk[:, None]).add_(product)
    is_here, place = places(labels, first, len(rows))
    label_rows.copy_(torch.where(is_here[:, None], rows[place], label_rows))


def places(labels: torch.Tensor, first: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose labels are among so many rows from ``first`` on, and which of these rows they are."""
    place = labels - first
    return (place >= 0) & (place < number), place.clamp(0, number - 1)
