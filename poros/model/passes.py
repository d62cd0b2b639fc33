"""What is done as a call of a prepared model begins, before its layers run."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from poros.config import MIN_SLOTS
from poros.errors import UnvalidatedArchitectureError
from poros.model.sizing import ResidencyPlan, Sizer, shape_of
from poros.replay.captures import Captures
from poros.stream.boundary import StreamedLayer, refuse_tracing, streamed_layer
from poros.stream.context import ModelContext


class Passes(ABC):
    """The part of ``poros.model.runtime.Runtime`` that each call of its model goes through."""

    context: ModelContext
    sizer: Sizer
    room: ResidencyPlan
    captures: Captures | None
    unchecked: str
    num_grouped: int
    _layers: list[weakref.ref[nn.Module]]

    @property
    @abstractmethod
    def self_check(self) -> dict[str, Any]:
        """What the check of the first step has found so far."""

    @abstractmethod
    def resize(self, room: ResidencyPlan) -> None:
        """Give the blocks other room on the device."""

    def begin_pass(self, holder: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Check a call of the model, make room for the micro-batch, and record visits that are due.

        Args:
            holder: Holds the layers.
            args, kwargs: What it is called with.

        Raises:
            PreparedModelError: If the call is compiled as a whole.
            UnvalidatedArchitectureError: If it is to be trained, and nothing has checked it.
            VRAMBudgetError: If a step needs more than a given budget; the room is what it was.
        """
        refuse_tracing(type(holder).__name__)
        if self.unchecked and torch.is_grad_enabled():
            raise UnvalidatedArchitectureError(
                "expected a check of what is trained: the self-check, or an exact record of the "
                'family and its adapters, found self_check="off" and that no gate has run '
                f'{self.unchecked}. Prepare it with self_check="strict", or run it under '
                "torch.no_grad()"
            )
        stand_in = None if self.context.in_place is None else self.context.in_place()

        def make_room() -> None:
            if torch.is_grad_enabled() and self.sizer.decides:
                self.make_room(args, kwargs)

        self.context.begin_pass()
        if stand_in is None:
            make_room()
        elif not stand_in.begin_pass(make_room):
            return  # its micro-batch is on its way already
        if self.captures is not None:
            self.context.visits.end_all()
            layers = list(self.streamed_layers())
            there_is_room = self.sizer.replays, self.sizer.joins
            are_rows = stand_in is not None and stand_in.are_rows
            alone = holder if stand_in is None else None
            if self.captures.begin_pass(layers, *there_is_room, self.num_grouped, are_rows, alone):
                self.sizer.recorded()
        if stand_in is not None:
            stand_in.enter(holder, (*args, *kwargs.values()))

    def end_pass(self, *_: object) -> None:
        """The code of what holds the layers has ended, or raised."""
        if self.captures is not None:
            self.captures.segments.end_pass()

    def make_room(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Give the blocks the room that suits a micro-batch, before its layers run.

        Args:
            args, kwargs: What the module that holds the layers is called with.

        Raises:
            VRAMBudgetError: If a step needs more than a given budget; the room is what it was.
        """
        shape = shape_of(args, kwargs, self.num_grouped)
        if shape is None:
            return
        is_checking = self.self_check["status"] == "pending"
        room = self.sizer.begin(shape, self.room, is_checking, self._adapters())
        if room == self.room:
            return
        try:
            self.resize(room)
        except torch.OutOfMemoryError as error:
            refusal = self.sizer.refused("vram_budget", error)
            if refusal is not None:
                raise refusal from error
            self.resize(ResidencyPlan(MIN_SLOTS, 0, self.room.offload_inputs))
        self.sizer.made_room()

    def streamed_layers(self) -> Iterator[StreamedLayer]:
        for reference in self._layers:
            layer = reference()
            if layer is not None:
                yield streamed_layer(layer)

    def _adapters(self) -> object:
        """Differs if what is trained in the first layer with adapters does."""
        for layer in self.streamed_layers():
            parameters = layer.contents().adapters().parameters
            if parameters:
                return [(id(parameter), parameter.dtype) for parameter in parameters]
        return []
