"""Keeps bytes that were lost from being saved: those of layers that stay in a file.

``state_dict`` gives views of the mapped file, which takes no time and no memory, so that adapters
can be saved whatever has become of the base. If the file is no longer what it was, the tensors over
it come as ``LostTensor``, which raises at any use.
"""

import logging
from typing import Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError
from poros.host.disk import DiskStore

logger = logging.getLogger(__name__)


class LostTensor(torch.Tensor):
    """Replaces a tensor whose bytes are lost: any use raises ``CheckpointFormatError``."""

    why: str

    @staticmethod
    def in_place_of(tensor: torch.Tensor, why: str) -> "LostTensor":
        """Make one of the same form."""
        lost: LostTensor = torch.Tensor._make_wrapper_subclass(
            LostTensor, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        lost.__dict__["why"] = why
        return lost

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).values()]
        inside = [
            item
            for value in flat
            for item in (value if isinstance(value, list | tuple) else [value])
        ]
        raise CheckpointFormatError(
            next(tensor.__dict__["why"] for tensor in inside if isinstance(tensor, LostTensor))
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)


def watch_saving(model: nn.Module, store: DiskStore) -> None:
    """Have ``state_dict`` of a loaded model, some layers of which lie in ``store``, check its file.

    A copy or a pickle of the model, whose tensors are its own, is not checked.
    """
    model.register_state_dict_post_hook(_Watch(store))


class _Watch:
    """The hook behind ``state_dict``. That of a copy has no store, and does nothing."""

    def __init__(self, store: DiskStore | None) -> None:
        self._store = store

    def __call__(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if self._store is None:
            return
        try:
            self._store.require_intact()
        except CheckpointFormatError as error:
            logger.error("poros: %s", error)
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and self._store.behind.holds(tensor):
                    state[name] = LostTensor.in_place_of(tensor, f"{name}: {error}")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is not None:
            self._store.require_intact()  # before its layers are copied
        return _Watch, (None,)
