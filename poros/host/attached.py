"""A store on the model whose tensors lie in it: what a loader leaves, and preparing takes over.

See "Adoption" in ``poros.host.store``.
"""

from typing import Any

from torch import nn

from poros.host.store import HostStore

_ATTACHED = "_poros_store"


class _Attached:
    """Holds a store in a module's ``__dict__``; copies of the module hold None instead."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def attach_store(model: nn.Module, store: HostStore) -> None:
    """Put ``store``, one slab per decoder layer, on the model whose tensors lie in it.

    ``poros.prepare`` adopts it. A deep copy or a pickle of the model has tensors of its own, and no
    store.
    """
    model.__dict__[_ATTACHED] = _Attached(store)


def attached_store(model: nn.Module) -> HostStore | None:
    """The store that ``attach_store`` has put on ``model``, if any."""
    found = model.__dict__.get(_ATTACHED)
    return found.store if isinstance(found, _Attached) else None


def detach_store(model: nn.Module) -> None:
    """Remove what ``attach_store`` has put on ``model``: its tensors have moved away."""
    model.__dict__.pop(_ATTACHED, None)
