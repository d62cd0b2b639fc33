"""A decoder layer whose frozen tensors are streamed.

Note: Interception
    A layer keeps its place and its parameters: only its class is exchanged for a dynamic subclass
    of the same name. A wrapper module would rename every adapter, and a closure on the instance
    would be shared by deep copies. The class of the model itself is never touched: trainers look it
    up by name and read the signature of its forward.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache

from poros.errors import PreparedModelError, UnsupportedModelError
from poros.slots.schedule import Phase
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.general import RecomputedCall

_KEY = "_poros_layer"


class StreamedLayer(LayerBody):
    """One streamed layer: what happens when it is called. Lives in the layer's ``__dict__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._dropped_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward as its caller sees it."""
        in_place, captures = self.context.in_place, self.context.captures
        other = None if in_place is None else in_place()
        if other is None and captures is not None:
            other = captures.segments.of_layer(self.index)
        if other is not None and torch.is_grad_enabled():
            return other.call(self, args, kwargs)
        return self.forward_now(args, kwargs)

    def forward_now(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], condition: Condition | None = None
    ) -> Any:
        """The layer's forward, whatever is called in its place.

        ``condition``: its condition now, if that was looked up.
        """
        check, replays = self.context.check, self.context.captures
        given = (args, kwargs)
        if torch.is_grad_enabled():
            args, kwargs = self.begin_graph(args, kwargs)
        condition = condition or self.condition()
        if not torch.is_grad_enabled():
            caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
            for cache in caches:
                self._require_usable(cache, has_graph=False)
            run: Callable[[], Any] = partial(self._run, Phase.INFERENCE, args, kwargs)
            if replays is None or caches or torch.is_inference_mode_enabled():
                return run()
            return replays.call("inference", self, args, kwargs, condition, run)
        if self.cast_trained_biases():
            condition = self.condition()
        is_kept = self.weights.is_pinned
        if not is_kept and not condition.parameters:
            self._refuse_frozen_adapters()
        is_checked = check is not None and self.index in check.unchecked
        recompute = partial(self._recompute, args, kwargs, condition)
        run = partial(self._run, Phase.FORWARD, args, kwargs) if is_kept else recompute
        if replays is not None and not (is_kept and is_checked):
            # A recording holds what a graph does: both of all kept layers would be twice the
            # memory, so beside it a kept layer is recomputed.
            call = "kept" if is_kept else "recomputed", self, args, kwargs, condition
            run = partial(replays.call, *call, run, recompute)
        return check.watch(self.index, run, given) if check is not None and is_checked else run()

    def begin_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with, with gradients, without KV caches.

        A recomputation would append to them a second time.
        """
        require_saved_tensor_hooks(self.name)
        if self.index == 0:
            refuse_outer_graph(self.name)
        caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
        if not caches:
            return args, kwargs
        for cache in caches:
            self._require_usable(cache, has_graph=True)
        self._dropped_caches.update(caches)
        return without_caches(args, kwargs)

    def _recompute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], condition: Condition
    ) -> Any:
        """The forward in the graph around it, which backward recomputes."""
        return RecomputedCall(self, condition).forward(args, kwargs)

    def _run(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward without a graph, or with it, as a resident layer's.

        See "No strangers" in ``poros.slots.ring``.
        """
        check = self.context.check
        with self.visit(phase) as slab:
            if phase is Phase.FORWARD and check is not None and self.index in check.unchecked:
                check.watch_bytes(self.index, slab)
            return self.run(args, kwargs)

    def _require_usable(self, cache: Cache, has_graph: bool) -> None:
        """Raise unless a KV cache is empty, if it is to be dropped, and none that was dropped."""
        if cache in self._dropped_caches:
            raise UnsupportedModelError(
                f"{self.name}: expected a new KV cache, found the one of a forward with gradients, "
                "which was left empty. Run the whole of a decoding under torch.no_grad()"
            )
        if has_graph and cache.get_seq_length() > 0:
            raise UnsupportedModelError(
                f"{self.name}: expected an empty KV cache while gradients are enabled, found one "
                "that is in use. Decode under torch.no_grad(), or pass use_cache=False"
            )

    def _refuse_frozen_adapters(self) -> None:
        """Nothing to train in the first layer, in training: is there anywhere?"""
        if self.index > 0 or not self._contents.modules()[0].training:
            return
        if any(tuner.disable_adapters for tuner in self._contents.adapter_modules):
            return
        if not self.context.has_trainable_parameter():
            raise PreparedModelError(
                f"{self.name}: expected a trainable adapter in the model, found none. "
                "prepare_model_for_kbit_training freezes all of them: call it before "
                "get_peft_model and poros.prepare. To run the model without training it, use "
                "model.eval() or torch.no_grad(); to change it, poros.restore(model)"
            )


class StreamedLayerMixin:
    """Placed before the layer's own class: see "Interception"."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what disables it costs as much as all else here
            return _forward(self, args, kwargs)
        return streamed_layer(self).forward(args, kwargs)

    def train(self, mode: bool = True) -> Any:
        """Trainers ask for it at each micro-batch: modules that are in that mode are left alone."""
        own = super().train  # type: ignore[misc]
        if own.__func__ is nn.Module.train and streamed_layer(self)._contents.is_in_mode(mode):
            return self
        return own(mode)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a compiler fuses, and meets its limits, elsewhere than in a resident run."""
        refuse_compiling(streamed_layer(self).name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts reach what stays on the device; the frozen tensors stay at rest."""
        streamed = streamed_layer(self)
        require_harmless(fn, self.parameters(), streamed.device, streamed.name)  # type: ignore[attr-defined]
        with streamed.weights.hidden():
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
        refuse_copy(streamed_layer(self).name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(2)


@torch.compiler.disable
def _forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return streamed_layer(layer).forward(args, kwargs)


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer without KV caches."""
    return (
        tuple(None if isinstance(value, Cache) else value for value in args),
        {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()},
    )


def streamed_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``base``, of the same name, that streams."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    streamed = type(base.__name__, (StreamedLayerMixin, base), names)
    # transformers wraps the forward of every new subclass of a layer in its own checkpointing.
    if "forward" in streamed.__dict__:
        delattr(streamed, "forward")
    return streamed


def attach_layer(layer: nn.Module, streamed: StreamedLayer, streamed_type: type[nn.Module]) -> None:
    """Make ``layer`` a streamed layer."""
    layer.__dict__[_KEY] = streamed
    layer.__class__ = streamed_type


def detach_layer(layer: nn.Module) -> None:
    """Undo ``attach_layer``; the layer's own frozen tensors are back, whatever took their place."""
    if is_streamed(layer):
        streamed_layer(layer).weights.bindings.swap_out()
        layer.__class__ = type(layer).__mro__[2]
    layer.__dict__.pop(_KEY, None)


def is_streamed(module: nn.Module) -> bool:
    """Whether ``module`` is a streamed layer."""
    return isinstance(module, StreamedLayerMixin)


def streamed_layer(layer: Any) -> StreamedLayer:
    """What the module of a streamed layer has become."""
    streamed: StreamedLayer = layer.__dict__[_KEY]
    return streamed


def require_harmless(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tensors: Iterable[torch.Tensor],
    device: torch.device,
    name: str,
) -> None:
    """Raise unless ``fn``, as given to ``Module._apply``, leaves dtypes and ``device`` alone."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    for dtype in sorted(dtypes, key=str):
        moved = fn(torch.empty(1, dtype=dtype, device=device))
        if moved.dtype != dtype or moved.device != device:
            raise PreparedModelError(
                f"{name}: expected to stay {dtype} on {device} while prepared, found a request for "
                f"{moved.dtype} on {moved.device}, which what streams would not follow. Call "
                "poros.restore(model), move or cast it, then prepare again"
            )


def refuse_copy(what: str) -> NoReturn:
    """Raise on a copy or a pickle of ``what``."""
    raise PreparedModelError(
        f"expected to copy or pickle a model that is not prepared, found {what}, whose base is in "
        "host memory once and streams through slots of its own. Call poros.restore(model) first, "
        "and poros.prepare on what you copied"
    )


def require_saved_tensor_hooks(name: str) -> None:
    """Raise ``UnsupportedModelError`` within torch.func.grad and its like, for layer ``name``."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"{name}: expected saved-tensor hooks to be allowed, found them disabled, as within "
            "torch.func.grad and vjp: recomputation needs them. Use torch.autograd.grad, or call "
            "poros.restore(model) and differentiate the resident model"
        )


def refuse_outer_graph(name: str) -> None:
    """Raise if the caller runs inside ``torch.compile`` of something that holds the layers.

    The compiler calls what it may not enter from below its own frame, and says so nowhere else.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "compile_wrapper"
            and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        ):
            refuse_compiling(name)
        frame = frame.f_back


def refuse_tracing(name: str) -> None:
    """Raise if the compiler traces the caller and gradients are wanted: before it compiles much."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        refuse_compiling(name)


@torch.compiler.disable
def refuse_compiling(name: str) -> NoReturn:
    """Raise on compiling ``name``."""
    raise PreparedModelError(
        f"{name}: expected a prepared model that is not compiled, found compile() of a layer or of "
        "what holds them, or a forward inside torch.compile (TrainingArguments(torch_compile=True)?"
        "). A resident run would compile the layers, a streamed one would not. Train without "
        "compiling, or call poros.restore(model) and train this one resident"
    )
