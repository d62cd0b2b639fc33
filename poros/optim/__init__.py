"""Optimizers whose state is smaller than the gradients: ``Flora`` and its Trainer callback."""

from typing import Any

from poros.optim.flora import Flora

__all__ = ["Flora", "FloraCallback"]


def __getattr__(name: str) -> Any:
    if name == "FloraCallback":  # it needs transformers
        from poros.optim.callback import FloraCallback

        return FloraCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
