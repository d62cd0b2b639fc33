"""The first training step on the user's own machine, checked layer by layer.

Each layer is checked once, in the first backward that reaches it, with the real batch. By then its
streamed forward and backward have happened. The check takes the same input h_k, random state s_k
and incoming gradient g_(k+1), loads the layer's frozen tensors afresh and synchronously into memory
of its own, runs the layer's own forward once in an ordinary graph, and requires equal bits of

    the output h_(k+1), the random state s_(k+1), the input gradient g_k, every adapter gradient.

Since h_(k+1) and s_(k+1) are where layer k + 1 starts, and g_k where layer k - 1 ends, the chain
from the embedding to the head is what a resident run computes. Nothing is kept of the check: random
states are put back, no gradient is accumulated, and the extra memory is one block at a time, which
the optimizer state takes later.

Neither slots, streams and copies nor the recomputation take part, so a fault in them cannot hide
itself. The bytes themselves are compared with a SHA-256 taken when they were moved to the host.
"""

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import KVSharingDict
from transformers.utils.output_capturing import _active_collector

from poros.block import own_forward
from poros.channels import recorded_outputs
from poros.errors import ParityError
from poros.frozen import LayerBindings, bind_block
from poros.gates.compare import differing
from poros.remat import LayerCall
from poros.takeover import Takeover

logger = logging.getLogger(__name__)


@dataclass
class Evidence:
    """What was there when one layer ran forward, and what came out."""

    layer: nn.Module
    call: LayerCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Mappings among them are copies from before the call."""
    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]
    recorded: list[str]
    """What transformers recorded inside layers at the time."""
    rng: list[torch.Tensor]
    autocast: list[tuple[str, bool, torch.dtype]]
    training: list[bool]
    outputs: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """Value, and whether it needs a gradient, by name."""
    rng_end: list[torch.Tensor] = field(default_factory=list)

    @contextmanager
    def state(self, device: torch.device) -> Iterator[None]:
        """The random states and the autocast of the forward, with gradients enabled."""
        before = _rng(device)
        with ExitStack() as stack:
            stack.callback(_set_rng, before, device)
            _set_rng(self.rng, device)
            for device_type, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(
                        torch.autocast(
                            device_type, dtype=dtype, enabled=enabled, cache_enabled=False
                        )
                    )
            stack.enter_context(torch.enable_grad())
            yield

    def streamed_values(self) -> dict[str, Any]:
        """Outputs and final random states of the streamed forward, by name."""
        return _values(self.outputs, self.rng_end)

    def named_gradients(
        self, grad_outputs: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients that arrived at the outputs, under the outputs' names."""
        returned, written, recorded = self.call.unpack_results(grad_outputs)
        mappings: dict[str, dict[str, Any]] = {}
        for key, entry, value in written:
            mappings.setdefault(key, {})[entry] = value
        return _named_outputs(returned, mappings, dict(recorded))


class SelfCheck:
    """The check of one prepared model.

    Args:
        takeover: What streams the model.
        layers: Its decoder layers.
        mode: ``"strict"`` raises on a mismatch, ``"warn"`` logs it.

    Attributes:
        mode: See above.
        status: ``"pending"``, ``"passed"`` or ``"failed"``.
        message: The mismatch, if any.
    """

    def __init__(self, takeover: Takeover, layers: Sequence[nn.Module], mode: str) -> None:
        self.mode = mode
        self.message: str | None = None
        self.num_layers = len(layers)
        self._device = takeover.device
        self._takeover = takeover
        self._digests = _digests(takeover)
        self._unchecked = {index: weakref.ref(layer) for index, layer in enumerate(layers)}

    @property
    def status(self) -> str:
        if self.message is not None:
            return "failed"
        return "pending" if self._unchecked else "passed"

    def watch(
        self, index: int, call: LayerCall, run: Callable[[], Any], arguments: tuple[Any, Any]
    ) -> Any:
        """Run one layer's forward as it is streamed, and check it when its backward has passed."""
        reference = self._unchecked.get(index)
        layer = reference() if reference is not None else None
        if layer is None:
            return run()
        args, kwargs = arguments
        before = _mappings(kwargs)
        evidence = Evidence(
            layer=layer,
            call=call,
            args=args,
            kwargs={**kwargs, **{key: KVSharingDict(held) for key, held in before.items()}},
            inputs=list(call.tensors),
            parameters=list(call.parameters),
            recorded=recorded_outputs(),
            rng=_rng(self._device),
            autocast=[
                (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in sorted({self._device.type, "cpu"})
            ],
            training=[module.training for module in layer.modules()],
        )
        collector: Mapping[str, list[Any]] = _active_collector.get() or {}
        lengths = {key: len(collector[key]) for key in evidence.recorded}
        result = run()
        evidence.rng_end = _rng(self._device)
        record = {key: collector[key][length:] for key, length in lengths.items()}
        evidence.outputs = {
            name: (tensor.detach(), tensor.requires_grad)
            for name, tensor in _named_outputs(result, _written(kwargs, before), record)
        }
        node = next((each.grad_fn for _, each in _named("", result) if each.grad_fn), None)
        if node is not None:
            node.register_hook(partial(self._check, index, evidence))
        return result

    def _check(
        self,
        index: int,
        evidence: Evidence,
        grad_inputs: Sequence[torch.Tensor | None],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """The hook behind the layer's backward."""
        flags = [module.training for module in evidence.layer.modules()]
        if index not in self._unchecked or flags != evidence.training:
            return
        del self._unchecked[index]
        name = evidence.call.layer.name
        block = index // self._takeover.block_size
        mismatch = self._damaged_bytes(block) or self._mismatch(
            index, evidence, grad_inputs, grad_outputs
        )
        if mismatch is not None:
            self.message = f"{name}: {mismatch}"
            if self.mode == "strict":
                raise ParityError(
                    f"self-check failed in {self.message}. The streamed step is not the resident "
                    "step on this machine; nothing has been trained on it. Please report it with "
                    "this message; poros.restore(model) gives the model back"
                )
            logger.warning("poros: self-check failed in %s; training goes on", self.message)
        elif not self._unchecked and self.message is None:
            logger.info("poros: self-check passed: %d layers, 0 differing bits", self.num_layers)

    def _damaged_bytes(self, block: int) -> str | None:
        if _digest(self._takeover.host.slabs[block].bytes) == self._digests[block]:
            return None
        return (
            f"the host bytes of block {block} are not those that poros.prepare took over (damaged "
            "memory, or written by someone)"
        )

    def _mismatch(
        self,
        index: int,
        evidence: Evidence,
        grad_inputs: Sequence[torch.Tensor | None],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> str | None:
        given = [*evidence.inputs, *evidence.parameters]
        gradients = {id(each): g for each, g in zip(given, grad_inputs, strict=True)}
        streamed = evidence.streamed_values()
        resident = self._resident(index, evidence, grad_outputs)
        for name, tensor in resident.sources:
            streamed[f"gradient of {name}"] = gradients.get(id(tensor))
        difference = _first_difference(resident.values, streamed)
        if difference is None:
            return None
        again = self._resident(index, evidence, grad_outputs)
        unsteady = _first_difference(resident.values, again.values)
        if unsteady is None:
            return difference
        return (
            "resident does not equal itself: running the layer twice from the same state gives "
            f"different bits ({unsteady}), so nothing can be said about streaming; look for a "
            "nondeterministic operation, or set torch.use_deterministic_algorithms(True)"
        )

    def _resident(
        self, index: int, evidence: Evidence, grad_outputs: Sequence[torch.Tensor | None]
    ) -> "Resident":
        """Run the layer in an ordinary graph, from the same state."""
        leaves = {
            id(each): each.detach().requires_grad_() if each.requires_grad else each
            for each in evidence.inputs
        }
        args = tuple(_replace(value, leaves) for value in evidence.args)
        kwargs = {key: _replace(value, leaves) for key, value in evidence.kwargs.items()}
        before = _mappings(kwargs)
        record: dict[str, list[Any]] = {key: [] for key in evidence.recorded}
        with _ordinary(self._takeover, index, evidence.layer) as (forward, adapters):
            with evidence.state(self._device):
                token = _active_collector.set(record)
                try:
                    result = forward(*args, **kwargs)
                finally:
                    _active_collector.reset(token)
                rng_end = _rng(self._device)
            outputs = dict(_named_outputs(result, _written(kwargs, before), record))
            pairs = [
                (outputs[name], gradient)
                for name, gradient in evidence.named_gradients(grad_outputs)
                if name in outputs and outputs[name].requires_grad
            ]
            sources = [
                (f"input {number}", each, leaves[id(each)])
                for number, each in enumerate(evidence.inputs)
                if each.requires_grad
            ]
            sources += adapters
            found: Sequence[torch.Tensor | None] = [None] * len(sources)
            if pairs:
                ends, starts = zip(*pairs, strict=True)
                wanted = [leaf for *_, leaf in sources]
                found = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        values = _values(
            {name: (each.detach(), each.requires_grad) for name, each in outputs.items()}, rng_end
        )
        for (name, *_), gradient in zip(sources, found, strict=True):
            values[f"gradient of {name}"] = gradient
        return Resident(values, [(name, tensor) for name, tensor, _ in sources])


class Resident(NamedTuple):
    """What an ordinary run of a layer gives."""

    values: dict[str, Any]
    sources: list[tuple[str, torch.Tensor]]
    """Names and originals of what it took gradients for."""


@contextmanager
def _ordinary(
    takeover: Takeover, index: int, layer: nn.Module
) -> Iterator[tuple[Callable[..., Any], list[tuple[str, nn.Parameter, nn.Parameter]]]]:
    """The layer's own forward over freshly loaded frozen tensors, and its adapters.

    Adapters come as name, parameter and stand-in: gradients of the stand-ins run nobody's hooks.
    """
    block = index // takeover.block_size
    slab = takeover.host.slabs[block]
    memory = slab.bytes.to(takeover.device, copy=True)
    bindings = LayerBindings(
        bind_block(takeover.blocks[block], slab.layout, memory, takeover.constants).get(index, [])
    )
    places = [
        (f"{name}.{key}" if name else key, module._parameters, key, parameter)
        for name, module in layer.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    stand_ins = {id(parameter): nn.Parameter(parameter.detach()) for *_, parameter in places}
    try:
        bindings.swap_in()
        for _, owner, key, parameter in places:
            owner[key] = stand_ins[id(parameter)]
        adapters = {id(p): (name, p, stand_ins[id(p)]) for name, _, _, p in places}
        yield partial(own_forward(layer), layer), list(adapters.values())
    finally:
        for _, owner, key, parameter in places:
            owner[key] = parameter
        bindings.swap_out()


def _rng(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_rng(states: Sequence[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _mappings(kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the shared mappings among the arguments hold now."""
    return {key: dict(value) for key, value in kwargs.items() if isinstance(value, KVSharingDict)}


def _written(
    kwargs: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What was written to them since."""
    return {
        key: {entry: v for entry, v in kwargs[key].items() if v is not held.get(entry)}
        for key, held in before.items()
    }


def _values(
    outputs: Mapping[str, tuple[torch.Tensor, bool]], rng_end: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """All that a forward gave, by name."""
    values: dict[str, Any] = {}
    for name, (tensor, needs_gradient) in outputs.items():
        values[name], values[f"{name} needs a gradient"] = tensor, needs_gradient
    for number, state in enumerate(rng_end):
        values[f"random state {number}"] = state
    return values


def _named_outputs(
    result: Any, written: Mapping[str, Mapping[str, Any]], recorded: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Any]]:
    yield from _named("output", result)
    for key, entries in written.items():
        for entry, value in entries.items():
            yield from _named(f"{key}[{entry!r}]", value)
    for key, values in recorded.items():
        for number, value in enumerate(values):
            yield from _named(f"recorded {key}[{number}]", value)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from _named(f"{name}[{number}]", part)
    elif isinstance(value, torch.Tensor):
        yield name, value


def _replace(value: Any, leaves: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return leaves.get(id(value), value)
    if isinstance(value, KVSharingDict):
        return KVSharingDict({key: _replace(each, leaves) for key, each in value.items()})
    if isinstance(value, tuple):
        parts = [_replace(each, leaves) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
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
    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
    )


def _digest(data: torch.Tensor) -> bytes:
    return hashlib.sha256(memoryview(data.numpy())).digest()


def _digests(takeover: Takeover) -> list[bytes]:
    # Hashing releases the interpreter lock, so the blocks are hashed side by side.
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, [slab.bytes for slab in takeover.host.slabs]))
