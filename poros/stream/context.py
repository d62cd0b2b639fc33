"""What the layers of one prepared model share."""

import inspect
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from poros.errors import UnsupportedModelError
from poros.kernels.adapters import KernelStats
from poros.kernels.dense_memory import DenseLayer, DenseWorkspace
from poros.kernels.forwards import is_in_library, is_of_library
from poros.slots.manager import BlockManager
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


@dataclass(eq=False)
class ModelContext:
    """What the layers of one prepared model share."""

    model: Callable[[], nn.Module | None]
    """The model, if it is still there."""
    device: torch.device
    manager: BlockManager
    tied_adapters: Sequence[str]
    """Adapter parameters of the model that are used at several places."""
    admit: Callable[[nn.Module], None]
    """Brings what has come to a layer since ``poros.prepare`` to the device."""
    explain: Callable[[str, torch.OutOfMemoryError], Exception]
    """Makes the device's lack of memory, in a layer of that name, an error that says what a step
    needs."""
    tally: KernelStats | None
    """Counts calls of adapters; None if they run as PEFT has them."""
    dense: DenseLayer | None = None
    """Memory for the dense weights of a layer, for calls that share them."""
    workspace: DenseWorkspace | None = None
    """Memory for one dense weight at a time."""
    visits: Visits = field(default_factory=Visits)
    offloader: ActivationOffloader | None = None
    """Where inputs wait for their backward; None keeps them on the device."""
    check: LayerCheck | None = None
    """Looks at the first calls of layers."""
    captures: Any = None
    """Visits that are recorded and replayed (``poros.replay.captures``); None if all run."""
    in_place: Callable[[], Any] | None = None
    """Gives what is called in place of layers (``poros.accumulation``), if that is still there."""
    is_confined: bool = False
    """Whether each call of a layer has an autocast region of its own."""
    _cast_in_pass: set[int] = field(default_factory=set)
    """Ids of adapters of which calls in this pass have casts that nobody else can use."""
    together: Any = None
    """Takes visits that are replayed and are to be no nodes of a graph, if they are
    (``poros.replay.remat.Together``)."""

    @contextmanager
    def grouped(self, is_confined: bool, together: Any) -> Iterator[None]:
        """Calls in the body are those of micro-batches that go ``together``."""
        self.is_confined, self.together = is_confined, together
        try:
            yield
        finally:
            self.is_confined, self.together = False, None

    def begin_pass(self) -> None:
        """Another call of the model begins."""
        self._cast_in_pass.clear()

    def confines_casts(self, name: str, used: Sequence[int]) -> bool:
        """Whether nobody else uses casts that the call of a layer now makes of its adapters.

        Args:
            name: Of the layer.
            used: Ids of its adapters.

        Raises:
            UnsupportedModelError: If another call has used one likewise, in this call of the model.
        """
        if self.is_confined:
            return True
        if self.tied_adapters or not self._confines_autocast():
            return False
        if not self._cast_in_pass.isdisjoint(used):
            raise UnsupportedModelError(
                f"{name}: expected adapters that no other call of a layer uses, found one that has "
                "been shared since poros.prepare (tied, or its layer stands in the model twice). "
                "Within an autocast region a resident run would sum its gradients in the low "
                "precision. Call poros.restore(model), then prepare it as it is now"
            )
        self._cast_in_pass.update(used)
        return True

    def forget_casts(self, used: Sequence[int]) -> None:
        """A call that was to use these adapters has not: another one will."""
        self._cast_in_pass.difference_update(used)

    def _confines_autocast(self) -> bool:
        """Whether the active region ends with the call of the model that runs now.

        Accelerate wraps the forward of a model in one. If code of libraries alone runs from there
        down to the layer, nobody else uses a parameter in it.
        """
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        frame = inspect.currentframe() if nesting == 2 else None
        is_inside = False
        while frame is not None:
            name, where = frame.f_code.co_name, frame.f_globals.get("__name__", "")
            if name == "decorate_autocast":
                is_inside = where == "torch.amp.autocast_mode"
            elif name == "_call_impl":
                module = frame.f_locals.get("self")
                if self.is_model(module):
                    return is_inside
                if not is_inside and not _has_known_hooks(module):
                    return False
            elif not (is_inside or is_in_library(where) or _is_of_python(where)):
                return False
            frame = frame.f_back
        return False

    def is_model(self, module: object) -> bool:
        """Whether ``module`` is the prepared model itself."""
        return module is not None and module is self.model()

    def has_trainable_parameter(self) -> bool:
        """Whether any parameter of the model requires a gradient now."""
        model = self.model()
        return model is not None and any(each.requires_grad for each in model.parameters())


def _is_of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _has_known_hooks(module: Any) -> bool:
    """Whether known libraries have written the hooks that run around a call of ``module``."""
    hooks = *vars(module)["_forward_pre_hooks"].values(), *vars(module)["_forward_hooks"].values()
    return all(map(is_of_library, hooks))
