"""What a streamed layer computes with: its own forward, over tensors that are there for a while.

The forward reads frozen tensors that stream (in their slot during a visit), frozen tensors that
stay on the device, and adapters. A recomputation has to find all of them, and the modules that hold
them, as the forward has found them.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import nn

from poros.errors import PreparedModelError, RematerializationError
from poros.slots.schedule import Phase
from poros.stream.adapters import ProxyLeaf
from poros.stream.condition import Condition, require_unwritten
from poros.stream.context import ModelContext
from poros.stream.layer_index import LayerIndex
from poros.stream.offload import OffloadedInput
from poros.stream.rng import RngStash, Start
from poros.stream.settings import Surroundings
from poros.stream.visit import BlockVisit, LayerBindings
from poros.stream.within import Within

_training = attrgetter("training")


class LayerBody:
    """One decoder layer as its recomputation sees it: number ``index``, of that qualified ``name``.

    The layer is held weakly, and still of its own class here.
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
        self.own_class: Any = type(layer)
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
        return self.own_class.forward(self._layer(), *args, **kwargs)

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
                contents = self._contents
                marks = contents.marks(contents.of_base)
                yield slab
                require_unwritten(self.name, contents, marks)
        except torch.OutOfMemoryError as error:
            raise self.context.explain(self.name, error) from error

    def sharing_dense(self) -> AbstractContextManager[None]:
        """Calls in the body share the layer's dense weights, if there is memory for them."""
        dense = self.context.dense
        return nullcontext() if dense is None else dense.use(self.index)

    @property
    def shared_address(self) -> int | None:
        """Where calls that share the layer's dense weights have them; None without memory."""
        dense = self.context.dense
        return None if dense is None else dense.address

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
            self.weights.bindings.require_owners(layer)
            self.weights.bindings.require_at_rest()
            self._take_stock(layer)
        return self._contents

    def condition(self) -> Condition:
        """What decides what the layer computes now.

        The same object as before while nobody can have changed it: see ``in_a_row``.
        """
        if self._known is not None:
            return self._known
        contents = self.contents()  # first: it may take stock again
        found = Condition(self.name, contents, self.weights.bindings)
        if any(found.adapter_state.merged):
            raise PreparedModelError(
                f"{self.name}: expected separate adapters, found {found.adapter_state.merged} "
                "merged into the base, which the slots do not see. Call poros.restore(model) "
                "before merging"
            )
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

        It would do so inside the layer, to the leaf that stands in for the bias there. Returns
        whether there was any to cast.
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
        # Last: as long as this is the old one, stock is taken again.
        self._contents = LayerIndex({"": layer}, self.weights.bindings.tensor_ids)


class Call:
    """One call of a layer, and what its recomputation has to find again.

    Attributes:
        condition: What decides what it computes, as it was then.
        surroundings: Autocast and settings around it.
        rng: The random states that it begins with.
        start: Likewise, Python's and NumPy's too if code of the user runs inside the layer, which
            may draw from anywhere.
    """

    def __init__(self, layer: LayerBody, condition: Condition) -> None:
        self.layer = layer
        self.condition = condition
        self.rng = RngStash.capture(layer.device)
        self.surroundings = layer.surroundings()
        self.start = Start.capture(layer.device) if condition.has_hooks else self.rng
        self._end: Any = None
        self._module = layer.module()  # lives as long as its graph, as the parameters do

    def around(self) -> AbstractContextManager[object]:
        """Run the body in the state around the forward but for random states; then all is put back.

        That is autocast, the settings that pick kernels, and training flags of the layer's modules.
        """

        def fill(stack: ExitStack) -> None:
            self.surroundings.enter(stack)
            modules, wanted = self.condition.contents.modules(), self.condition.training
            if tuple(map(_training, modules)) != wanted:
                for module, mode in zip(modules, wanted, strict=True):
                    if module.training != mode:
                        stack.callback(setattr, module, "training", module.training)
                        module.training = mode

        return Within(fill)

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
