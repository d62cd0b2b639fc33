"""Saves a model some of whose layers stay in a file: their bytes are read and checked.

``state_dict`` gives views of the mapped file, which takes no time and no memory, so that adapters
can be saved whatever has become of the base. If the file is no longer what it was, the tensors over
it come as ``LostTensor``, which raises at any use. ``save_pretrained`` of the base, which uses them
all, gets tensors that were read from the file instead, as far as there is memory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError
from poros.host.disk import DiskStore
from poros.host.limits import RESERVE_NUM_BYTES, host_memory_left
from poros.utils.formatting import size

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
    """Patch ``state_dict`` and ``save_pretrained`` of a loaded model to read its file.

    A copy or a pickle of the model, whose tensors are its own, has neither.

    Args:
        model: A transformers model; its layers lie in ``store``.
        store: One slab per layer.
    """
    if store.behind is None:
        return
    watch = _Watch(store)
    model.register_state_dict_post_hook(watch)
    model.__dict__["save_pretrained"] = _Saving(model, watch)


class _Watch:
    """The hook behind ``state_dict``. That of a copy has no store, and does nothing."""

    def __init__(self, store: DiskStore | None) -> None:
        self._store = store
        self._is_saving = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let ``state_dict`` read from the file inside the body."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def __call__(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        names = [name for name, tensor in state.items() if self._is_in_file(tensor)]
        if not names or self._store is None:
            return
        if self._is_saving:
            _read(self._store, state, names)
            return
        try:
            self._store.require_intact()
        except CheckpointFormatError as error:
            logger.error("poros: %s", error)
            for name in names:
                state[name] = LostTensor.in_place_of(state[name], f"{name}: {error}")

    def require_intact(self) -> None:
        """Check the file, such as before its layers are copied."""
        if self._store is not None:
            self._store.require_intact()

    def __reduce__(self) -> tuple[Any, ...]:
        self.require_intact()
        return _Watch, (None,)

    def _is_in_file(self, value: Any) -> bool:
        behind = None if self._store is None else self._store.behind
        return behind is not None and isinstance(value, torch.Tensor) and behind.holds(value)


def _read(store: DiskStore, state: dict[str, Any], names: list[str]) -> None:
    """Replace tensors by what is read from the file, as far as there is memory; else check it."""
    tensors = [state[name].detach() for name in names]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    room = host_memory_left()
    if room is None or num_bytes + RESERVE_NUM_BYTES <= room.num_bytes:
        state.update(zip(names, store.at_rest(tensors), strict=True))
        return
    logger.warning(
        "poros: %s of layers do not fit in host memory (%s), so they are checked and saved "
        "from %s; do not write to that file meanwhile",
        size(num_bytes),
        room.limit,
        store.file,
    )
    for _ in store.at_rest(tensors):
        pass


class _Saving:
    """The patched ``save_pretrained`` of one model."""

    def __init__(self, model: Any, watch: _Watch) -> None:
        self._model = model  # as a bound method does: load(...).save_pretrained(...)
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.saving():
            saved = _plain(self._model)(*args, **kwargs)
        self._watch.require_intact()
        return saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain(memo[id(self._model)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self._model,)


def _plain(model: Any) -> Any:
    return MethodType(type(model).save_pretrained, model)
