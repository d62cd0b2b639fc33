"""One decoder layer, run without keeping its graph and recomputed in backward.

For a layer f with frozen weights W, adapters a, input h and random state s, forward computes

    h' = f(h; W, a, s)

and keeps only (h, s) and references to what else f was given. Backward brings W back, recomputes
f(h; W, a, s) with a graph, and returns dL/dh and dL/da from one call to ``torch.autograd.grad``.
The local graph is the one the resident run builds, fed with the same bits, so the gradients are the
same bits (Poros technical report, Algorithm 1 and Proposition 1; Chen et al. 2016 for the
recomputation).

Two choices differ from the report. Recomputation is per layer even if several layers travel as one
block, because the smallest graph needs the least memory. And the forward runs *with* gradients
enabled and drops its graph: a kernel that looks at the grad mode (a fused attention backend, a
compiled layer) then takes the same path in the forward, in the recomputation and in a resident run.

What may change between a forward and its backward:

- training flags, random states, autocast, allowed attention backends: replayed exactly;
- active adapters, their scaling, disabling or merging: ``RematerializationError``;
- an adapter edited in place, replaced, moved or deleted: ``RematerializationError``;
- the layer's input or any other tensor it was given edited in place: ``RematerializationError``;
- the layer's module tree: ``RematerializationError``.

Hooks on modules inside a layer run twice per step, as under activation checkpointing. Hooks on
parameters run once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from poros.ambient import AmbientState, adapter_state
from poros.errors import RematerializationError, UnsupportedModelError
from poros.rng import RngStash
from poros.walk import Phase

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""Values that a callee cannot change, so that handing them over twice is the same as once."""


class Adapter(NamedTuple):
    """One place of a trainable parameter in a layer, and the leaf that stands in for it there.

    The stand-in shares storage and version counter with the parameter. Gradients are taken with
    respect to it, so that hooks on the parameter run once, when autograd accumulates the result.
    """

    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter
    stand_in: nn.Parameter


class StreamedLayer(Protocol):
    """What recomputation needs to know of a layer."""

    name: str
    device: torch.device

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's own forward; only inside a visit."""

    def visit(self, phase: Phase, adapters: Sequence[Adapter]) -> AbstractContextManager[None]:
        """Hold the layer's block on the device, with the stand-ins in place."""

    def modules(self) -> Sequence[nn.Module]:
        """All modules of the layer now; the same object as long as the tree is the same."""

    def adapter_modules(self) -> Sequence[nn.Module]:
        """Those that PEFT put there."""


class _Place(NamedTuple):
    """Stands for tensor number ``number`` in a template."""

    number: int


class LayerCall:
    """One call of one layer: its arguments taken apart, and the state around it."""

    def __init__(
        self,
        layer: StreamedLayer,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        adapters: Sequence[Adapter],
    ) -> None:
        self.layer = layer
        self.adapters = adapters
        distinct = {id(each.parameter): each for each in adapters}
        self.parameters = [each.parameter for each in distinct.values()]
        self.stand_ins = [each.stand_in for each in distinct.values()]
        self.tensors: list[torch.Tensor] = []
        """Distinct tensors among the arguments, each once."""
        known: dict[int, int] = {}
        self._args = [
            self._take_apart(value, f"argument {index}", known) for index, value in enumerate(args)
        ]
        self._kwargs = {
            key: self._take_apart(value, f"argument {key!r}", known)
            for key, value in kwargs.items()
        }
        self.modules = layer.modules()
        self.ambient = AmbientState.capture(layer.device, self.modules)
        self._adapter_state = adapter_state(layer.adapter_modules())
        self._results: Any = None
        self._result_forms: list[tuple[torch.Size, torch.dtype, bool]] = []
        self._rng_end: RngStash | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the layer on ``tensors`` instead of the captured ones; the tensors it returns."""
        args = tuple(_put_together(each, tensors) for each in self._args)
        kwargs = {key: _put_together(each, tensors) for key, each in self._kwargs.items()}
        results: list[torch.Tensor] = []
        self._results = _template(
            self.layer.run(args, kwargs), f"result of {self.layer.name}", results, {}
        )
        return results

    def remember(self, results: Sequence[torch.Tensor]) -> None:
        """Keep what the recomputation must reproduce, short of the values themselves."""
        self._result_forms = _forms(results)
        self._rng_end = RngStash.capture(self.layer.device)

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The layer's result in its own form."""
        return _put_together(self._results, tensors)

    def require_unchanged(self) -> None:
        """Raise unless the layer is as it was at the forward."""
        name = self.layer.name
        if self.layer.modules() is not self.modules:
            raise RematerializationError(
                f"{name}: expected the modules of the forward, found others at its backward; "
                "add and remove adapters between steps, not within one"
            )
        if adapter_state(self.layer.adapter_modules()) != self._adapter_state:
            raise RematerializationError(
                f"{name}: expected the adapters that were active at the forward, found another "
                "choice (or scaling, or merge) at its backward; call backward first"
            )
        for adapter in self.adapters:
            now = adapter.owner.get(adapter.key)
            if now is not adapter.parameter or not shares_memory(
                adapter.parameter, adapter.stand_in
            ):
                raise RematerializationError(
                    f"{name}: adapter parameter {adapter.key!r} of shape "
                    f"{tuple(adapter.parameter.shape)} was replaced, moved or cast between forward "
                    "and backward; do so between steps"
                )

    def require_reproduced(self, results: Sequence[torch.Tensor], rng_end: RngStash) -> None:
        """Raise unless the recomputation ended as the forward did."""
        if _forms(results) != self._result_forms:
            raise RematerializationError(
                f"{self.layer.name}: forward gave tensors of form {self._result_forms}, the "
                f"recomputation {_forms(results)}; the layer depends on state that is not its input"
            )
        if self._rng_end is None or not rng_end.equals(self._rng_end):
            raise RematerializationError(
                f"{self.layer.name}: the recomputation drew other random numbers than the forward; "
                "the layer draws depending on state that is not its input"
            )

    def _take_apart(self, value: Any, where: str, known: dict[int, int]) -> Any:
        return _template(value, f"{where} of {self.layer.name}", self.tensors, known)


class RematerializeLayer(torch.autograd.Function):
    """Runs a ``LayerCall`` keeping inputs only, and recomputes it in backward.

    Inputs are the call, its tensors, then its adapter parameters: as inputs of the Function these
    get their gradients from autograd itself, so hooks, clipping, accumulation and DDP see nothing
    unusual.

    Exactness:
        Outputs and gradients are bitwise equal to running the layer in the surrounding graph, if
        the layer is a deterministic function of its inputs, its weights, its adapters and the state
        in ``AmbientState``.

    Raises:
        RematerializationError: In backward, for each change listed in the module's docstring.
    """

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        inputs = _leaves(tensors[: len(call.tensors)])
        with (
            call.layer.visit(Phase.FORWARD, call.adapters),
            call.ambient.without_autocast_cache(),
            torch.enable_grad(),
        ):
            results = call.run(inputs)
        call.remember(results)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        outputs = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(
            *(
                output
                for output, result in zip(outputs, results, strict=True)
                if not result.requires_grad
            )
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: LayerCall = ctx.call
        tensors = _saved_tensors(ctx, call.layer.name)
        call.require_unchanged()
        inputs = _leaves(tensors[: len(call.tensors)])
        sources = [*inputs, *call.stand_ins]
        wanted = [each for each in sources if each.requires_grad]
        with call.layer.visit(Phase.BACKWARD, call.adapters):
            with call.ambient.replay(call.modules), torch.enable_grad():
                results = call.run(inputs)
                rng_end = RngStash.capture(call.layer.device)
            call.require_reproduced(results, rng_end)
            # Outside of the replayed state: a resident run takes these gradients in the caller's.
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if result.requires_grad and gradient is not None
            ]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs:
                ends, starts = zip(*pairs, strict=True)
                found = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        by_source = {id(source): gradient for source, gradient in zip(wanted, found, strict=True)}
        return (None, *(by_source.get(id(source)) for source in sources))


def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().requires_grad_() if each.requires_grad else each for each in tensors]


def _saved_tensors(ctx: FunctionCtx, name: str) -> tuple[torch.Tensor, ...]:
    try:
        return ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RematerializationError(
            f"{name}: its input, another tensor it was given or one of its adapters was edited in "
            "place between forward and backward (an optimizer step in between?), so the forward "
            f"cannot be recomputed; edit it after backward. PyTorch says: {error}"
        ) from error


def _template(value: Any, where: str, tensors: list[torch.Tensor], known: dict[int, int]) -> Any:
    """``value`` with each distinct tensor moved to ``tensors`` and a ``_Place`` left behind."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = len(tensors)
            tensors.append(value)
        return _Place(known[id(value)])
    if isinstance(value, tuple):
        parts = [
            _template(each, f"{where}[{index}]", tensors, known) for index, each in enumerate(value)
        ]
        return _like(value, parts)
    if isinstance(value, _PLAIN):
        return value
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples of them or plain values, found a "
        f"{type(value).__qualname__}. What a layer reads from or writes to such an object by the "
        "side would be lost when it is recomputed, so streaming it is refused"
    )


def _put_together(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, _Place):
        return tensors[template.number]
    if isinstance(template, tuple):
        return _like(template, [_put_together(each, tensors) for each in template])
    return template


def _like(original: tuple[Any, ...], parts: list[Any]) -> Any:
    make: Callable[..., Any] = type(original)
    if hasattr(original, "_fields"):
        return make(*parts)
    return make(parts)


def _forms(results: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(each.shape, each.dtype, each.requires_grad) for each in results]


def shares_memory(parameter: nn.Parameter, stand_in: nn.Parameter) -> bool:
    """Whether ``stand_in`` still is the same bits as ``parameter``, in the same form."""
    return (
        stand_in.data_ptr() == parameter.data_ptr()
        and stand_in.dtype == parameter.dtype
        and stand_in.shape == parameter.shape
        and stand_in.device == parameter.device
    )
