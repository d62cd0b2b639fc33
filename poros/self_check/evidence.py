"""Records one call of one layer for the self-check, and names what is compared.

What is compared and what it runs from is read from the call itself and from PyTorch and
transformers, not from what the recomputation captured: a state that the recomputation forgets is
then missing on one side only. The process-wide settings of kernels are read as it reads them.

Gradients are drawn, since a layer is checked behind its forward. Only where hooks of the user may
run inside it, it is checked as its backward begins, with the gradient that arrives.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.output_capturing import _active_collector

from poros.self_check.compare import differing
from poros.stream.boundary import streamed_layer
from poros.stream.marks import version_of
from poros.stream.rng import RngStash, Start
from poros.stream.settings import Surroundings
from poros.stream.within import Within

_HIDDEN_STATES = "hidden_states"


@dataclass
class CallSnapshot:
    """The state around one layer's forward, and its results."""

    layer: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Mappings among them are copies from before the call."""
    inputs: list[torch.Tensor]
    are_leaves: list[bool]
    """Whether each input is a leaf, since autocast caches only casts of leaves."""
    input_versions: list[int]
    """PyTorch's version counter of each input."""
    trained: dict[str, nn.Parameter]
    """All trained parameters of the layer, whatever the recomputation saw of them."""
    recorded: list[str]
    """Keys of the values that transformers recorded inside layers, without their results."""
    start: Start
    """The random states."""
    surroundings: Surroundings
    has_cast_cache: bool
    """Whether autocast keeps its casts of parameters, and so sums what they are used for."""
    training: list[bool]
    outputs: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """Value, and whether it needs a gradient, by name."""
    output_versions: list[int] = field(default_factory=list)
    rng_end: RngStash | None = None
    is_late: bool = False
    """Whether the check runs as its backward begins."""

    @classmethod
    def collect(
        cls,
        layer: nn.Module,
        inputs: Sequence[torch.Tensor],
        run: Callable[[], Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        device: torch.device,
    ) -> tuple["CallSnapshot", Any]:
        """Run the streamed forward ``run``; return a snapshot of the call, and its result."""
        args, kwargs = arguments
        before = mappings_in(kwargs)
        collector: Mapping[str, list[Any]] = _active_collector.get() or {}
        recorded = [key for key in collector if key != _HIDDEN_STATES and not key.startswith("_")]
        evidence = cls(
            layer=layer,
            name=streamed_layer(layer).name,
            args=tuple(replace(value, {}) for value in args),
            kwargs={**kwargs, **{key: type(kwargs[key])(held) for key, held in before.items()}},
            inputs=list(inputs),
            are_leaves=[tensor.is_leaf for tensor in inputs],
            input_versions=_versions(inputs),
            trained={name: each for name, each in layer.named_parameters() if each.requires_grad},
            recorded=recorded,
            start=Start.capture(device),
            surroundings=Surroundings.capture(device),
            has_cast_cache=torch.is_autocast_cache_enabled(),
            training=[module.training for module in layer.modules()],
        )
        lengths = {key: len(collector[key]) for key in recorded}
        result = run()
        evidence.rng_end = RngStash.capture(device)
        record = {key: collector[key][length:] for key, length in lengths.items()}
        named = named_outputs(result, written(kwargs, before), record)
        evidence.outputs = {name: (tensor.detach(), tensor.requires_grad) for name, tensor in named}
        evidence.output_versions = _versions(tensor for tensor, _ in evidence.outputs.values())
        return evidence, result

    def is_intact(self) -> bool:
        """Whether inputs and trained parameters are unchanged; else its backward raises."""
        are_trained = all(each.requires_grad for each in self.trained.values())
        return are_trained and self.input_versions == _versions(self.inputs)

    def given(self) -> dict[str, Any]:
        """Return the forward's results, except outputs that were edited in place since."""
        now = _versions(tensor for tensor, _ in self.outputs.values())
        versions = zip(self.outputs.items(), self.output_versions, now, strict=True)
        left = {name: each for (name, each), before, after in versions if before == after}
        return forward_values(left, self.rng_end)

    @property
    def device(self) -> torch.device:
        return self.start.pytorch.device

    def state(self) -> AbstractContextManager[object]:
        """Restore the state around the forward inside the body, with gradients enabled."""

        def fill(stack: ExitStack) -> None:
            stack.callback(Start.capture(self.device).restore)
            self.start.restore()
            for device_type, enabled, dtype in self.surroundings.autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    region = torch.autocast(device_type, dtype, enabled, self.has_cast_cache)
                    stack.enter_context(region)
            stack.enter_context(self.surroundings.settings.replay())
            for module, flag in zip(self.layer.modules(), self.training, strict=True):
                stack.callback(setattr, module, "training", module.training)
                module.training = flag
            stack.enter_context(torch.enable_grad())

        return Within(fill)

    def backward_state(self) -> AbstractContextManager[object]:
        """Have random states inside the body that no forward ends with; they leave no trace.

        A check within the forward takes gradients outside of its autocast region, as is usual. A
        check as the backward begins takes them in the region of this backward, if any.
        """

        def fill(stack: ExitStack) -> None:
            stack.callback(RngStash.capture(self.device).restore)
            drawn_states(self.device).restore()
            for device_type, *_ in () if self.is_late else self.surroundings.autocast:
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))

        return Within(fill)

    @property
    def sources(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and originals of what gradients are taken for."""
        named_inputs = ((f"input {n}", tensor) for n, tensor in enumerate(self.inputs))
        return [
            *((name, tensor) for name, tensor in named_inputs if tensor.requires_grad),
            *self.trained.items(),
        ]

    @property
    def has_cache(self) -> bool:
        return any(isinstance(value, Cache) for value in (*self.args, *self.kwargs.values()))

    def incoming(self, gradient: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Draw normal gradients for the outputs that need one, from a separate generator.

        With a ``gradient``, it alone, for the only one of them. Where several need one, such as
        the logits of a router, none: the others are not known yet, and Functions of the user would
        see another sum here than in the backward itself. Then the forward alone is compared.
        """
        if gradient is not None:
            wanted = [name for name, (_, needed) in self.outputs.items() if needed]
            return {wanted[0]: gradient} if len(wanted) == 1 else {}
        generator = torch.Generator(self.device)
        return {
            name: torch.empty_like(tensor).normal_(generator=generator)
            for name, (tensor, needs_gradient) in self.outputs.items()
            if needs_gradient
        }


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    """Return the distinct tensors among the arguments of a layer, except those in caches."""
    found = {id(tensor): tensor for _, tensor in named("", arguments)}
    return list(found.values())


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(version_of, tensors))


def drawn_states(device: torch.device) -> RngStash:
    """Random states as at a backward: not those of a forward's end."""

    def state(of: torch.device | str) -> torch.Tensor:
        return torch.Generator(of).manual_seed(1).get_state()

    return RngStash(state("cpu"), state(device) if device.type == "cuda" else None, device)


def mappings_in(kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the present contents of the shared mappings among the arguments."""
    return {key: dict(value) for key, value in kwargs.items() if isinstance(value, UserDict | dict)}


def written(
    kwargs: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what was written to them since."""
    return {
        key: {entry: v for entry, v in kwargs[key].items() if v is not held.get(entry)}
        for key, held in before.items()
    }


def forward_values(
    outputs: Mapping[str, tuple[torch.Tensor, bool]], rng_end: RngStash | None
) -> dict[str, Any]:
    """Return all results of a forward, by name."""
    values: dict[str, Any] = {}
    for name, (tensor, needs_gradient) in outputs.items():
        values[name], values[f"{name} needs a gradient"] = tensor, needs_gradient
    return values if rng_end is None else values | random_states(rng_end)


def random_states(rng: RngStash) -> dict[str, Any]:
    """Return the states of PyTorch's generators, by name."""
    return {"random state": rng.cpu, "random state of the device": rng.device_state}


def named_outputs(
    result: Any, written: Mapping[str, Mapping[str, Any]], recorded: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Any]]:
    """Return all tensors that a layer returns, by name."""
    yield from named("output", result)
    for key, entries in written.items():
        for entry, value in entries.items():
            yield from named(f"{key}[{entry!r}]", value)
    for key, values in recorded.items():
        for number, value in enumerate(values):
            yield from named(f"recorded {key}[{number}]", value)


def named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in ``value``, by name."""
    if isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from named(f"{name}[{number}]", part)
    elif isinstance(value, UserDict | dict):
        for key, part in value.items():
            yield from named(f"{name}[{key!r}]", part)
    elif isinstance(value, torch.Tensor):
        yield name, value


def replace(value: Any, leaves: Mapping[int, torch.Tensor]) -> Any:
    """Copy ``value`` with other tensors, by the id of each."""
    if isinstance(value, torch.Tensor):
        return leaves.get(id(value), value)
    if isinstance(value, UserDict) or type(value) is dict:
        return type(value)({key: replace(entry, leaves) for key, entry in value.items()})
    if isinstance(value, Cache):
        return _copied(value)  # so that what the layer adds to it is dropped
    if isinstance(value, tuple | list):
        parts = [replace(part, leaves) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _copied(cache: Cache) -> Cache:
    """Copy a cache over the same tensors, which have a graph in a resident layer."""
    caches = [cache]
    if isinstance(cache, EncoderDecoderCache):
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    held = {
        id(tensor): tensor
        for layer in chain.from_iterable(part.layers for part in caches)
        for tensor in tree_leaves(list(vars(layer).values()))
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    }
    return copy.deepcopy(cache, held)


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Describe the first entry that is not bit for bit the same."""
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            difference = differing(value, other, name)
            if difference is not None:
                return str(difference)
        elif isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or value != other:
            return f"{name}: resident has {_brief(value)}, streamed has {_brief(other)}"
    extra = [name for name in found if name not in expected]
    return f"{extra[0]}: streamed only" if extra else None


def _brief(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor else str(value)
