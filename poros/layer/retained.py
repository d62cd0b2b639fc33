"""What autograd keeps of a layer from its forward on, and what it must not keep.

The graph of a forward is dropped, so nothing of it needs a slot's memory later, and nothing may
have it: by then another block lies there. The tensors that a layer was given are kept by autograd
itself, which notices that one was edited in place.
"""

import gc
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from poros.errors import PreparedModelError, RematerializationError, UnsupportedModelError


def is_packed_by_others() -> bool:
    """Whether the caller wants to keep saved tensors elsewhere (``save_on_cpu``).

    Not those of a graph that is dropped: packed, they would keep each other.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def without_slot(slot: torch.Tensor) -> AbstractContextManager[None]:
    """A graph made inside keeps nothing of ``slot``, and says so if it is needed.

    What a hook computes beside the layer, from detached tensors, keeps what it needs.
    """
    memory = slot.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        if tensor.untyped_storage().data_ptr() == memory:
            return None
        # Detached, so that a node that keeps its own result does not keep itself.
        return tensor.detach(), tensor._version

    def unpack(kept: tuple[torch.Tensor, int] | None) -> torch.Tensor:
        if kept is None:
            raise PreparedModelError(
                "expected gradients to flow through the outputs of layers only, found a backward "
                "through a tensor taken from inside a layer (by a hook?). It cannot be recomputed; "
                "take the tensor from what a layer returns"
            )
        tensor, version = kept
        if tensor._version != version:
            raise RematerializationError(
                "expected the tensors of a backward as they were in the forward, found one of "
                f"shape {tuple(tensor.shape)} from inside a layer that was edited in place"
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Remains:
    """Tells whether the graph of a layer's results outlives them, held by a tensor from inside it.

    For layers whose graph cannot be made such that nothing flows through it: compiled ones.

    Args:
        results: Of the layer.
    """

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self._marks: list[weakref.ref[_Mark]] = []
        seen: set[Any] = set()
        queue: list[Any] = [result.grad_fn for result in results]
        while queue:
            node = queue.pop()
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            # Lives as long as the operator itself, of which Python has only seen a handle.
            mark = node.metadata[_Mark] = _Mark()
            self._marks.append(weakref.ref(mark))
            queue += [following for following, _ in node.next_functions]

    def require_none(self, name: str) -> None:
        """Raise if somebody holds a part of it; ``results`` have to be gone.

        Raises:
            UnsupportedModelError: If so.
        """
        if self._is_alive():
            gc.collect()  # what only a cycle holds is nobody's
        if self._is_alive():
            raise UnsupportedModelError(
                f"{name}: expected that nothing but what a compiled layer returns keeps its graph, "
                "found a tensor taken from inside it (by a hook?), whose gradient would be lost. "
                "Detach it, take the tensor from what the layer returns, or do not compile"
            )

    def _is_alive(self) -> bool:
        return any(mark() is not None for mark in self._marks)


class _Mark:
    """Held by an operator of a graph."""


def saved_tensors(ctx: FunctionCtx, name: str) -> tuple[torch.Tensor, ...]:
    """What layer ``name`` was given, as it was.

    Raises:
        RematerializationError: If some of it was edited in place since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RematerializationError(
            f"{name}: its input, another tensor it was given or one of its adapters was edited in "
            "place between forward and backward (an optimizer step in between?), so the forward "
            f"cannot be recomputed; edit it after backward. PyTorch says: {error}"
        ) from error
