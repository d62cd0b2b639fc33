"""What is called in place of a model's layers and head, and knows the model as it was found."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from poros.accumulation.gradients import Watch
from poros.accumulation.modules import Modules, Outside
from poros.head.loss import LossInputs, SlicedLossState
from poros.kernels.nodes import nodes_from
from poros.model.runtime import Runtime
from poros.stream.boundary import StreamedLayer
from poros.stream.stack import LayerStack

USES = "the loss uses parameters of layers, or what goes into them, itself"
UNKNOWN = "a backward that goes past torch.autograd"


class InPlace(ABC):
    """Is called in place of layers, and before the head.

    Attributes:
        are_rows: Whether calls of a layer come in rows, one for each micro-batch.
    """

    are_rows = False

    def __init__(
        self, runtime: Runtime, modules: Modules, stack: LayerStack[StreamedLayer]
    ) -> None:
        self._runtime = runtime
        self._stack, self._layers = stack, stack.layers
        self._device = self._layers[0].device
        self._modules = modules
        self._found = modules.trained()
        self._trained = self._found.parameters
        self._inside = stack.contents.modules()
        self._in_layers = set(stack.contents.adapters().ids)
        """Ids of what is trained in the layers."""
        self._outside = Outside.of(modules.now(), self._inside)
        self._watch = Watch(self._trained, self._asked, self._goes_back)

    def _is_unedited(self) -> bool:
        """Whether the same parameters are trained, and none of them was edited."""
        return self._modules.trained()[1:] == self._found[1:]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """What code of the user calls in the body comes here: layers, and the head."""
        context, reader = self._layers[0].context, self._runtime.head
        before, context.in_place = context.in_place, weakref.ref(self)
        if reader is not None:
            reader.in_place = weakref.WeakMethod(self._comes_to_head)
        try:
            yield
        finally:
            context.in_place = before
            if reader is not None:
                reader.in_place = None

    @abstractmethod
    def begin_pass(self, make_room: Callable[[], None]) -> bool:
        """The model's own code begins; whether this is a pass of its own.

        ``make_room`` has the room made that its micro-batch takes.
        """

    @abstractmethod
    def enter(self, holder: nn.Module, given: Sequence[Any]) -> None:
        """All is made ready, and the code of the module that holds the layers begins."""

    @abstractmethod
    def call(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the forward of a layer."""

    @abstractmethod
    def _comes_to_head(self, asked: LossInputs) -> SlicedLossState | None:
        """Called before the head is read: what that gives, or None."""

    @abstractmethod
    def _asked(self) -> None:
        """Code of the user reads or writes gradients."""

    @staticmethod
    def _why_apart(
        roots: list[Any], wanted: list[Any], apart: set[int], known: Sequence[Any] = ()
    ) -> str | None:
        """What is wrong with a backward that leads to leaves of these ids, past ``known`` nodes."""
        if not apart.isdisjoint(map(id, wanted)):
            return "the loss takes gradients of single parameters itself"
        nodes = set(nodes_from(roots, known))
        if any(id(each.variable) in apart for each in nodes if hasattr(each, "variable")):
            return USES
        within = {None, *nodes, *known}
        if any(getattr(each, "grad_fn", each) not in within for each in wanted):
            return "the loss takes gradients of what is not behind its layers"
        return None

    @abstractmethod
    def _goes_back(self, roots: list[Any], wanted: list[Any]) -> None:
        """A backward begins at these nodes; if ``wanted``, for the gradients of these alone."""
