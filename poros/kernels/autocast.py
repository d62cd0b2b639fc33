"""Whether autocast is on, and what it makes of a parameter and keeps."""

from typing import Any

import torch


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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
