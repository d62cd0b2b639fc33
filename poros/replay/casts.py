"""Casts of adapters that an autocast region keeps: where the gradients of a replayed layer go.

Inside one region autocast casts a parameter once, at its first use by anybody, and all uses share
the cast. So a resident run hands a gradient over when autograd gets to that one cast, which may be
far behind the layer: after everything that was made later. And it sums the gradients of all these
uses in the low precision, and casts the sum back.

Note: Through the cast of the region
    So what a layer gives is the gradient of the cast, in the low precision, and goes to the cast
    that the region keeps, which it has the region make if there is none yet: autograd does the
    rest. A cast that is older than an update of its parameter is what a resident run goes on with,
    until the region ends. A replayed layer has cast anew; so this is refused.

    Where the region ends with the call of the model, and a layer uses each of its adapters once,
    nobody else can use its casts; then none is made, and a layer gives the gradient of the
    parameter.
"""

import inspect

import torch

from poros.kernels.autocast import cached_cast, require_current
from poros.stream.body import ModelContext


class RegionCasts:
    """The casts of one layer's parameters in the region of one of its forwards."""

    def __init__(self) -> None:
        self._reused: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Casts that were there before, each with its parameter."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The cast that the region keeps of ``parameter``, with its graph, in its shape."""
        before = torch._C._autograd._get_sequence_nr()
        cast = cached_cast(parameter)
        if cast is None:
            return parameter
        node = cast.grad_fn
        if node is None or node._sequence_nr() < before:
            self._reused.append((cast.detach(), parameter.detach()))
        return cast.view(parameter.shape)

    def require_current(self, name: str) -> None:
        """Raise ``UnsupportedModelError`` if one is not that of its parameter in layer ``name``."""
        reused, self._reused = self._reused, []
        require_current(name, reused)


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
