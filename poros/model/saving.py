"""Keeps bytes that were lost from being saved: those of layers that stay in a file.

``state_dict`` gives views of the mapped file, which takes no time and no memory, so that adapters
can be saved whatever has become of the base. If the file is no longer what it was, the tensors over
it come as ``LostTensor``, which raises at any use.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poros.errors import CheckpointFormatError
from poros.host.disk import DiskStore

logger = logging.getLogger(__name__)


class LostTensor(torch.Tensor):
    """Replaces a tensor whose bytes are lost: any use raises ``CheckpointFormatError``.

    Args:
        like: A tensor of the same form.
        why: The error's text.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, why: str) -> "LostTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.__dict__["why"] = why
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lost = (each for each in tree_leaves((args, kwargs)) if isinstance(each, LostTensor))
        raise CheckpointFormatError(next(lost).__dict__["why"])

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


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
                    state[name] = LostTensor(tensor, f"{name}: {error}")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is not None:
            self._store.require_intact()  # before its layers are copied
        return _Watch, (None,)
