"""Whether autocast is on, and what it makes of a parameter and keeps."""

from collections.abc import Sequence
from typing import Any

import torch

from poros.errors import UnsupportedModelError


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """In which autocast multiplies on ``device``; None if it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cached_cast(parameter: torch.Tensor) -> torch.Tensor | None:
    """The cast that the active autocast region keeps of ``parameter``, made if there is none yet.

    The cast hangs in the graph behind the parameter, as it does for each operator that uses it.

    Args:
        parameter: Of one dimension or more.

    Returns:
        In the region's dtype, in whatever shape; None if the region keeps none of it.
    """
    if parameter.dtype != torch.float32 or not parameter.dim():
        return None
    # Any operator that autocast runs in the low precision; of nothing. It saves the cast.
    nothing = parameter.new_empty(parameter.shape[-1], 0, requires_grad=True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        product: Any = torch.matmul(parameter, nothing)
        node = product.grad_fn
        while not hasattr(node, "_saved_self"):
            node = node.next_functions[0][0]
        cast: torch.Tensor = node._saved_self
    return cast if cast.dtype != parameter.dtype else None


def require_current(name: str, reused: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise if a cast that the region has kept is not the one of its parameter now.

    Args:
        name: The layer's qualified name.
        reused: Casts, each with its parameter; no graph.

    Raises:
        UnsupportedModelError: If so.
    """
    if not reused:
        return
    # Of the bits: a fused optimizer's step does not count as an edit.
    are_same = [
        torch.eq(cast.view(torch.int16).flatten(), now.to(cast.dtype).view(torch.int16).flatten())
        for cast, now in reused
    ]
    if not torch.cat(are_same).all():
        raise UnsupportedModelError(
            f"{name}: expected its adapters as they were when this autocast region cast "
            "them, found them updated since. A resident run goes on with the old casts until "
            "the region ends; a streamed run cannot. Open the region anew after each step of "
            "the optimizer"
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
