"""A decoder layer whose frozen tensors are streamed.

Note: Interception
    A layer keeps its place and its parameters: only its class is exchanged for a dynamic subclass
    of the same name. A wrapper module would rename every adapter, and a closure on the instance
    would be shared by deep copies. The class of the model itself is never touched: trainers look it
    up by name and read the signature of its forward.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from poros.errors import PreparedModelError, UnsupportedModelError
from poros.labels import labelled, short_name
from poros.layer.audit import GraphAudit
from poros.layer.casts import is_region_within
from poros.layer.compiled import CompiledForward, refuse_outer_graph
from poros.layer.frozen import LayerBindings
from poros.layer.offload import Boundaries, Parked
from poros.layer.refused_calls import refuse_copy, require_harmless
from poros.layer.remat import LayerCall, rematerialize
from poros.layer.side_outputs import RECORDABLE, recorded_outputs
from poros.layer.state import AutocastRegions
from poros.layer.staying import Staying, StayingState
from poros.layer.tree import Adapter, ModuleTree
from poros.layer.visits import Visits
from poros.slots.manager import BlockManager
from poros.slots.schedule import Phase

Check = Callable[[int, LayerCall, Callable[[], Any], tuple[Any, Any]], Any]

_HOME = "_poros_layer"


class LayerRuntime:
    """What Poros knows of one streamed layer. Lives in the layer's ``__dict__``.

    Args:
        layer: The layer, still of its own class.
        index: Its place among the layers.
        name: Its qualified name.
        block: The block it travels in.
        device: Where it runs.
        manager: Moves the blocks.
        bindings: Its frozen tensors.
        is_adapter_module: Whether PEFT put a module there.
        staying_places: Where a layer holds what stays on the device, given what streams.
        settle: Brings what has come to a layer since ``poros.prepare`` to the device.
        regions: Shared by the layers of a model.
        visits: Likewise.
        tied_adapters: Adapter parameters of the model that are used at several places.
        boundaries: Where inputs wait for their backward; None keeps them on the device.
    """

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        name: str,
        block: int,
        device: torch.device,
        manager: BlockManager,
        bindings: LayerBindings,
        *,
        is_adapter_module: Callable[[nn.Module], bool],
        staying_places: Callable[
            [nn.Module, Collection[int]], Sequence[tuple[str, dict[str, Any], str]]
        ],
        settle: Callable[[nn.Module], None],
        regions: AutocastRegions,
        visits: Visits,
        tied_adapters: Sequence[str],
        boundaries: Boundaries | None,
    ) -> None:
        self.name = name
        self._short_name = short_name(name)
        self.device = device
        self.bindings = bindings
        self.owner: Any = None
        """The runtime of the model."""
        self.check: Check | None = None
        """Watches the layer's calls, if set."""
        self.check_bytes: Callable[[int, torch.Tensor], None] | None = None
        """Looks at the bytes of a kept layer, if set."""
        self._layer = weakref.ref(layer)
        self.own_forward: Callable[..., Any] = type(layer).forward
        """Takes the layer and its arguments; compiled if that was asked for."""
        self.is_compiled = False
        self._index = index
        self.block = block
        self._manager = manager
        self._is_housed = True
        self._is_adapter_module = is_adapter_module
        self._staying_places = staying_places
        self._settle = settle
        self._regions = regions
        self._visits = visits
        self._tied_adapters = tied_adapters
        self.boundaries = boundaries
        self._dropped_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        self._last_call: Callable[[], LayerCall | None] = lambda: None
        self._last_region: object | None = None
        self._take_stock(layer)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward as its caller sees it."""
        tree = self.tree()
        if not torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                self._refuse_dropped_cache(value)
            return self._stream(args, kwargs)
        if self._index == 0:
            refuse_outer_graph(self.name)
            if self.owner is not None:
                self.owner.budget.begin(args)
        self._refuse_recorded_outputs()
        given = (args, kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {key: self._without_cache(value) for key, value in kwargs.items()}
        self._cast_trained_biases()
        if self._manager.is_pinned(self.block):
            return self._keep(args, kwargs)
        call = LayerCall(self, args, kwargs, tree)
        if not call.parameters:
            self._refuse_frozen_adapters()

        def run() -> Any:
            return rematerialize(call) if call.needs_gradient else self._pass(call, args, kwargs)

        if call.needs_gradient and call.ambient.is_autocast:
            self._refuse_shared_casts(call)
        return self.check(self._index, call, run, given) if self.check else run()

    def _keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward with its graph, as a resident layer's: "No strangers" in poros.slots.ring."""
        with self.visit(Phase.FORWARD, ()) as slab:
            if self.check_bytes is not None:
                self.check_bytes(self._index, slab)
            return self.run(args, kwargs)

    def _pass(self, call: LayerCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward below the lowest adapter: its graph, if any, is a stranger's."""
        result = self._stream(args, kwargs)
        reached = tree_leaves((result, call.shared_entries()))
        self.audit.require_no_strangers([e for e in reached if isinstance(e, torch.Tensor)])
        return result

    def _stream(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward when no gradient passes through the layer."""
        with self.visit(Phase.INFERENCE, ()):
            return self.run(args, kwargs)

    def park(self, tensor: torch.Tensor) -> Parked | None:
        """Have the layer's input wait for its backward on the host; None to keep it here."""
        if (
            self.boundaries is None
            or tensor.device != self.device
            or not tensor.is_floating_point()
            or not tensor.is_contiguous()
            or (tensor.is_leaf and tensor.requires_grad)
        ):
            return None
        return self.boundaries.park(tensor, self.name, self._index)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's own forward, compiled if that was asked for; only inside a visit."""
        if isinstance(self.own_forward, CompiledForward):
            self.own_forward.require_few_forms(args, kwargs)
        return self.own_forward(self._layer(), *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layer's own forward, as ``nn.Module.compile`` does for a resident layer.

        Raises:
            UnsupportedModelError: If the layer has dropout.
        """
        layer = self._layer()
        if layer is None:
            return
        self.own_forward = CompiledForward(layer, self.name, args, kwargs)
        self.is_compiled = True

    @contextmanager
    def visit(self, phase: Phase, adapters: Sequence[Adapter]) -> Iterator[torch.Tensor]:
        """Hold the layer's block in its slot, with twins and stand-ins in place; its bytes.

        Streams:
            The compute stream waits for the block's copy; at the end an event is recorded behind
            which the slot may be overwritten. The host does not wait.

        Raises:
            PreparedModelError: If a frozen tensor was changed at rest, or by the layer itself.
            VRAMBudgetError: If the device has no room for what the layer computes.
        """
        self._visits.end_all()
        self.bindings.require_at_rest()
        self._require_housed()
        undo = partial(_end_visit, self._manager, self.block, self.bindings, adapters)
        with self._visits.begin(self.name, undo) as require_alone:
            try:
                slot = self._manager.acquire(self.block, phase)
                staying = self._staying.state()
                version = slot.buffer._version
                self.bindings.swap_in()
                for adapter in adapters:
                    adapter.owner[adapter.key] = adapter.stand_in
                with labelled(phase.value, self._short_name):
                    yield slot.buffer
                require_alone()
                self.bindings.require_twins()
                self._require_unwritten(version, slot.buffer._version)
                self._staying.require_unwritten(staying)
            except torch.OutOfMemoryError as error:
                raise self.owner.budget.explain(self.name, error) from error

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """The layer without its frozen tensors, for what reaches all the others."""
        self._visits.end_all()
        self.bindings.require_at_rest()
        with self._visits.begin(self.name, self.bindings.swap_out):
            self.bindings.hide()
            yield

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """The layer with its frozen tensors on the device, and nothing run; its block's bytes."""
        self._visits.end_all()
        self.bindings.require_at_rest()
        self._require_housed()
        undo = partial(_end_visit, self._manager, self.block, self.bindings, ())
        with self._visits.begin(self.name, undo):
            slot = self._manager.acquire(self.block, Phase.INFERENCE)
            self.bindings.swap_in()
            yield slot.buffer
            self.bindings.require_twins()

    def confines_autocast(self) -> bool:
        """Whether the active autocast region ends with the call of the model."""
        return self.owner is not None and is_region_within(self.owner.is_model)

    def tree(self) -> ModuleTree:
        """The modules of the layer now; the same object as long as they are the same."""
        self._visits.end_all()
        tree = self._tree
        is_known = tree.has_same_tensors()
        if not (tree.is_current() and (is_known or tree.has_same_names())):
            layer = tree.modules()[0]
            tables = (t for each in layer.modules() for t in (each._parameters, each._buffers))
            self.bindings.require_owners({id(table) for table in tables})
            self._take_stock(layer)
        elif not is_known:
            # Others by the same names: an adapter that was deleted and added again.
            self.bindings.require_at_rest()
            self._look_at_tensors(tree.modules()[0])
            tree.note_tensors()
        for module in self._tree.adapter_modules:
            if module.merged:
                raise PreparedModelError(
                    f"{self.name}: expected separate adapters, found {module.merged_adapters} "
                    "merged into the base, which the slots do not see. Call poros.restore(model) "
                    "before merging"
                )
        return self._tree

    def staying(self) -> StayingState:
        """What stays on the device, as it is now."""
        return self._staying.state()

    def edited_since(self, before: StayingState) -> str | None:
        """The name of a tensor that stays on the device and is not what it was ``before``."""
        return self._staying.changed(before)

    def _require_housed(self) -> None:
        if not self._is_housed:
            raise PreparedModelError(
                f"{self.name}: expected a place on the device for its block, found none: making "
                "room for it failed. Call poros.restore(model)"
            )

    def leave(self) -> None:
        """Let go of the block's place on the device."""
        self._is_housed = False
        self.bindings = self.bindings.without_twins()

    def move_in(self, bindings: LayerBindings) -> None:
        """Take the block's new place on the device."""
        self._is_housed = True
        self.bindings = bindings

    def put_back(self) -> None:
        """Make sure that the layer holds its own tensors."""
        self._tree.put_back()
        self.bindings.swap_out()

    def _take_stock(self, layer: nn.Module) -> None:
        self._look_at_tensors(layer)
        streamed = self.bindings.tensor_ids
        tree = ModuleTree(layer, streamed, self._is_adapter_module)
        self._staying = Staying(self.name, self._staying_places(layer, streamed))
        self.audit = GraphAudit(self.name)
        # Last: as long as the tree is the old one, stock is taken again.
        self._tree = tree

    def _look_at_tensors(self, layer: nn.Module) -> None:
        self._settle(layer)
        # Linear layers of bitsandbytes that have a bias.
        self._biased: list[Any] = [
            each
            for each in layer.modules()
            if getattr(each, "compute_dtype", None) is not None
            and each._parameters.get("bias") is not None
        ]

    def _cast_trained_biases(self) -> None:
        """Cast trained biases of 4-bit layers for good, as bitsandbytes does at their first use.

        It would do so inside the layer, to the stand-in of the bias instead of the parameter.
        """
        for module in self._biased:
            bias = module._parameters["bias"]
            if bias.requires_grad and bias.dtype != module.compute_dtype:
                bias.data = bias.data.to(module.compute_dtype)

    def _without_cache(self, value: Any) -> Any:
        """None for an empty KV cache, to which the recomputation would append a second time."""
        if not isinstance(value, Cache):
            return value
        self._refuse_dropped_cache(value)
        if value.get_seq_length() > 0:
            raise UnsupportedModelError(
                f"{self.name}: expected an empty KV cache while gradients are enabled, found one "
                "that is in use. Decode under torch.no_grad(), or pass use_cache=False"
            )
        self._dropped_caches.add(value)
        return None

    def _refuse_dropped_cache(self, value: Any) -> None:
        if isinstance(value, Cache) and value in self._dropped_caches:
            raise UnsupportedModelError(
                f"{self.name}: expected a new KV cache, found the one of a forward with gradients, "
                "which was left empty. Run the whole of a decoding under torch.no_grad()"
            )

    def _refuse_frozen_adapters(self) -> None:
        """Nothing to train in the first layer, in training: is there anywhere?"""
        if self._index > 0 or not self._tree.modules()[0].training:
            return
        if any(tuner.disable_adapters for tuner in self._tree.adapter_modules):
            return
        if not self.owner.has_trainable_parameter():
            raise PreparedModelError(
                f"{self.name}: expected a trainable adapter in the model, found none. "
                "prepare_model_for_kbit_training freezes all of them: call it before "
                "get_peft_model and poros.prepare. To run the model without training it, use "
                "model.eval() or torch.no_grad(); to change it, poros.restore(model)"
            )

    def _refuse_recorded_outputs(self) -> None:
        recorded = [key for key in recorded_outputs() if key not in RECORDABLE]
        if recorded:
            raise UnsupportedModelError(
                f"{self.name}: {', '.join(recorded)} cannot be recorded from inside a streamed "
                "layer while gradients are enabled: they would lose their gradient. Ask for them "
                "under torch.no_grad(), or switch them off (output_attentions=False, "
                "output_router_logits=False)"
            )

    def _refuse_shared_casts(self, call: LayerCall) -> None:
        """See ``AutocastRegions``: what a resident run would sum in the low precision."""
        if self._tied_adapters:
            raise UnsupportedModelError(
                f"{self.name}: adapter parameters {', '.join(self._tied_adapters)} are used more "
                "than once and autocast is on. A resident run casts such a parameter once and "
                "sums its gradients in the low precision; a streamed run cannot. Train without "
                "autocast, or untie the adapters"
            )
        region = self._regions.current(self._index)
        last = self._last_call()
        is_pending = last is not None and last.is_pending
        if is_pending and region is not None and region is self._last_region:
            raise UnsupportedModelError(
                f"{self.name}: expected one forward per autocast region and backward, found a "
                "second one. A resident run would sum both gradients in the low precision; a "
                "streamed run cannot. Give each forward its own `with torch.autocast`, or call "
                "backward between them"
            )
        self._last_call = weakref.ref(call)
        self._last_region = region

    def _require_unwritten(self, before: int, after: int) -> None:
        if before != after:
            raise PreparedModelError(
                f"{self.name}: expected its frozen tensors to be read only, found one written by "
                "its own forward (a running statistic?); the write would be lost with the slot"
            )


class StreamedLayerMixin:
    """Placed before the layer's own class: see "Interception"."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return runtime_of(self).forward(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what is recomputed, not what streams: see ``LayerRuntime.compile``."""
        runtime_of(self).compile(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts reach what stays on the device; the frozen tensors stay at rest."""
        runtime = runtime_of(self)
        require_harmless(fn, self.parameters(), runtime.device, runtime.name)  # type: ignore[attr-defined]
        with runtime.hidden():
            return super()._apply(fn, recurse)  # type: ignore[misc]

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off: a streamed layer recomputes by itself."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        # What was wanted takes effect after poros.restore.
        self.__dict__["gradient_checkpointing"] = wanted

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy(runtime_of(self).name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(2)


def streamed_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``base``, of the same name, that streams."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    streamed = type(base.__name__, (StreamedLayerMixin, base), names)
    # transformers wraps the forward of every new subclass of a layer in its own checkpointing.
    if "forward" in streamed.__dict__:
        delattr(streamed, "forward")
    return streamed


def attach(layer: nn.Module, runtime: LayerRuntime, streamed: type[nn.Module]) -> None:
    """Make ``layer`` a streamed layer."""
    layer.__dict__[_HOME] = runtime
    layer.__class__ = streamed


def detach(layer: nn.Module) -> None:
    """Undo ``attach``, also after a visit that was interrupted anywhere."""
    if is_streamed(layer):
        runtime_of(layer).put_back()
        layer.__class__ = type(layer).__mro__[2]
    layer.__dict__.pop(_HOME, None)


def _end_visit(
    manager: BlockManager,
    block: int,
    bindings: LayerBindings,
    adapters: Sequence[Adapter],
) -> None:
    for adapter in adapters:
        if adapter.owner.get(adapter.key) is adapter.stand_in:
            adapter.owner[adapter.key] = adapter.parameter
    bindings.swap_out()
    if manager.is_held(block):
        manager.release(block)


def is_streamed(module: nn.Module) -> bool:
    """Whether ``module`` is a streamed layer."""
    return isinstance(module, StreamedLayerMixin)


def runtime_of(layer: Any) -> LayerRuntime:
    """The runtime of a streamed layer."""
    runtime: LayerRuntime = layer.__dict__[_HOME]
    return runtime
