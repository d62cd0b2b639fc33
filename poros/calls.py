"""Moves and casts that a streamed layer has to refuse."""

from collections.abc import Callable, Iterable

import torch

from poros.errors import PreparedModelError


def require_harmless(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tensors: Iterable[torch.Tensor],
    device: torch.device,
    name: str,
) -> None:
    """Raise unless ``fn``, as given to ``Module._apply``, leaves dtypes and ``device`` alone."""
    for dtype in sorted({each.dtype for each in tensors if each.is_floating_point()}, key=str):
        moved = fn(torch.empty(1, dtype=dtype, device=device))
        if moved.dtype != dtype or moved.device != device:
            raise PreparedModelError(
                f"{name}: expected to stay {dtype} on {device} while prepared, found a request for "
                f"{moved.dtype} on {moved.device}. The streamed base would not follow. Call "
                "poros.restore(model), move or cast it, then prepare again"
            )
