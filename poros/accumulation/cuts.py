"""Where the graph is cut, and what stands for hidden states that are not there yet."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from poros.accumulation.reasons import NotGrouped
from poros.errors import UnsupportedModelError


class Cut:
    """A value that passes from one part of the graph to the next, and its gradient back.

    Args:
        value: Behind the graph that has made it.
        needs_gradient: Whether anything in that graph is trained.

    Attributes:
        gradient: What has arrived in backward; None before.
        anchor: A leaf below the cut, which gets no gradient.
        is_spent: Whether the gradient was handed on.
    """

    def __init__(self, value: torch.Tensor, needs_gradient: bool) -> None:
        self.gradient: torch.Tensor | None = None
        self.anchor: torch.Tensor | None = None
        self.needs_gradient = needs_gradient
        self.is_spent = False
        self._values = [value]

    def look(self) -> torch.Tensor:
        """The value, which stays; nothing comes back from it."""
        return self._values[-1].detach().requires_grad_(self.needs_gradient)

    def take(self, trained: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The value, behind the cut; for once, since it may be freed from then on.

        Args:
            trained: Parameters before the cut: whoever asks for their gradients alone is refused.
        """
        value = self._values.pop()
        if not self.needs_gradient:
            return value
        self.anchor = torch.empty(0, device=value.device, requires_grad=True)
        taken: torch.Tensor = _Taken.apply(self.anchor, [value], self, *trained)
        return taken


class _Taken(torch.autograd.Function):
    """The value of a ``Cut``; its gradient goes there and no further."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, values: list[torch.Tensor], cut: Cut, *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.has_trained = cut, bool(trained)
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, ...]:
        node = get_gradient_edge(ctx.cut.anchor).node
        if ctx.has_trained and not torch._C._will_engine_execute_node(node):
            raise NotGrouped("the loss takes gradients of single parameters itself")
        if ctx.cut.gradient is not None or ctx.cut.is_spent:
            raise UnsupportedModelError(
                "expected one backward for each micro-batch, found a second one through the last "
                "layer's result. Call backward for each micro-batch, without poros.accumulate or "
                "block-major trainers"
            )
        ctx.cut.gradient = gradient
        return (None,) * len(ctx.needs_input_grad)


class Unread(torch.Tensor):
    """Stands for what a layer would return, until it has: nobody may compute with it."""

    owner: Callable[[], Any]

    @classmethod
    def of(cls, tensor: torch.Tensor, owner: Any) -> "Unread":
        found: Unread = tensor.detach().as_subclass(cls)
        found.owner = weakref.ref(owner)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FORMS or func in _ACCESSORS:
            return super().__torch_function__(func, types, args, kwargs)
        owners = [each.owner() for each in args if isinstance(each, Unread)]
        if any(owner is not None and owner.is_watched for owner in owners):
            raise NotGrouped("the model does something to hidden states between its layers")
        raise UnsupportedModelError(
            "expected hidden states to pass from layer to layer, found some that were kept, of "
            "micro-batches that went through the layers together. Call backward for each "
            "micro-batch, without poros.accumulate or block-major trainers"
        )


_FORMS = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__})
_ACCESSORS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "layout",
        "_version",
    )
)
