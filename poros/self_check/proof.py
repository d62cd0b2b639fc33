"""Runs one layer again from its recorded state: resident, and streamed.

``resident`` runs the layer's own forward in an ordinary graph over frozen tensors that are loaded
afresh, synchronously, into memory of their own, with PEFT's own modules and bitsandbytes' kernels:
neither slots, streams and copies nor the recomputation take part, nor kernels of ours (but where
the budget has no room for PEFT's modules, which keep more for backward).
``streamed`` runs it as the step did. A layer whose graph is kept runs in such a graph too, with our
kernels; any other through slots, copies and recomputation, over a block that is copied anew into a
slot that held something else before, and overwritten by another block as soon as nothing reads it
any more. Both leave no trace: random states are put back, no gradient is
accumulated, no backward hook of the user runs: not on parameters, modules or tensors. Such a hook
would see the gradient of the layer's result alone, where the loss also reads a tensor that another
hook has kept from inside the layer. So what hooks do to gradients is not compared.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import _active_collector

from poros.kernels.autocast import cached_cast
from poros.kernels.forwards import use_others
from poros.model.runtime import Runtime
from poros.self_check.evidence import (
    CallSnapshot,
    forward_values,
    mappings_in,
    named_outputs,
    random_states,
    replace,
    written,
)
from poros.slots.schedule import Phase
from poros.stream.adapters import proxy_leaves
from poros.stream.attention import AttentionKernels, unchanged_flags
from poros.stream.boundary import StreamedLayer, streamed_layer
from poros.stream.frozen import bind_block
from poros.stream.general import RecomputedCall
from poros.stream.rng import RngStash
from poros.stream.visit import LayerBindings
from poros.stream.within import FunctionMode, Within

Gradients = Sequence[torch.Tensor | None]
Incoming = Mapping[str, torch.Tensor]
"""The gradients that arrive at the outputs of a layer, under their names."""
Proxies = dict[int, torch.Tensor]
"""Proxies of adapters, by the ids of their parameters."""

_POISON = 0xFF
"""NaN for floats, the largest code for packed 4-bit weights."""


class Kernels(Enum):
    """The kernels of a run that have to be deterministic."""

    DETERMINISTIC_ATTENTION = "attention's"
    DETERMINISTIC = "all that have a deterministic form"


class Outcome(NamedTuple):
    """The results of a layer's run, by name, and how it ran."""

    values: dict[str, Any]
    """Outputs, whether they need a gradient, random states at the end, gradients."""
    rng_backward: dict[str, Any]
    """The random states after its backward, by name."""
    may_vary: bool = False
    """Whether its gradients may differ between runs (``AttentionKernels``)."""

    @property
    def forward(self) -> dict[str, Any]:
        """The values that were there before the backward."""
        named = self.values.items()
        return {name: value for name, value in named if not name.startswith("gradient of ")}


class LayerRerunner:
    """Runs the layers of one prepared model again.

    Args:
        runtime: What streams the model; it keeps this, and is held weakly.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Runtime = weakref.proxy(runtime)

    def resident(
        self,
        evidence: CallSnapshot,
        incoming: Incoming,
        kernels: "Kernels | None" = None,
        *,
        takes_ours: bool = False,
    ) -> Outcome:
        """Run a layer in an ordinary graph.

        Args:
            kernels: Kernels that have to repeat themselves; None leaves it to the user's settings.
            takes_ours: Whether modules run our operators, as they do in a step.
        """
        attention = AttentionKernels(deterministic=kernels is not None)
        with (
            unchanged_flags(),
            _repeating(kernels),
            self._ordinary(evidence, takes_ours) as (forward, proxies),
        ):

            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Proxies]:
                # ``state`` has put the flag back.
                with _repeating(kernels), attention:
                    return forward(*args, **kwargs), proxies

            outcome = self._run(evidence, incoming, run)
        return outcome._replace(may_vary=attention.may_vary)

    def streamed(self, evidence: CallSnapshot, incoming: Incoming, is_steady: bool) -> Outcome:
        """Run a layer as it is streamed.

        Args:
            is_steady: Whether its attention has to repeat itself.

        Streams:
            Overwrites the block's slot on the compute stream, so that nothing of an earlier copy
            can pass for the new one, and queues the copy of another block into it at the end.
        """
        layer = streamed_layer(evidence.layer)
        tally = self._runtime.tally
        uncounted = nullcontext() if tally is None else tally.uncounted()
        if layer.weights.is_pinned:
            # Its graph is an ordinary one already; the bytes in its slot are compared apart.
            kernels = Kernels.DETERMINISTIC_ATTENTION if is_steady else None
            with uncounted:
                return self.resident(evidence, incoming, kernels, takes_ours=True)
        block = layer.weights.block
        run = partial(_recomputed, _Deterministic(layer) if is_steady else layer)
        self._forget(block)
        with uncounted, unchanged_flags():
            # Between forward and backward: code that reads the slot has to acquire the block.
            between = partial(self._forget, block)
            outcome = self._run(evidence, incoming, run, between, with_caches=False)
        self._runtime.context.visits.end_all()
        self._runtime.manager.replace(block)
        return outcome

    def _run(
        self,
        evidence: CallSnapshot,
        incoming: Incoming,
        run: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Proxies]],
        between: Callable[[], None] = lambda: None,
        *,
        with_caches: bool = True,
    ) -> Outcome:
        """Run forward, ``between`` and backward; ``run`` takes the arguments of the layer."""
        leaves, tensors = _leaves(evidence)
        args, kwargs = _arguments(evidence, tensors, with_caches)
        before = mappings_in(kwargs)
        record: dict[str, list[Any]] = {key: [] for key in evidence.recorded}
        with evidence.state(), _no_backward_hooks(evidence.layer), _NoTensorHooks():
            token = _active_collector.set(record)
            try:
                result, proxies = run(args, kwargs)
            finally:
                _active_collector.reset(token)
            rng_end = RngStash.capture(evidence.device)
        outputs = dict(named_outputs(result, written(kwargs, before), record))
        between()
        sources = leaves | proxies
        wanted = [sources.get(id(original), original) for _, original in evidence.sources]
        gradients, rng_backward = self._gradients(outputs, evidence, incoming, wanted)
        values = _values(outputs, rng_end, evidence, gradients)
        _drop_casts(wanted)
        return Outcome(values, rng_backward)

    @contextmanager
    def _ordinary(
        self, evidence: CallSnapshot, takes_ours: bool
    ) -> Iterator[tuple[Callable[..., Any], dict[int, torch.Tensor]]]:
        """The layer's own forward over freshly loaded frozen tensors, and proxies of its adapters.

        The proxies are keyed by the ids of the parameters; no hook of a parameter runs for them.
        """
        layer = evidence.layer
        trained = set(map(id, evidence.trained.values()))
        runtime, streamed = self._runtime, streamed_layer(layer)
        block = streamed.weights.block
        slab = runtime.host.slabs[block]
        memory = runtime.host.read(block).to(runtime.device, copy=True)
        bound = bind_block(runtime.blocks[block], slab.layout, memory, runtime.constants)
        bindings = LayerBindings(bound.get(streamed.index, []))
        places = [
            (module._parameters, key, parameter)
            for module in layer.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and (parameter.requires_grad or id(parameter) in trained)
        ]
        proxies = {
            id(parameter): nn.Parameter(parameter.detach(), requires_grad=id(parameter) in trained)
            for *_, parameter in places
        }

        taken_back: list[Callable[[], None]] = []

        def undo() -> None:
            for take_again in taken_back:
                take_again()
            for owner, key, parameter in places:
                owner[key] = parameter
            bindings.swap_out()

        runtime.context.visits.end_all()
        with runtime.context.visits.begin(streamed.name, undo):
            # 4-bit products are bitsandbytes' own, adapters PEFT's, if there is room for them.
            are_own = runtime.sizer.check_kernels == "peft"
            if not takes_ours:
                taken_back.append(use_others(layer.modules(), are_own))
            bindings.swap_in()
            for owner, key, parameter in places:
                owner[key] = proxies[id(parameter)]
            yield partial(streamed.own_class.forward, layer), dict(proxies)

    def _forget(self, block: int) -> None:
        """Reload ``block``, over bytes that cannot pass for its own."""
        self._runtime.context.visits.end_all()
        manager = self._runtime.manager

        def evict() -> None:
            if manager.is_held(block):
                manager.evict(block)

        # As a visit: if it is interrupted, the next one forgets these bytes.
        self._runtime.context.visits.open(evict)
        manager.acquire(block, Phase.INFERENCE).buffer.fill_(_POISON)
        self._runtime.context.visits.end_all()

    def _gradients(
        self,
        outputs: dict[str, torch.Tensor],
        evidence: CallSnapshot,
        incoming: Incoming,
        wanted: Sequence[torch.Tensor],
    ) -> tuple[Gradients, dict[str, Any]]:
        """Return the gradients, and the random states after them."""
        # By tensor: one that comes out under two names has one gradient, not twice the same.
        pairs = {
            id(outputs[name]): (outputs[name], gradient.clone())  # a hook may write to it
            for name, gradient in incoming.items()
            if name in outputs and outputs[name].requires_grad
        }
        if not (pairs and wanted):  # what a hook brings along may be all that is trained
            return [None] * len(wanted), {}
        ends, starts = zip(*pairs.values(), strict=True)
        with evidence.backward_state():
            gradients = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
            return gradients, random_states(RngStash.capture(evidence.device))


class _Deterministic:
    """A streamed layer whose attention repeats itself, in forward and when it is recomputed."""

    def __init__(self, layer: StreamedLayer) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with AttentionKernels(deterministic=True):
            return self._layer.run(args, kwargs)


class _NoTensorHooks(FunctionMode):
    """Hooks that are registered on tensors in its body do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            return func(args[0], _do_nothing)
        return func(*args, **(kwargs or {}))


def _no_backward_hooks(layer: nn.Module) -> AbstractContextManager[object]:
    """Backward hooks on the modules of ``layer``, and on all modules, do nothing.

    Their keys stay, by which a recomputation knows them.
    """

    def fill(stack: ExitStack) -> None:
        for kind in ("backward_pre_hooks", "backward_hooks"):
            tables = [getattr(module, f"_{kind}") for module in layer.modules()]
            tables.append(getattr(nn.modules.module, f"_global_{kind}"))
            for table in filter(None, tables):
                stack.callback(_put_back, table, table.copy())
                table.update(dict.fromkeys(table, _do_nothing))

    return Within(fill)


def _put_back(table: dict[int, Any], hooks: dict[int, Any]) -> None:
    """The ``hooks`` of ``table`` as they were, but for those that were removed since."""
    table.update((key, hooks[key]) for key in table.keys() & hooks.keys())


def _do_nothing(*_: object) -> None:
    """A hook that leaves gradients as they are."""


def _repeating(kernels: Kernels | None) -> AbstractContextManager[object]:
    """Make kernels deterministic inside the body; warnings are suppressed.

    cuBLAS is deterministic here without the environment variable that its warning asks for.
    """

    def fill(stack: ExitStack) -> None:
        if kernels is Kernels.DETERMINISTIC:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(unchanged_flags((True, True)))
            warnings.simplefilter("ignore")

    return Within(fill)


def _recomputed(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Proxies]:
    """Return the result of a layer, and proxies by the ids of its adapters."""
    condition = layer.condition()
    places, proxies = proxy_leaves(condition.trained.places)
    call = RecomputedCall(layer, condition, places)
    return call.forward(args, kwargs), dict(proxies)


def _leaves(
    evidence: CallSnapshot,
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Make leaves in place of the inputs, and the tensors that the layer gets for them."""
    leaves = {
        id(tensor): tensor.detach().requires_grad_() if tensor.requires_grad else tensor
        for tensor in evidence.inputs
    }
    with torch.enable_grad():
        return leaves, {
            id(tensor): leaves[id(tensor)] if is_leaf else leaves[id(tensor)][...]
            for tensor, is_leaf in zip(evidence.inputs, evidence.are_leaves, strict=True)
        }


def _drop_casts(leaves: Sequence[torch.Tensor]) -> None:
    """Free the casts that an autocast region which goes on keeps of ``leaves``."""
    for leaf in leaves:
        cast = cached_cast(leaf) if torch.is_autocast_cache_enabled() else None
        if cast is not None:
            cast.untyped_storage().resize_(0)


def _arguments(
    evidence: CallSnapshot, leaves: dict[int, torch.Tensor], with_caches: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the layer's arguments with other tensors; a streamed layer gets no caches."""

    def of(value: Any) -> Any:
        return None if isinstance(value, Cache) and not with_caches else replace(value, leaves)

    return tuple(map(of, evidence.args)), {key: of(value) for key, value in evidence.kwargs.items()}


def _values(
    outputs: dict[str, torch.Tensor],
    rng_end: RngStash,
    evidence: CallSnapshot,
    gradients: Gradients,
) -> dict[str, Any]:
    values = forward_values(
        {name: (tensor.detach(), tensor.requires_grad) for name, tensor in outputs.items()}, rng_end
    )
    for (name, _), gradient in zip(evidence.sources, gradients, strict=True):
        values[f"gradient of {name}"] = gradient
    return values
