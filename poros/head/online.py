"""The running state of each token's loss over slices of the head: see ``poros.head.loss``."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from poros.kernels.online_softmax import OnlineSoftmaxState, add_logits
from poros.utils.profiling import labelled


class Step(NamedTuple):
    """An operation on logits, element by element."""

    kind: Literal["multiply", "divide", "tanh"]
    number: float = 1.0


class SlicedLossState:
    """The state of each token after some slices. See "One pass"."""

    def __init__(self, hidden: torch.Tensor, labels: torch.Tensor, wants_gradient: bool) -> None:
        self._hidden = hidden
        num_columns = hidden.shape[1] if wants_gradient else 0
        self._running = OnlineSoftmaxState.of(labels, num_columns, hidden.dtype)

    def add(
        self,
        first: int,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        steps: Sequence[Step],
    ) -> None:
        """Update the state with some rows of the head: see ``sliced_cross_entropy``."""
        with labelled("head", f"rows {first}"):
            running = self._running
            rows = as_operand(rows, self._hidden.dtype)
            part = None if bias is None else bias[first : first + len(rows)]
            logits, slope = logits_of(self._hidden, rows, part, steps, running.wants_rows)
            weights = add_logits(running, first, logits, slope, rows)
            del logits, slope
            if weights is not None:
                _add_product(running.rows, weights, rows)

    def losses(self) -> torch.Tensor:
        """Return the loss of each token, as if its label counted."""
        return self.scale() - self._running.of_label

    def scale(self) -> torch.Tensor:
        """Return the log-sum-exp of each token's logits."""
        return self._running.total.log() + self._running.most

    def gradient(self) -> torch.Tensor:
        """Return the gradient of each token's hidden state, in float32. Consumes the sums."""
        running = self._running
        rows = running.rows.div_(running.total[:, None])
        return rows.addcmul_(running.label_rows, running.slope[:, None], value=-1.0)


def as_operand(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of the head, contiguous, in the dtype of products: another one under autocast."""
    return rows.to(dtype).contiguous()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply in float32 operands that may be narrower."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type == "cpu":
        return left.float() @ right.float()
    if left.device.type == "meta":
        return left.new_empty((len(left), right.shape[1]), dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32)


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add to ``sums``, in float32, the matrix product of operands that may be narrower."""
    if left.dtype == torch.float32:
        sums.addmm_(left, right)
    elif left.device.type == "cuda":
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    elif not left.is_meta:
        sums.addmm_(left.float(), right.float())


def logits_of(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    steps: Sequence[Step],
    wants_slope: bool,
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Compute the logits of some rows of the head, and the derivative of ``steps`` there."""
    logits = product(hidden, rows.t())
    if bias is not None:
        logits += bias
    slope: torch.Tensor | float = 1.0
    for kind, number in steps:
        if kind == "tanh":
            logits.tanh_()
            if wants_slope:
                slope = slope * (1.0 - logits * logits)
        elif kind == "multiply":
            logits *= number
            slope = slope * number
        else:
            logits /= number
            slope = slope / number
    return logits, slope
