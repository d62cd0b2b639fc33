"""Patches a model's head and loss: a sliced loss, and logits computed when read.

Note: Generically
    Nothing here knows a family. The head, an ordinary linear module, hands out ``LazyLogits``
    instead of logits, and the model's ``loss_function``, which transformers lets one set, takes
    them. What a family does in between is noted by the logits, or has them computed; then its loss
    is the one it has always had.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from poros.errors import PreparedModelError
from poros.head.host_matrix import HostMatrix
from poros.head.logits import LazyLogits, Origin
from poros.head.loss import Slices, sliced_cross_entropy
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_LOUD_NUM_BYTES = 2**26
"""Logits from this size on are mentioned when they are computed."""


def slice_loss(base: Any, head: nn.Linear, read: Slices | None = None) -> Callable[[], None]:
    """Patch ``base`` to compute its loss in slices of its head.

    Args:
        base: A transformers causal language model.
        head: Its head, frozen.
        read: Gives the rows of the head; those of its weight if None.

    Returns:
        What undoes it.
    """
    had_loss = base.__dict__.get("_loss_function")
    loss = _Loss(base.loss_function)
    patched = _Head(head, read)

    def undo() -> None:
        if head.__dict__.get("forward") == patched.forward:
            del head.__dict__["forward"]
        if base.__dict__.get("_loss_function") is loss:
            del base._loss_function
            if had_loss is not None:
                base.loss_function = had_loss

    try:
        head.__dict__["forward"] = patched.forward
        base.loss_function = loss
    except BaseException:
        undo()
        raise
    return undo


class _Head:
    """The patched forward of one head. A copy of the module has a copy of this."""

    def __init__(self, module: nn.Linear, reader: Slices | None) -> None:
        self._module = module
        self._reader = reader
        """Brings the rows, if they are in host memory."""
        self._host = None if reader is None else cast(HostMatrix, module.weight).host
        self._known = type(module).forward
        self._has_warned = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Replace the head's own forward.

        Raises:
            PreparedModelError: If the weight whose bytes are in host memory is another one now.
        """
        weight = self._module.weight
        if self._reader is not None:
            if not isinstance(weight, HostMatrix) or weight.host is not self._host:
                raise PreparedModelError(
                    "the head's weight: expected the one that poros.prepare took over, found it "
                    "replaced; its bytes are in host memory. Call poros.restore(model) before "
                    "changing the head, then prepare again"
                )
            weight.require_as_prepared()
        is_usual = (
            not _has_backward_hooks(self._module)
            # Made trainable, or a trained copy of PEFT's: it computes its logits at once.
            and not any(parameter.requires_grad for parameter in self._module.parameters())
            and type(input) is torch.Tensor
            and type(self._module).forward is self._known
            and input.shape[-1:] == (self._module.in_features,)
            and {input.dtype, weight.dtype} <= _DTYPES
        )
        if is_usual:
            origin = Origin.of(input, self._module, self._warn, self)
            if origin.autocast.enabled or input.dtype == weight.dtype:
                return LazyLogits(origin)
        return type(self._module).forward(self._module, input)

    def rows_of(self, weight: torch.Tensor) -> Slices:
        """Return the reader of ``weight``'s rows, the head's weight when its logits were made."""
        return self._reader or partial(_slices, weight.detach())

    def _warn(self, num_bytes: int) -> None:
        if num_bytes >= _LOUD_NUM_BYTES and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "poros: something other than the model's loss reads the logits (compute_metrics or "
                "a custom loss?), so they are computed as a whole, which takes %s",
                size(num_bytes),
            )


class _Loss:
    """Replaces transformers' ``ForCausalLMLoss``, with the same arguments and meaning."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the loss.

        Raises:
            PreparedModelError: If the head, or what it was given, was written to meanwhile.
        """
        if (
            not isinstance(logits, LazyLogits)
            or logits.is_computed
            or vocab_size != logits.shape[-1]
        ):
            loss: torch.Tensor = self._own(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
            return loss
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        origin = logits.take_loss()
        weight = origin.weight
        shift_labels = shift_labels.reshape(-1).to(weight.device)
        # A step on the way here may have taken no gradient.
        with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
            hidden = origin.intact()
            total = sliced_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]).to(origin.dtype),
                shift_labels,
                origin.source.rows_of(weight),
                len(weight),
                bias=origin.bias,
                steps=logits.steps,
                ignore_index=ignore_index,
            )
        if num_items_in_batch is None:
            return total / (shift_labels != ignore_index).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether backward hooks, global ones too, see the gradient of the module's result."""
    full, others = module._get_backward_hooks()
    return bool(full or others or module._get_backward_pre_hooks())


def _slices(weight: torch.Tensor, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    firsts: Sequence[int] = range(0, len(weight), width)
    if weight.is_meta:
        # A plan learns from the first ones and the last one what all of them take.
        firsts = sorted({*firsts[:3], *firsts[-1:]})
    for first in firsts:
        yield first, weight[first : first + width]
