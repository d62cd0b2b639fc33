"""Adapter parameters that autocast casts: what a resident run would sum in the low precision.

Inside one region autocast casts a parameter once, and all uses share the cast. So a resident run
sums the gradients of all these uses in the low precision, and casts the sum back. A recomputed
layer casts for itself and hands over its own gradient in full. That is the same as long as the
layer uses the parameter once and nobody else does, in that region and in the same backward.

A second use inside the layer shows in its graph. A use elsewhere (a penalty on the weights) shows
when a gradient reaches the cast that the region keeps: so the layer has the region make it, and
watches it. Nothing is left on the parameter, and the cast goes with the region.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poros.errors import UnsupportedModelError


class SharedCasts:
    """The casts of one layer's parameters in the region of one of its forwards.

    Args:
        name: The layer's qualified name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._used_elsewhere: int | None = None
        self._recomputed: int | None = None
        """The backward in which either happened."""

    def require_single(self, casts: Sequence[torch.Tensor]) -> None:
        """Raise if the layer itself casts one of its parameters more than once.

        Args:
            casts: The parameters, one for each cast.

        Raises:
            UnsupportedModelError: If it does.
        """
        counts = Counter(map(id, casts))
        for parameter in casts:
            count = counts[id(parameter)]
            if count > 1:
                raise UnsupportedModelError(
                    f"{self._name}: expected each adapter parameter to be used once under "
                    f"autocast, found one of shape {tuple(parameter.shape)} used {count} "
                    "times (a module that is called twice?). A resident run casts such a parameter "
                    "once and sums its gradients in the low precision; a streamed run cannot. "
                    "Train without autocast"
                )

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch the casts of ``parameters`` in the region that is active now."""
        for each in parameters:
            node = _cast(each)
            if node is not None:
                node.register_prehook(self._on_gradient)

    def on_recomputation(self) -> None:
        """The layer's own gradients are made in the backward that runs now."""
        self._recomputed = torch._C._current_graph_task_id()
        self._require_apart()

    def _on_gradient(self, gradients: object) -> None:
        self._used_elsewhere = torch._C._current_graph_task_id()
        self._require_apart()

    def _require_apart(self) -> None:
        if self._recomputed == self._used_elsewhere:
            raise UnsupportedModelError(
                f"{self._name}: expected its adapters to be used by this layer alone within an "
                "autocast region and backward, found gradients from elsewhere too (a penalty on "
                "the weights?). A resident run would sum them in the low precision; a streamed run "
                "cannot. Compute the penalty outside of `torch.autocast`, or call its backward "
                "separately, or train without autocast"
            )


def _cast(parameter: torch.Tensor) -> Any:
    """The node of the cast that the region keeps; None if it keeps none."""
    if parameter.dtype != torch.float32 or not parameter.dim():
        return None
    # Any operator that autocast runs in the low precision; of nothing.
    nothing = parameter.new_empty(parameter.shape[-1], 0)
    product: Any = torch.matmul(parameter, nothing)
    node = product.grad_fn
    while node is not None and node.name() != "ToCopyBackward0":
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return node


def is_region_within(is_model: Callable[[Any], bool]) -> bool:
    """Whether the active region ends with the call of the model that runs now.

    Accelerate wraps the forward of a model in one: nobody else can use a parameter in it.
    """
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    frame = inspect.currentframe() if nesting == 2 else None
    is_inside = False
    while frame is not None:
        name = frame.f_code.co_name
        if name == "decorate_autocast":
            is_inside = frame.f_globals.get("__name__") == "torch.amp.autocast_mode"
        elif name == "_call_impl" and is_model(frame.f_locals.get("self")):
            return is_inside
        frame = frame.f_back
    return False
