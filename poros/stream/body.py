"""What a streamed layer computes with: its own forward, over tensors that are there for a while.

The forward reads frozen tensors that stream (in their slot during a visit), frozen tensors that
stay on the device, and adapters. A recomputation has to find all of them, and the modules that hold
them, as the forward has found them.
"""

import inspect
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import nn

from poros.errors import PreparedModelError, RematerializationError
from poros.kernels.adapters import KernelStats
from poros.kernels.dequantize import DenseLayer
from poros.slots.manager import BlockManager
from poros.slots.schedule import Phase
from poros.stream.adapters import AdapterPlace, staying_places
from poros.stream.condition import Condition
from poros.stream.layer_index import LayerIndex
from poros.stream.offload import ActivationOffloader, OffloadedInput
from poros.stream.rng import RngStash, Start
from poros.stream.state import AmbientState, Surroundings
from poros.stream.staying import Staying, StayingState
from poros.stream.visit import BlockVisit, LayerBindings, ProxyLeaf, Visits

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
        layer: "LayerBody",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        condition: Condition,
        run: Callable[[], Any],
        beside: Callable[[], Any] | None = None,
        *,
        is_checked: bool = False,
    ) -> Any:
        """Replay a call of a layer if it is recorded, else run it; return its result."""


class StandIn(Protocol):
    """Is called in place of layers: ``poros.accumulation``."""

    def begin_pass(self, make_room: Callable[[], None]) -> bool:
        """The model's own code begins; whether this is a pass of its own.

        ``make_room`` has the room made that its micro-batch takes.
        """

    def enter(self, holder: nn.Module) -> None:
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
        watching_graph: Gives what is to surround a recomputation; None if nothing is.
        watches: Whether the call that comes of a layer, by its place, is not to be replayed.
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
        self.watching_graph: Callable[[], AbstractContextManager[None] | None] = lambda: None
        self.watches: Callable[[int], bool] = lambda layer: False
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


class LayerBody:
    """One decoder layer as its recomputation sees it.

    Args:
        layer: The layer, still of its own class; held weakly.
        index: Its place among the layers.
        name: Its qualified name.
        block: The block it travels in.
        bindings: Its frozen tensors.
        context: Shared by the layers of a model.
    """

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        name: str,
        block: int,
        bindings: LayerBindings,
        context: ModelContext,
    ) -> None:
        self.index = index
        self.name = name
        self.context = context
        self.device = context.device
        dense = context.dense
        self.weights = BlockVisit(
            *(context.manager, context.visits, block, name, bindings),
            None if dense is None else lambda found: dense.fill(index, found.dense_weights),
        )
        self.own_forward: Callable[..., Any] = type(layer).forward
        """Takes the layer and its arguments."""
        self._known: Condition | None = None
        self._around: Surroundings | None = None
        self._is_in_a_row = False
        self._layer = weakref.ref(layer)
        self._take_stock(layer)

    def module(self) -> nn.Module | None:
        """The layer itself, if it is still there."""
        return self._layer()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's own forward; only inside a visit."""
        self._known = self._around = None
        return self.own_forward(self._layer(), *args, **kwargs)

    @contextmanager
    def visit(self, phase: Phase, leaves: Sequence[ProxyLeaf] = ()) -> Iterator[torch.Tensor]:
        """Hold the layer's block in its slot, ready to be computed with; its bytes.

        See ``BlockVisit.hold``, for streams and for what else is raised.

        Raises:
            PreparedModelError: If the layer itself has changed a frozen tensor.
            VRAMBudgetError: If the device has no room for what the layer computes.
        """
        try:
            with self.weights.hold(phase, leaves) as slab:
                staying = self._staying.state()
                yield slab
                self._staying.require_unwritten(staying)
        except torch.OutOfMemoryError as error:
            raise self.context.explain(self.name, error) from error

    def sharing_dense(self) -> AbstractContextManager[None]:
        """Calls in the body share the layer's dense weights, if there is memory for them."""
        dense = self.context.dense
        return nullcontext() if dense is None else dense.use(self.index)

    @property
    def dense_address(self) -> int | None:
        """Of the dense weights that calls of the layer share now; None if they share none."""
        dense = self.context.dense
        return None if dense is None or dense.served != self.index else dense.address

    def assuming_dense(self, address: int | None) -> AbstractContextManager[None]:
        """To be recorded: as if calls shared dense weights at ``address``, or none if it is None.

        Raises:
            RuntimeError: If they are elsewhere now.
        """
        dense = self.context.dense
        if dense is None:
            return nullcontext()
        if address not in (None, dense.address):
            raise RuntimeError("the memory of dense weights has moved")
        return dense.assumed(None if address is None else self.index)

    def contents(self) -> LayerIndex:
        """The modules of the layer now; the same object as long as they are the same."""
        self.weights.end_others()
        contents = self._contents
        if not (contents.is_current() and contents.has_same_tensors()):
            layer = contents.modules()[0]
            owners = (
                id(table)
                for module in layer.modules()
                for table in (module._parameters, module._buffers)
            )
            self.weights.bindings.require_owners(set(owners))
            self.weights.bindings.require_at_rest()
            self._take_stock(layer)
        for module in self._contents.adapter_modules:
            if module.merged_adapters:
                raise PreparedModelError(
                    f"{self.name}: expected separate adapters, found {module.merged_adapters} "
                    "merged into the base, which the slots do not see. Call poros.restore(model) "
                    "before merging"
                )
        return self._contents

    def is_in_mode(self, mode: bool) -> bool:
        """See ``LayerIndex.is_in_mode``."""
        return self._contents.is_in_mode(mode)

    def condition(self) -> Condition:
        """What decides what the layer computes now.

        The same object as before while nobody can have changed it: see ``in_a_row``.
        """
        if self._known is not None:
            return self._known
        contents = self.contents()  # first: it may take stock again
        found = Condition(self.name, contents, self._staying, self.weights)
        if self._is_in_a_row:
            self._known = found
        return found

    def surroundings(self) -> Surroundings:
        """Autocast and settings around a call or a backward now.

        The same object as before while nobody can have changed them: see ``in_a_row``. Autocast is
        of a thread, and within a backward of autograd's that may be another one.
        """
        if not self._is_in_a_row or torch._C._current_graph_task_id() != -1:
            return Surroundings.capture(self.device)
        if self._around is None:
            self._around = Surroundings.capture(self.device)
        return self._around

    @contextmanager
    def in_a_row(self) -> Iterator[None]:
        """Calls, or backwards, in the body come one behind the other, in the same surroundings.

        They share the layer's dense weights, if there is memory for them, its slot while they are
        replayed, and what is looked up in the layer, and around it, until its own code runs again.
        """
        with self.sharing_dense(), self.weights.in_a_row():
            self._known, self._around, self._is_in_a_row = None, None, True
            try:
                yield
            finally:
                self._known, self._around, self._is_in_a_row = None, None, False

    def staying(self, adapters: Sequence[AdapterPlace]) -> StayingState:
        """What stays on the device, and what lies in the places of frozen ``adapters``, now."""
        return self._staying.state(adapters)

    def offload(self, tensor: torch.Tensor) -> OffloadedInput | None:
        """Have the layer's input wait for its backward on the host; None to keep it here."""
        offloader = self.context.offloader
        if (
            offloader is None
            or tensor.device != self.device
            or not tensor.is_floating_point()
            or not tensor.is_contiguous()
            or (tensor.is_leaf and tensor.requires_grad)
        ):
            return None
        return offloader.offload(tensor, self.name, self.index)

    def cast_trained_biases(self) -> bool:
        """Cast trained biases of 4-bit layers for good, as bitsandbytes does at their first use.

        It would do so inside the layer, to the leaf that stands in for the bias there.

        Returns:
            Whether there was any to cast.
        """
        is_cast = False
        for module in self._biased:
            bias = module._parameters["bias"]
            if bias.requires_grad and bias.dtype != module.compute_dtype:
                bias.data = bias.data.to(module.compute_dtype)
                self._known, is_cast = None, True
        return is_cast

    def _take_stock(self, layer: nn.Module) -> None:
        self.context.admit(layer)
        # Linear layers of bitsandbytes that have a bias.
        self._biased: list[Any] = [
            module
            for module in layer.modules()
            if getattr(module, "compute_dtype", None) is not None
            and module._parameters.get("bias") is not None
        ]
        streamed = self.weights.bindings.tensor_ids
        contents = LayerIndex(layer, streamed)
        self._staying = Staying(self.name, staying_places(layer, streamed))
        # Last: as long as these are the old ones, stock is taken again.
        self._contents = contents


class Call:
    """One call of a layer, and what its recomputation has to find again.

    Args:
        layer: The layer.
        condition: What decides what it computes, as it is now.

    Attributes:
        ambient: The state around it.
        start: The random states that it begins with: Python's and NumPy's too if code of the user
            runs inside the layer, which may draw from anywhere.
    """

    def __init__(self, layer: LayerBody, condition: Condition) -> None:
        self.layer = layer
        self.condition = condition
        rng = RngStash.capture(layer.device)
        self.ambient = AmbientState(rng, layer.surroundings(), condition.training)
        self.start = Start.capture(layer.device) if condition.has_hooks else self.ambient.rng
        self._end: Any = None
        self._module = layer.module()  # lives as long as its graph, as the parameters do

    def note_end(self) -> None:
        """Its forward has run, or was replayed: note the random states."""
        self._end = self.start.capture(self.layer.device)

    def note_end_as(self, rng: RngStash) -> None:
        """Its forward has left these random states."""
        self._end = rng

    @property
    def has_drawn(self) -> bool:
        """Whether its forward has left other random states; true until that is known."""
        return self._end is None or not self._end.equals(self.start)

    def ends_alike(self) -> bool:
        """Whether random states now are those that the forward has left."""
        return self._end is not None and bool(
            self._end.equals(self.start.capture(self.layer.device))
        )

    def require_same_end(self) -> None:
        """Raise ``RematerializationError`` unless ``ends_alike``."""
        if not self.ends_alike():
            raise RematerializationError(
                f"{self.layer.name}: the recomputation drew other random numbers than the forward; "
                "the layer draws depending on state that is not its input"
            )

    def refuse_second_order(self) -> NoReturn:
        """Raise ``RematerializationError``: a backward is to be differentiated itself."""
        raise RematerializationError(
            f"{self.layer.name}: expected a backward without create_graph, found one that asks for "
            "gradients of gradients, which recomputation does not give"
        )
