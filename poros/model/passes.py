"""What happens before the layers of a prepared model run."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from poros.model.inspect import require_checked
from poros.model.sizing import Sizer
from poros.replay.captures import Captures
from poros.stream.body import ModelContext
from poros.stream.boundary import StreamedLayer, refuse_tracing


class Streaming(Protocol):
    """What streams a prepared model: ``poros.model.runtime.Runtime``.

    Attributes:
        context: What its layers share.
        sizer: Decides on the room that blocks get.
        captures: Its recorded visits; None if no visit is recorded.
        unchecked: What of it neither a gate nor the self-check covers; "" if nothing.
        num_grouped: Micro-batches that go through the blocks together with the one that comes.
    """

    context: ModelContext
    sizer: Sizer
    captures: Captures | None
    unchecked: str
    num_grouped: int

    def make_room(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Give the blocks the room that suits a micro-batch."""

    def streamed_layers(self) -> Iterator[StreamedLayer]:
        """Its layers, in order."""
        ...


def begin_pass(
    streaming: Streaming, holder: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Check a call of the model, make room for the micro-batch, and record visits that are due.

    Args:
        streaming: What streams the model.
        holder: Holds the layers.
        args, kwargs: What it is called with.

    Raises:
        PreparedModelError: If the call is compiled as a whole.
        UnvalidatedArchitectureError: If it is to be trained, and nothing has checked it.
        VRAMBudgetError: If a step needs more than a given budget; the room is what it was.
    """
    refuse_tracing(type(holder).__name__)
    if streaming.unchecked:
        require_checked(streaming.unchecked)
    context, captures = streaming.context, streaming.captures
    stand_in = None if context.in_place is None else context.in_place()

    def make_room() -> None:
        if torch.is_grad_enabled() and streaming.sizer.decides:
            streaming.make_room(args, kwargs)

    if stand_in is None:
        make_room()
    elif not stand_in.begin_pass(make_room):
        return  # its micro-batch is on its way already
    if captures is not None:
        context.visits.end_all()
        layers, is_on = list(streaming.streamed_layers()), streaming.sizer.replays
        if captures.begin_pass(layers, is_on, streaming.num_grouped):
            streaming.sizer.recorded()
