"""Whether autocast is on, and what it makes of a parameter and keeps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from poros.errors import UnsupportedModelError

_ITSELF: Any = torch.Tensor.resolve_conj
"""Gives a real tensor itself, without a call of Python for each that is saved."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """In which autocast multiplies on ``device``; None if it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off on ``device``."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def cached_cast(
    parameter: torch.Tensor, empty: dict[int, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """The cast that the active autocast region keeps of ``parameter``, made if there is none yet.

    The cast hangs in the graph behind the parameter, as it does for each operator that uses it.

    Args:
        parameter: Of one dimension or more.
        empty: Matrices without columns, by their rows, for a row of calls within one region.

    Returns:
        In the region's dtype, in whatever shape; None if the region keeps none of it.
    """
    kind = parameter.device.type
    if not (parameter.dtype is torch.float32 and parameter.dim()):
        return None
    if not torch.is_autocast_enabled(kind):
        return None
    empty = {} if empty is None else empty
    rows, was_enabled = parameter.shape[-1], torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    torch._C._autograd._push_saved_tensors_default_hooks(_ITSELF, _ITSELF)
    try:
        # Any operator that autocast runs in the low precision; of nothing. It saves the cast.
        nothing = empty.get(rows)
        if nothing is None:
            dtype = torch.get_autocast_dtype(kind)
            nothing = parameter.new_empty(rows, 0, dtype=dtype, requires_grad=True)
            empty[rows] = nothing
        node: Any = torch.matmul(parameter, nothing).grad_fn
        while not hasattr(node, "_saved_self"):
            node = node.next_functions[0][0]
        cast: torch.Tensor = node._saved_self
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._set_grad_enabled(was_enabled)
    return cast if cast.dtype != parameter.dtype else None


def require_current(name: str, reused: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise if a cast that the region has kept is not the one of its parameter now.

    Args:
        name: The layer's qualified name.
        reused: Casts, each with its parameter.

    Raises:
        UnsupportedModelError: If so.
    """
    if not reused:
        return
    # Of the bits: a fused optimizer's step does not count as an edit.
    are_same = [
        torch.eq(
            *(each.detach().to(cast.dtype).view(torch.int16).flatten() for each in (cast, now))
        )
        for cast, now in reused
    ]
    if not torch.cat(are_same).all():
        raise UnsupportedModelError(
            f"{name}: expected its adapters as they were when this autocast region cast "
            "them, found them updated since. A resident run goes on with the old casts until "
            "the region ends; a streamed run cannot. Open the region anew after each step of "
            "the optimizer"
        )
