"""What the layers of one prepared model share."""

import inspect
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

from poros.kernels.adapters import KernelStats
from poros.kernels.dequantize import DenseLayer
from poros.slots.manager import BlockManager
from poros.stream.condition import Condition
from poros.stream.offload import ActivationOffloader
from poros.stream.visit import Visits

Kind = Literal["recomputed", "kept", "inference"]
"""Of a call: recomputed in backward, with its graph kept until then, or without a backward."""


class LayerCheck(Protocol):
    """Looks at the first calls of layers: ``poros.self_check.check``."""

    @property
    def unchecked(self) -> Container[int]:
        """Layers whose next call is to be checked."""

    def watch(self, index: int, run: Callable[[], Any], arguments: tuple[Any, Any]) -> Any:
        """Run the forward of a layer, and check it."""

    def watch_bytes(self, index: int, buffer: torch.Tensor) -> None:
        """Check the bytes over which a layer keeps its graph."""


class Replayer(Protocol):
    """Replays visits that it has recorded: ``poros.replay.captures``.

    Attributes:
        rows: Replays visits by micro-batches that go together: ``poros.replay.rows``.
    """

    rows: Any

    def call(
        self,
        kind: Kind,
        layer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        condition: Condition,
        run: Callable[[], Any],
        beside: Callable[[], Any] | None = None,
    ) -> Any:
        """Replay a call of a layer if it is recorded, else run it; return its result."""


class StandIn(Protocol):
    """Is called in place of layers: ``poros.accumulation``."""

    def begin_pass(self, make_room: Callable[[], None]) -> bool:
        """The model's own code begins; whether this is a pass of its own.

        ``make_room`` has the room made that its micro-batch takes.
        """

    def enter(self, holder: nn.Module, given: Sequence[Any]) -> None:
        """All is made ready, and the code of the module that holds the layers begins."""

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the forward of a layer."""


class ModelContext:
    """What the layers of one prepared model share.

    Args:
        model: The model; held weakly.
        device: Where it runs.
        manager: Moves the blocks.
        tied_adapters: Adapter parameters of the model that are used at several places.
        admit: Brings what has come to a layer since ``poros.prepare`` to the device.
        explain: Makes the device's lack of memory, in a layer of that name, an error that says
            what a step needs.
        tally: Counts calls of adapters; None if they run as PEFT has them.
        dense: Memory for the dense weights of a layer, for calls that share them; or None.

    Attributes:
        visits: Of all its layers.
        offloader: Where inputs wait for their backward; None keeps them on the device.
        check: Looks at the first calls of layers; None if nothing is checked.
        watching_graph: Gives what is to surround a recomputation, or None; None if nothing ever is.
        watches: Whether the call that comes of a layer, by its place, is not to be replayed; None
            if all may be.
        captures: Visits that are recorded and replayed; None if all of them run.
        in_place: Gives what is called in place of layers, if that is still there.
        is_confined: Whether each call of a layer has an autocast region of its own.
        without_graph: Where replayed visits that are to be no nodes of a graph are added, if they
            are.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        manager: BlockManager,
        tied_adapters: Sequence[str],
        admit: Callable[[nn.Module], None],
        explain: Callable[[str, torch.OutOfMemoryError], Exception],
        tally: KernelStats | None,
        dense: DenseLayer | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self.device = device
        self.manager = manager
        self.tied_adapters = tied_adapters
        self.admit = admit
        self.explain = explain
        self.tally = tally
        self.dense = dense
        self.visits = Visits()
        self.offloader: ActivationOffloader | None = None
        self.check: LayerCheck | None = None
        self.watching_graph: Callable[[], AbstractContextManager[None] | None] | None = None
        self.watches: Callable[[int], bool] | None = None
        self.captures: Replayer | None = None
        self.in_place: Callable[[], StandIn | None] | None = None
        self.is_confined = False
        self.without_graph: list[Any] | None = None

    @contextmanager
    def grouped(self, is_confined: bool, has_graph: bool) -> Iterator[list[Any]]:
        """Calls in the body are those of micro-batches that go together.

        Args:
            is_confined: Whether each call of a layer has an autocast region of its own.
            has_graph: Whether those that are replayed are nodes of a graph all the same.

        Returns:
            Those that are none: ``poros.replay.remat.ReplayedVisit``.
        """
        self.is_confined, self.without_graph = is_confined, None if has_graph else []
        try:
            yield [] if self.without_graph is None else self.without_graph
        finally:
            self.is_confined, self.without_graph = False, None

    def confines_autocast(self) -> bool:
        """Whether the active region ends with the call of the model that runs now.

        Accelerate wraps the forward of a model in one: nobody else can use a parameter in it.
        """
        if self.is_confined:
            return True
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        frame = inspect.currentframe() if nesting == 2 else None
        is_inside = False
        while frame is not None:
            name = frame.f_code.co_name
            if name == "decorate_autocast":
                is_inside = frame.f_globals.get("__name__") == "torch.amp.autocast_mode"
            elif name == "_call_impl" and self.is_model(frame.f_locals.get("self")):
                return is_inside
            frame = frame.f_back
        return False

    def is_model(self, module: object) -> bool:
        """Whether ``module`` is the prepared model itself."""
        return module is not None and module is self._model()

    def has_trainable_parameter(self) -> bool:
        """Whether any parameter of the model requires a gradient now."""
        model = self._model()
        return model is not None and any(
            parameter.requires_grad for parameter in model.parameters()
        )
