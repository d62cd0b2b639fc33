"""Keeps bytes that were lost from being saved: those of layers that stay in a file.

``state_dict`` gives views of the mapped file, which takes no time and no memory. If the file is no
longer what it was, that of the base raises. Within the one of a model around it, such as a PEFT
model whose adapters are saved, the tensors over the file are left out: adapters can be saved
whatever has become of the base.
"""

import logging
from typing import Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError
from poros.host.disk import DiskStore

logger = logging.getLogger(__name__)


def watch_saving(model: nn.Module, store: DiskStore) -> None:
    """Have ``state_dict`` of a loaded model, some layers of which lie in ``store``, check its file.

    A copy or a pickle of the model, whose tensors are its own, is not checked.
    """
    if store.behind is not None:
        model.register_state_dict_post_hook(_Watch(store))


class _Watch:
    """The hook behind ``state_dict``. That of a copy has no store, and does nothing."""

    def __init__(self, store: DiskStore | None) -> None:
        self._store = store

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._store is None or self._store.behind is None:
            return
        try:
            self._store.require_intact()
        except CheckpointFormatError as error:
            if not prefix:
                raise
            logger.error("poros: the state of the model is without layers of its base: %s", error)
            for name, tensor in list(state.items()):
                if isinstance(tensor, torch.Tensor) and self._store.behind.holds(tensor):
                    del state[name]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is not None:
            self._store.require_intact()  # before its layers are copied
        return _Watch, (None,)
