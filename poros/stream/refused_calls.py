"""Calls that a prepared model and its layers have to refuse: moves, casts, copies."""

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from poros.errors import PreparedModelError, UnsupportedModelError


def require_harmless(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tensors: Iterable[torch.Tensor],
    device: torch.device,
    name: str,
) -> None:
    """Raise unless ``fn``, as given to ``Module._apply``, leaves dtypes and ``device`` alone."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    for dtype in sorted(dtypes, key=str):
        moved = fn(torch.empty(1, dtype=dtype, device=device))
        if moved.dtype != dtype or moved.device != device:
            raise PreparedModelError(
                f"{name}: expected to stay {dtype} on {device} while prepared, found a request for "
                f"{moved.dtype} on {moved.device}. The streamed base would not follow. Call "
                "poros.restore(model), move or cast it, then prepare again"
            )


def refuse_copy(what: str) -> NoReturn:
    """Raise on a copy or a pickle of ``what``."""
    raise PreparedModelError(
        f"expected to copy or pickle a model that is not prepared, found {what}, whose base is in "
        "host memory once and streams through slots of its own. Call poros.restore(model) first, "
        "and poros.prepare on what you copied"
    )


def require_saved_tensor_hooks(name: str) -> None:
    """Raise ``UnsupportedModelError`` within torch.func.grad and its like, for layer ``name``."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"{name}: expected saved-tensor hooks to be allowed, found them disabled, as within "
            "torch.func.grad and vjp: recomputation needs them. Use torch.autograd.grad, or call "
            "poros.restore(model) and differentiate the resident model"
        )
