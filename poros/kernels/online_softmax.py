"""The softmax of logits that come a slice of the vocabulary at a time.

Of each token there is the largest logit so far, the sum of exponentials relative to it, and the
sum of the head's rows weighted by these exponentials; a larger logit scales both sums down to it
(algorithm 3 of Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867).
"""

from typing import NamedTuple

import torch

from poros.utils.devices import runs_triton


class OnlineSoftmaxState(NamedTuple):
    """What is known of each token after some slices. On one device, contiguous.

    Attributes:
        labels: int64, of shape (tokens,); the row of the head that is the token's label, or none.
        most: float32, of shape (tokens,); the largest logit, at least float32's smallest number.
        total: float32, of shape (tokens,); the sum of ``exp(logit - most)``.
        of_label: float32, of shape (tokens,); the label's logit, if it has come.
        slope: float32, of shape (tokens,); the derivative of the label's logit by the product that
            it was made of, if it has come.
        rows: float32, of shape (tokens, columns); the sum of the head's rows, weighted by
            ``exp(logit - most)`` times the logit's derivative. Without columns if it is not wanted.
        label_rows: Likewise, in the head's dtype; the label's row, if it has come.
    """

    labels: torch.Tensor
    most: torch.Tensor
    total: torch.Tensor
    of_label: torch.Tensor
    slope: torch.Tensor
    rows: torch.Tensor
    label_rows: torch.Tensor

    @classmethod
    def of(cls, labels: torch.Tensor, num_columns: int, dtype: torch.dtype) -> "OnlineSoftmaxState":
        """That of no slice."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=labels.device)

        number = len(labels)
        # Not minus infinity: its distance to itself is not a number.
        most = zeros(number) + torch.finfo(torch.float32).min
        sums = zeros(number, num_columns), zeros(number, num_columns, dtype=dtype)
        return cls(labels, most, zeros(number), zeros(number), zeros(number) + 1, *sums)

    @property
    def wants_rows(self) -> bool:
        return self.rows.shape[1] > 0


def add_logits(
    running: OnlineSoftmaxState,
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    head: torch.Tensor,
) -> torch.Tensor | None:
    """Take in the logits of the next rows of the head, all but their share in ``running.rows``.

    Args:
        running: Written to; ``rows`` is scaled to the largest logit there is now.
        first: Which row of the head is the first of these.
        logits: float32, of shape (tokens, rows), contiguous. May be written to.
        slope: The derivative of each logit by the product that it was made of, shaped like them,
            or one number for all.
        head: The rows, of shape (rows, columns), contiguous.

    Returns:
        What is to be added to ``running.rows``, as weights of these rows: ``exp(logit - most)``
        times ``slope``, of the shape of ``logits`` in the dtype of ``head``. None if ``rows`` is
        not wanted.

    Exactness:
        All arithmetic is float32; weights are rounded once. The kernel's exponential and order of
        sums are not those of the reference.
    """
    if logits.is_meta:
        return torch.empty_like(logits, dtype=head.dtype) if running.wants_rows else None
    if runs_triton(logits.device):
        from poros.kernels.online_softmax_gpu import launch

        return launch(running, running.rows.shape[1], first, logits, slope, head)
    return add_logits_ref(running, first, logits, slope, head)


def add_logits_ref(
    running: OnlineSoftmaxState,
    first: int,
    logits: torch.Tensor,
    slope: torch.Tensor | float,
    head: torch.Tensor,
) -> torch.Tensor | None:
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
    if not running.wants_rows:
        return None
    running.rows.mul_(shrunk[:, None])
    running.label_rows.copy_(torch.where(is_here[:, None], head[place], running.label_rows))
    if isinstance(slope, torch.Tensor) or slope != 1.0:
        weights *= slope
    return weights.to(head.dtype)


def places(labels: torch.Tensor, first: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask the tokens whose label is among ``number`` rows from ``first`` on; and which it is."""
    place = labels - first
    return (place >= 0) & (place < number), place.clamp(0, number - 1)
