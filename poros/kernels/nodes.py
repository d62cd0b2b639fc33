"""Nodes of autograd: those behind others, and what our own share.

That is what they have kept, and results that are no views.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError


def nodes_from(roots: Iterable[Any], known: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of a graph, each once: ``roots`` and all behind them, up to the ``known`` ones."""
    queue, seen = list(roots), {None, *known}
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue += [following for following, _ in node.next_functions]


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls ``method`` as long as its object lives, which graphs may hold."""
    held = WeakMethod(method)

    def hook(*args: Any) -> None:
        found = held()
        if found is not None:
            found(*args)

    return hook


def times(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``nn.functional.linear`` without a graph, and never a view, which it gives of a bias.

    Autograd lets nobody write in place to a view that a custom Function returns.
    """
    product = nn.functional.linear(input, weight, bias)
    if product._is_view():
        product = torch.ops.aten._unsafe_view(product, product.shape)
    return product


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """What a node of an adapter or of a feed-forward has kept for its backward, as it was.

    Raises:
        UnsupportedModelError: If the backward is to be differentiated itself. Autograd's own check
            lets a gradient that needs none pass, and drops the second order.
        RematerializationError: If some of it was written to in place since.
    """
    if torch.is_grad_enabled():
        raise UnsupportedModelError(
            "expected a backward without create_graph, found one that asks for gradients of "
            'gradients, which adapter kernels do not give; use adapter_kernels="peft", or '
            "poros.restore(model)"
        )
    return unwritten_tensors(
        ctx,
        "expected the input of an adapted projection, its frozen weight, gate and up of a "
        "feed-forward and the adapters to be left alone between forward and backward, found one "
        "that was written to in place. Write to a clone; or, if it runs with PEFT alone, use "
        'adapter_kernels="peft" or poros.restore(model)',
    )


def unwritten_tensors(ctx: Any, written: str) -> tuple[Any, ...]:
    """What a node has kept for its backward, as it was.

    Raises:
        RematerializationError: ``written``, if some of it was written to in place since.
    """
    try:
        found: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RematerializationError(f"{written}. PyTorch says: {error}") from error
    return found
