"""Micro-batches that go together on several ranks, under DistributedDataParallel.

DDP exchanges a gradient as soon as autograd has accumulated it in the one backward that it was told
to wait for. So the gradients of all micro-batches but the last are added by hand, with the sums
that autograd makes, and those of the last by autograd itself.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """How a model is trained on several ranks, or on one.

    Attributes:
        inner: The model without what exchanges gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self.inner: nn.Module = model if self._ddp is None else self._ddp.module

    @property
    def is_ddp(self) -> bool:
        return self._ddp is not None

    @property
    def is_synced(self) -> bool:
        """Whether gradients are exchanged in the backward of what is called now."""
        return self._ddp is not None and bool(self._ddp.require_backward_grad_sync)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Gradients of a backward in the body stay with this rank."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    @contextmanager
    def turn(self, number: int, *, is_last: bool) -> Iterator[None]:
        """The code of micro-batch ``number`` of a group begins in the body; 0's turn has come.

        ``is_last``: whether its gradients are exchanged.
        """
        if self._ddp is None or number == 0:
            yield
            return
        names = "require_backward_grad_sync", "require_forward_param_sync"
        before = [getattr(self._ddp, each) for each in names]
        # Buffers came with the first one.
        self._ddp.require_backward_grad_sync, self._ddp.require_forward_param_sync = is_last, False
        try:
            yield
        finally:
            for each, value in zip(names, before, strict=True):
                setattr(self._ddp, each, value)

    @property
    def reason(self) -> str | None:
        """Why DDP would not understand micro-batches that go together; None if it does."""
        if self._ddp is not None and self._ddp.find_unused_parameters:
            # Its search begins at the loss, whose graph ends before the layers.
            return (
                "find_unused_parameters of DistributedDataParallel; a Trainer has it unless "
                "ddp_find_unused_parameters=False"
            )
        if self._ddp is not None and self._ddp.static_graph:
            return "static_graph of DistributedDataParallel"
        return None
