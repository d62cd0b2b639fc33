"""A decoder layer whose frozen tensors are streamed.

Note: Interception
    A layer keeps its place and its parameters: only its class is exchanged for a dynamic subclass
    of the same name. A wrapper module would rename every adapter, and a closure on the instance
    would be shared by deep copies. The class of the model itself is never touched: trainers look it
    up by name and read the signature of its forward.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from poros.errors import PreparedModelError, UnsupportedModelError
from poros.frozen import LayerBindings
from poros.manager import BlockManager
from poros.remat import Adapter, LayerCall, RematerializeLayer, shares_memory
from poros.walk import Phase

logger = logging.getLogger(__name__)

_HOME = "_poros_layer"
_CACHE = "past_key_values"


class LayerRuntime:
    """What Poros knows of one streamed layer. Lives in the layer's ``__dict__``."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        block: int,
        device: torch.device,
        manager: BlockManager,
        bindings: LayerBindings,
        *,
        is_adapter_module: Callable[[nn.Module], bool],
        recorded_outputs: Callable[[], Sequence[str]],
        tied_adapters: Sequence[str],
    ) -> None:
        self.name = name
        self.block = block
        self.device = device
        self.bindings = bindings
        self._layer = weakref.ref(layer)
        self._forward = type(layer).forward
        self._manager = manager
        self._is_adapter_module = is_adapter_module
        self._recorded_outputs = recorded_outputs
        self._tied_adapters = tied_adapters
        self.owner: Any = None
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] = []
        self._adapter_modules: list[nn.Module] = []
        self._stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._dropped_cache: Callable[[], Any] = lambda: None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward as its caller sees it."""
        if not torch.is_grad_enabled():
            with self.visit(Phase.INFERENCE, ()):
                return self.run(args, kwargs)
        self._refuse_recorded_outputs()
        kwargs = self._without_cache(kwargs)
        adapters = self._adapters()
        call = LayerCall(self, args, kwargs, adapters)
        if not adapters and not any(each.requires_grad for each in call.tensors):
            with self.visit(Phase.INFERENCE, ()):
                return self.run(args, kwargs)
        if call.ambient.is_autocast and self._tied_adapters:
            raise UnsupportedModelError(
                f"{self.name}: adapter parameters {', '.join(self._tied_adapters)} are used more "
                "than once and autocast is on. A resident run casts such a parameter once and "
                "sums its gradients in the low precision; a streamed run cannot. Train without "
                "autocast, or untie the adapters"
            )
        return call.result(RematerializeLayer.apply(call, *call.tensors, *call.parameters))

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's own forward; only inside a visit."""
        return self._forward(self._layer(), *args, **kwargs)

    @contextmanager
    def visit(self, phase: Phase, adapters: Sequence[Adapter]) -> Iterator[None]:
        """Hold the layer's block in its slot, with twins and stand-ins in place.

        Streams:
            The compute stream waits for the block's copy; at the end an event is recorded behind
            which the slot may be overwritten. The host does not wait.

        Raises:
            PreparedModelError: If a frozen tensor was changed at rest, or by the layer itself.
        """
        slot = self._manager.acquire(self.block, phase)
        try:
            self.bindings.swap_in()
            try:
                for adapter in adapters:
                    adapter.owner[adapter.key] = adapter.stand_in
                version = slot.buffer._version
                yield
                self._require_unwritten(version, slot.buffer._version)
            finally:
                for adapter in adapters:
                    adapter.owner[adapter.key] = adapter.parameter
                self.bindings.swap_out()
        finally:
            self._manager.release(self.block)

    def modules(self) -> list[nn.Module]:
        """All modules of the layer now; the same list as long as the tree is the same."""
        children = [child for module in self._modules for child in module._modules.values()]
        # Equality of lists of modules is identity of their items: an exact check, in C.
        if not self._modules or children != self._children:
            layer = self._layer()
            if layer is None:
                raise PreparedModelError(f"{self.name}: its module no longer exists")
            self._modules = list(layer.modules())
            self._children = [
                child for module in self._modules for child in module._modules.values()
            ]
            self._adapter_modules = [
                module for module in self._modules if self._is_adapter_module(module)
            ]
        return self._modules

    def adapter_modules(self) -> list[nn.Module]:
        """Those that PEFT put there."""
        self.modules()
        return self._adapter_modules

    def _adapters(self) -> list[Adapter]:
        """The trainable parameters now. Read at each call: PEFT changes them between steps."""
        return [
            Adapter(module._parameters, key, parameter, self._stand_in(parameter))
            for module in self.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._stand_ins.get(id(parameter))
        if known is not None and known[0] is parameter and shares_memory(*known):
            return known[1]
        stand_in = nn.Parameter(parameter.detach())
        self._stand_ins[id(parameter)] = (parameter, stand_in)
        return stand_in

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Drop the KV cache: the recomputation would append to it a second time."""
        cache = kwargs.get(_CACHE)
        if cache is None:
            return kwargs
        if cache is self._dropped_cache() or cache.get_seq_length() > 0:
            raise UnsupportedModelError(
                f"{self.name}: expected an empty, new KV cache while gradients are enabled, found "
                "one that was used before. Decode under torch.no_grad(), or pass use_cache=False"
            )
        self._dropped_cache = weakref.ref(cache)
        return {**kwargs, _CACHE: None}

    def _refuse_recorded_outputs(self) -> None:
        recorded = self._recorded_outputs()
        if recorded:
            raise UnsupportedModelError(
                f"{self.name}: {', '.join(recorded)} cannot be recorded from inside a streamed "
                "layer while gradients are enabled: they would lose their gradient. Ask for them "
                "under torch.no_grad(), or switch them off (output_attentions=False, "
                "output_router_logits=False)"
            )

    def _require_unwritten(self, before: int, after: int) -> None:
        if before != after:
            raise PreparedModelError(
                f"{self.name}: expected its frozen tensors to be read only, found one written by "
                "its own forward (a running statistic?); the write would be lost with the slot"
            )


class StreamedLayerMixin:
    """Placed before the layer's own class: see "Interception"."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return runtime_of(self).forward(args, kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts reach what stays on the device; the frozen tensors stay at rest."""
        runtime = runtime_of(self)
        require_harmless(fn, runtime.device, runtime.name)
        hidden = runtime.bindings.hide()
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            runtime.bindings.unhide(hidden)

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off: a streamed layer recomputes by itself."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        # What was wanted takes effect after poros.restore.
        self.__dict__["gradient_checkpointing"] = wanted

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PreparedModelError(
            f"{runtime_of(self).name} is streamed and cannot be copied or pickled: a copy would "
            "share the slots of the original. Call poros.restore(model) first"
        )

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
    """Undo ``attach``."""
    layer.__class__ = type(layer).__mro__[2]
    del layer.__dict__[_HOME]


def is_streamed(module: nn.Module) -> bool:
    """Whether ``module`` is a streamed layer."""
    return isinstance(module, StreamedLayerMixin)


def runtime_of(layer: Any) -> LayerRuntime:
    """The runtime of a streamed layer."""
    runtime: LayerRuntime = layer.__dict__[_HOME]
    return runtime


def require_harmless(
    fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device, name: str
) -> None:
    """Raise unless ``fn``, as given to ``Module._apply``, leaves dtypes and ``device`` alone."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        moved = fn(torch.empty(1, dtype=dtype, device=device))
        if moved.dtype != dtype or moved.device != device:
            raise PreparedModelError(
                f"{name}: expected to stay {dtype} on {device} while prepared, found a request for "
                f"{moved.dtype} on {moved.device}. The streamed base would not follow. Call "
                "poros.restore(model), move or cast it, then prepare again"
            )
