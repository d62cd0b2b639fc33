"""Label smoothing and z-loss for trainers, in slices of the head like the loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poros.errors import PolicyError
from poros.head.logits import LazyLogits
from poros.head.online import Regularizer
from poros.head.takeover import sliced_loss

_IGNORED = -100
"""The label of tokens that count nothing."""


class RegularizedLoss:
    """Replaces a Trainer's ``label_smoother``, with the same arguments and meaning.

    The Trainer's own reads whole logits. Where the model's loss is computed in slices of the
    vocabulary, so is this one (``poros.head.loss``, with its sources), and the logits of a batch
    are never there; elsewhere it is the Trainer's own.

    Args:
        own: The Trainer's own; None if labels are not smoothed.
        z_loss: At least 0: the weight of the square of the logarithm of the sum of exponentials of
            a token's logits.

    Raises:
        PolicyError: If ``z_loss`` is out of range.
    """

    def __init__(self, own: Any = None, z_loss: float = 0.0) -> None:
        if isinstance(z_loss, bool) or not 0 <= z_loss < float("inf"):
            raise PolicyError(f"z_loss: expected a number that is 0 or above, found {z_loss!r}")
        self._own: Callable[..., torch.Tensor] | None = own
        self.regularizer = Regularizer(0.0 if own is None else own.epsilon, z_loss)

    def __call__(self, model_output: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """Compute the loss of one micro-batch: a scalar.

        Args:
            model_output: Of the model, with ``logits`` of shape (rows, tokens, vocabulary).
            labels: Of shape (rows, tokens).
            **options: As the Trainer gives them: ``shift_labels``, whether a token's label is the
                one behind it, and ``num_items_in_batch``, by what the sum is divided; without it,
                the number of labels that count.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        own_labels = labels
        if options.get("shift_labels"):
            labels = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        number = options.get("num_items_in_batch")
        if isinstance(logits, LazyLogits) and not logits.is_computed:
            return sliced_loss(logits, labels, number, _IGNORED, labels, self.regularizer)
        logits, labels = logits.flatten(0, -2), labels.reshape(-1).to(logits.device)
        count = (labels != _IGNORED).sum() if number is None else number
        if isinstance(count, torch.Tensor):
            count = count.to(logits.device)
        if self._own is not None:
            loss = self._own(model_output, own_labels, **options)
        else:
            loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / count
        if self.regularizer.z_loss:
            squares = torch.logsumexp(logits.float(), dim=-1).square()
            total = squares.masked_fill(labels == _IGNORED, 0.0).sum()
            loss = loss + self.regularizer.z_loss * total / count
        return loss
