"""Calls that a streamed layer has to refuse because of who makes them, or what for."""

import inspect
from collections.abc import Callable, Iterable

import torch

from poros.errors import PreparedModelError


def refuse_outer_graph(name: str) -> None:
    """Raise if the caller runs inside ``torch.compile`` of something that holds the layers.

    The compiler calls what it may not enter from below its own frame, and says so nowhere else.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "compile_wrapper"
            and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        ):
            raise PreparedModelError(
                f"{name}: expected layers to be compiled one by one, found a forward inside "
                "torch.compile of the whole model (TrainingArguments(torch_compile=True)?). A "
                "resident run would compile its layers too, a streamed one would not; call "
                "layer.compile() for every decoder layer after poros.prepare, and nothing else"
            )
        frame = frame.f_back


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
