"""Adapter parameters that autocast casts: in whose order and in which sums their gradients arrive.

Inside one region autocast casts a parameter once, at its first use by anybody, and all uses share
the cast. So a resident run hands a gradient over when autograd gets to that one cast, which may be
far behind the layer: after everything that was made later. And it sums the gradients of all these
uses in the low precision, and casts the sum back. A layer that is one node of the graph casts for
itself and has its own gradient in full.

Note: Through the cast of the region
    What a layer hands over goes through the cast that the region keeps, which it has the region
    make if there is none yet; so it arrives in the resident order, and autograd adds it in the low
    precision to what arrives from elsewhere: other layers, other forwards, a penalty. That loses
    nothing, since a layer's gradient of such a parameter is a number of the low precision already.
    But of a NaN the low precision keeps no bits: where it arrives alone the very gradient of the
    layer leaves the cast, else it is an error. Nothing is left on the parameter, and the cast goes
    with the region.

    A cast that is older than an update of its parameter is what a resident run goes on with, until
    the region ends. The layer has cast anew; so this is refused.

    Where the region ends with the call of the model, and a layer uses each of its adapters once,
    nobody else can use its casts; then none is made.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from poros.errors import UnsupportedModelError
from poros.kernels.autocast import cached_cast, require_current
from poros.replay.order import CAST
from poros.stream.body import ModelContext

_CARRIED = "poros: carried"


class SharedCasts:
    """The casts of one layer's parameters in the region of one of its forwards.

    Args:
        name: The layer's qualified name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reused: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Casts that were there before, each with its parameter."""

    def through(self, parameter: torch.Tensor) -> torch.Tensor:
        """``parameter``, such that its gradient goes through the cast that the region keeps."""
        before = torch._C._autograd._get_sequence_nr()
        cast: Any = cached_cast(parameter)
        if cast is None:
            return parameter[...]
        node = cast.grad_fn
        while node.name() != CAST:
            node = node.next_functions[0][0]
        if node._sequence_nr() < before:
            self._reused.append((cast.detach(), parameter.detach()))
        # One for all forwards of a region: what is registered stays as long as the cast.
        carried = node.metadata.get(_CARRIED)
        if carried is None:
            carried = node.metadata[_CARRIED] = _Carried(self._name)
            node.register_hook(carried.give)
        given: torch.Tensor = _ThroughCast.apply(carried, cast, parameter)
        return given

    def require_current(self) -> None:
        """See the function of this name."""
        reused, self._reused = self._reused, []
        require_current(self._name, reused)


class _Carried:
    """What layers have handed to one cast in the backward that runs now.

    Args:
        name: The qualified name of the layer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task = -1
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each a gradient in the low precision, and the same in full."""

    def add(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``gradient`` in the low precision."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._pairs = task, []
        low = gradient.to(dtype)
        self._pairs.append((low, gradient))
        return low

    def give(
        self, inputs: object, outputs: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor] | None:
        """The hook on the cast: what leaves it."""
        pairs, self._pairs = self._pairs, []
        if self._task != torch._C._current_graph_task_id() or not pairs:
            return None
        if len(pairs) == 1 and _is_same(outputs[0], pairs[0][0]):
            return (pairs[0][1],)
        # Autograd has summed in the low precision and casts the sum back, as for a resident layer.
        are_exact = [torch.equal(_bits(low.to(full.dtype)), _bits(full)) for low, full in pairs]
        if not all(are_exact):
            raise UnsupportedModelError(
                f"{self._name}: expected gradients of an adapter that is used several times in an "
                "autocast region as numbers of the low precision, found NaN, of which the low "
                "precision keeps no more than that. Train without autocast, or look for where it "
                "comes from"
            )
        return None


class _ThroughCast(torch.autograd.Function):
    """A parameter out of its cast; see "Through the cast of the region"."""

    @staticmethod
    def forward(
        ctx: Any, carried: _Carried, cast: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.carried, ctx.shape, ctx.dtype = carried, cast.shape, cast.dtype
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        return None, ctx.carried.add(gradient, ctx.dtype).view(ctx.shape), None


def _is_same(gradient: torch.Tensor | None, other: torch.Tensor) -> bool:
    return (
        gradient is not None
        and gradient.data_ptr() == other.data_ptr()
        and gradient._version == other._version
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def confines_autocast(context: ModelContext) -> bool:
    """Whether the active region ends with the call of the model that runs now.

    Accelerate wraps the forward of a model in one: nobody else can use a parameter in it.
    """
    if context.is_confined is not None:
        return context.is_confined
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    frame = inspect.currentframe() if nesting == 2 else None
    is_inside = False
    while frame is not None:
        name = frame.f_code.co_name
        if name == "decorate_autocast":
            is_inside = frame.f_globals.get("__name__") == "torch.amp.autocast_mode"
        elif name == "_call_impl" and context.is_model(frame.f_locals.get("self")):
            return is_inside
        frame = frame.f_back
    return False
