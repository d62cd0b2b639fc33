"""Cross entropy of a head's logits, one slice of the vocabulary at a time.

Note: One pass
    The logits of all tokens over the whole vocabulary are the largest tensor of a training step,
    and each is needed for a moment only. So they are made slice by slice, and of each slice three
    things are kept for every token, in float32: the largest logit so far, the sum of exponentials
    relative to it, and the sum of the slice's rows of the head weighted by these exponentials (see
    ``poros.kernels.online_softmax``). In the end the second sum over the first is the expected row,
    and the gradient of a token's loss by its hidden state is the expected row less the label's own.
    The head is read once, and backward reads nothing.

Note: Arithmetic
    Products take the operands in the head's dtype and add up in float32, which is what comes out;
    everything else is float32. Logits are not rounded to the head's dtype, as those of a plain
    model are, so the loss is not that one's to the bit; in bfloat16 it is nearer to the exact one.
    How wide a slice is depends on shapes alone, so that the same batch gives the same bits wherever
    the head lies and however much memory there is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from poros.errors import UnsupportedModelError
from poros.kernels.online_softmax import OnlineSoftmaxState, add_logits
from poros.utils.profiling import labelled

_MOST_LOGITS = 2**23
"""Elements of a slice of logits: 34 MB in float32."""
_MOST_WEIGHTS = 2**24
"""Elements of a slice of the head: 34 MB in bfloat16."""
_LEAST_WIDTH = 512
_ALIGNMENT = 128

Slices = Callable[[int], Iterator[tuple[int, torch.Tensor]]]
"""Takes a width, and gives the head's rows in order, so many at a time: the number of the first,
and the rows, of shape (width, columns; the last may be fewer), on the device. Rows are not read any
more once the next ones are asked for. Its ``known``, if it has one, is asked before it is read: it
takes ``LossInputs``, and gives the ``SlicedLossState`` of all slices if it was computed ahead."""


def slice_width(num_tokens: int, num_rows: int, num_columns: int) -> int:
    """Choose the number of the head's rows in a slice.

    Args:
        num_tokens: Of the batch.
        num_rows: Of the head: the size of the vocabulary.
        num_columns: Of the head: the size of a hidden state.
    """
    most = min(_MOST_LOGITS // max(num_tokens, 1), _MOST_WEIGHTS // max(num_columns, 1))
    return min(max(most // _ALIGNMENT * _ALIGNMENT, _LEAST_WIDTH), num_rows)


class Step(NamedTuple):
    """An operation on logits, element by element."""

    kind: Literal["multiply", "divide", "tanh"]
    number: float = 1.0


class LossInputs(NamedTuple):
    """The inputs of a sliced loss: see ``sliced_cross_entropy``."""

    hidden: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    read: Slices
    width: int
    steps: Sequence[Step]
    wants_gradient: bool
    """Of the hidden states."""


class SlicedLossState:
    """The state of each token after some slices. See "One pass".

    Args:
        given: Its hidden states and bias are taken without their graph.
    """

    def __init__(self, given: LossInputs) -> None:
        self._hidden = given.hidden.detach()
        self._bias = None if given.bias is None else given.bias.detach()
        self._steps = given.steps
        num_columns = given.hidden.shape[1] if given.wants_gradient else 0
        self._running = OnlineSoftmaxState.of(given.labels, num_columns, given.hidden.dtype)

    def add(self, first: int, rows: torch.Tensor) -> None:
        """Update the state with some rows of the head, of which ``first`` is the number."""
        with labelled("head", f"rows {first}"):
            running = self._running
            # In the dtype of products: another one under autocast.
            rows = rows.to(self._hidden.dtype).contiguous()
            part = None if self._bias is None else self._bias[first : first + len(rows)]
            wants_slope = running.wants_rows
            logits, slope = _logits_of(self._hidden, rows, part, self._steps, wants_slope)
            weights = add_logits(running, first, logits, slope, rows)
            del logits, slope
            if weights is not None:
                _add_product(running.rows, weights, rows)

    def losses(self) -> torch.Tensor:
        """Return the loss of each token, as if its label counted."""
        running = self._running
        return running.total.log() + running.most - running.of_label

    def gradient(self) -> torch.Tensor:
        """Return the gradient of each token's hidden state, in float32. Consumes the sums."""
        running = self._running
        rows = running.rows.div_(running.total[:, None])
        return rows.addcmul_(running.label_rows, running.slope[:, None], value=-1.0)


def sliced_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    read: Slices,
    num_rows: int,
    *,
    bias: torch.Tensor | None = None,
    steps: Sequence[Step] = (),
    ignore_index: int = -100,
) -> torch.Tensor:
    """Sum over tokens the cross entropy of ``steps(hidden @ head.T + bias)``.

    Args:
        hidden: Of shape (tokens, columns), in the dtype that products are to take. Gets a gradient.
        labels: Of shape (tokens,), integers: the row of each token's label, or ``ignore_index``.
        read: Gives the head's rows, in slices.
        num_rows: Of the head.
        bias: Of shape (num_rows,).
        steps: What becomes of the logits before the softmax, in order.
        ignore_index: Tokens with this label count nothing.

    Returns:
        A float32 scalar; 0 if no token has a label.

    Streams:
        Everything is queued on the compute stream; on a GPU the host waits for nothing.

    Exactness:
        Bits depend on the values and shapes of the arguments alone. See "Arithmetic" above.

    Raises:
        IndexError: If a label is out of range. On a GPU the assertion fails on the device.
        UnsupportedModelError: In a backward that is to be differentiated again.
        ValueError: If there are more or fewer labels than tokens.
    """
    if labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels: expected one for each of {len(hidden)} tokens, found {labels.numel()}"
        )
    labels = labels.long()
    _require_in_range(labels, num_rows, ignore_index)
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    width = slice_width(hidden.shape[0], num_rows, hidden.shape[1])
    given = LossInputs(hidden, bias, labels, read, width, tuple(steps), wants_gradient)
    ask: Callable[[LossInputs], SlicedLossState | None] | None = getattr(read, "known", None)
    known = None if ask is None else ask(given)
    loss: torch.Tensor = _SlicedCrossEntropy.apply(hidden, given, known, ignore_index)
    return loss


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        given: LossInputs,
        known: SlicedLossState | None,
        ignore_index: int,
    ) -> torch.Tensor:
        found = SlicedLossState(given) if known is None else known
        if known is None:
            for first, rows in given.read(given.width):
                found.add(first, rows)
        ctx.save_for_backward(found.gradient() if given.wants_gradient else None)
        ctx.is_ignored, ctx.dtype = given.labels == ignore_index, hidden.dtype
        return found.losses().masked_fill(ctx.is_ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "loss: expected a backward that is not differentiated again, found create_graph="
                "True; gradients of gradients need loss='reference'"
            )
        (by_hidden,) = ctx.saved_tensors
        scaled = None
        if by_hidden is not None:
            # Rounded once, and on a GPU without a float32 tensor of it.
            scaled = torch.empty_like(by_hidden, dtype=ctx.dtype)
            torch.mul(by_hidden, gradients[0], out=scaled)
            # Also where the factor is not finite: a mean over no label.
            scaled.masked_fill_(ctx.is_ignored[:, None], 0.0)
        return scaled, None, None, None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
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


def _logits_of(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    steps: Sequence[Step],
    wants_slope: bool,
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Compute the logits of some rows of the head, and the derivative of ``steps`` there."""
    logits = _product(hidden, rows.t())
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


def _require_in_range(labels: torch.Tensor, num_rows: int, ignore_index: int) -> None:
    is_right = ((labels >= 0) & (labels < num_rows)) | (labels == ignore_index)
    if labels.device.type == "cuda":
        torch._assert_async(is_right.all(), f"a label is not below {num_rows}")
    elif labels.device.type == "cpu" and not bool(is_right.all()):
        found = int(labels[~is_right][0])
        raise IndexError(
            f"labels: expected {ignore_index} or numbers from 0 to {num_rows - 1}, the rows of "
            f"the head, found {found}"
        )
