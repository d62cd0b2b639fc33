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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector

from poros.block import is_streamed, runtime_of
from poros.errors import ParityError
from poros.frozen import LayerBindings, bind_block
from poros.gates.evidence import (
    Evidence,
    first_difference,
    forward_values,
    mappings_in,
    named,
    named_outputs,
    random_states,
    replace,
    written,
)
from poros.remat import LayerCall
from poros.takeover import Takeover

logger = logging.getLogger(__name__)

_CACHE_HINT = (
    ". The layer was called with an empty KV cache, which a streamed layer does without; it may "
    "compute otherwise with one: pass use_cache=False, in the resident run as well"
)


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
        self._without_gradient: set[int] = set()
        """Layers of which only the forward was checked: nothing below them is trained."""

    @property
    def status(self) -> str:
        if self.message is not None:
            return "failed"
        return "passed" if self._is_complete else "pending"

    @property
    def _is_complete(self) -> bool:
        return (
            len(self._unchecked) < self.num_layers
            and self._unchecked.keys() <= self._without_gradient
        )

    def watch(
        self, index: int, call: LayerCall, run: Callable[[], Any], arguments: tuple[Any, Any]
    ) -> Any:
        """Run one layer's forward as it is streamed, and check it when its backward has passed."""
        reference = self._unchecked.get(index)
        layer = reference() if reference is not None else None
        if layer is None:
            return run()
        if not call.needs_gradient and (index in self._without_gradient or not layer.training):
            return run()
        self._without_gradient.discard(index)
        evidence, result = Evidence.collect(layer, call, run, arguments, self._device)
        node = next((each.grad_fn for _, each in named("", result) if each.grad_fn), None)
        held = [evidence]
        if node is None:
            self._begin(held, ())
            self._check(index, held, (), ())
        else:
            # Emptied by the check: the graph may live on, with the loss.
            node.register_prehook(partial(self._begin, held))
            node.register_hook(partial(self._check, index, held))
        return result

    def _begin(self, held: Sequence[Evidence], grad_outputs: object) -> None:
        for evidence in held:
            evidence.rng_backward = random_states(self._device)

    def _check(
        self,
        index: int,
        held: list[Evidence],
        grad_inputs: Sequence[torch.Tensor | None],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """The hook behind the layer's backward."""
        if not held:
            return
        evidence = held.pop()
        if index not in self._unchecked or not evidence.is_intact():
            return
        if not is_streamed(evidence.layer):
            return  # restored since its forward
        if evidence.is_on_host:
            evidence.move(self._device)
        if grad_inputs:
            del self._unchecked[index]
        else:
            self._without_gradient.add(index)
        mismatch = (
            self._damaged_bytes(index // self._takeover.block_size)
            or self._disturbed(evidence)
            or self._mismatch(index, evidence, grad_inputs, grad_outputs)
        )
        self._settle(evidence.call.layer.name, mismatch)

    def watch_bytes(self, index: int, buffer: torch.Tensor) -> None:
        """Check a kept layer once: it runs in an ordinary graph, so its bytes are all there is.

        Streams:
            Copies the block back behind what the compute stream waits for, and blocks the host.
        """
        reference = self._unchecked.get(index)
        layer = reference() if reference is not None else None
        if layer is None:
            return
        del self._unchecked[index]
        block = index // self._takeover.block_size
        mismatch = None
        if _digest(buffer.cpu()) != self._digests[block]:
            mismatch = f"block {block} on the device is not what poros.prepare took over"
        self._settle(runtime_of(layer).name, self._damaged_bytes(block) or mismatch)

    def _settle(self, name: str, mismatch: str | None) -> None:
        if mismatch is not None:
            self.message = f"{name}: {mismatch}"
            if self.mode == "strict":
                raise ParityError(
                    f"self-check failed in {self.message}. The streamed step is not the resident "
                    "step on this machine; nothing has been trained on it. Please report it with "
                    "this message; poros.restore(model) gives the model back"
                )
            logger.warning("poros: self-check failed in %s; training goes on", self.message)
        elif self.status == "passed":
            logger.info("poros: self-check passed: %d layers, 0 differing bits", self.num_layers)

    def _damaged_bytes(self, block: int) -> str | None:
        if _digest(self._takeover.host.read(block)) == self._digests[block]:
            return None
        return f"the host bytes of block {block} are not those that poros.prepare took over"

    def _disturbed(self, evidence: Evidence) -> str | None:
        before, now = (
            forward_values({}, evidence.rng_backward),
            forward_values({}, random_states(self._device)),
        )
        difference = first_difference(before, now)
        return difference and f"its backward has to leave no trace of random draws: {difference}"

    def _mismatch(
        self,
        index: int,
        evidence: Evidence,
        grad_inputs: Sequence[torch.Tensor | None],
        grad_outputs: Sequence[torch.Tensor | None],
    ) -> str | None:
        given = [*evidence.inputs, *evidence.parameters]
        gradients = dict(zip(map(id, given), grad_inputs, strict=bool(grad_inputs)))
        streamed = forward_values(evidence.outputs, evidence.rng_end)
        resident = self._resident(index, evidence, grad_outputs)
        for name, tensor in resident.sources:
            streamed[f"gradient of {name}"] = gradients.get(id(tensor))
        difference = first_difference(resident.values, evidence.comparable(streamed))
        if difference is None:
            return None
        kept = {f"input {n}": each.detach().clone() for n, each in enumerate(evidence.inputs)}
        again = self._resident(index, evidence, grad_outputs)
        unsteady = first_difference(resident.values, again.values)
        if unsteady is None:
            return difference + (_CACHE_HINT if evidence.has_cache else "")
        now = {f"input {n}": each for n, each in enumerate(evidence.inputs)}
        edited = first_difference(kept, now)
        if edited is not None:
            return f"the layer, or a hook inside it, edits what it is given in place ({edited})"
        return (
            "resident does not equal itself: running the layer twice from the same state gives "
            f"different bits ({unsteady}), so nothing can be said about streaming. On GPUs the "
            "fused attention kernels are such an operation over long sequences: use "
            "torch.use_deterministic_algorithms(True) (TrainingArguments(full_determinism=True)), "
            'or self_check="warn" to train without a proof'
        )

    def _resident(
        self, index: int, evidence: Evidence, grad_outputs: Sequence[torch.Tensor | None]
    ) -> "Resident":
        """Run the layer in an ordinary graph, from the same state."""
        leaves = {
            id(each): each.detach().requires_grad_() if each.requires_grad else each
            for each in evidence.inputs
        }
        args = tuple(replace(value, leaves) for value in evidence.args)
        kwargs = {key: replace(value, leaves) for key, value in evidence.kwargs.items()}
        before = mappings_in(kwargs)
        record: dict[str, list[Any]] = {key: [] for key in evidence.recorded}
        with _ordinary(self._takeover, index, evidence.layer) as (forward, adapters):
            with evidence.state(self._device):
                token = _active_collector.set(record)
                try:
                    result = forward(*args, **kwargs)
                finally:
                    _active_collector.reset(token)
                rng_end = random_states(self._device)
            outputs = dict(named_outputs(result, written(kwargs, before), record))
            # By tensor: one that comes out under two names has one gradient, not twice the same.
            pairs = {
                id(outputs[name]): (outputs[name], gradient)
                for name, gradient in evidence.named_gradients(grad_outputs)
                if name in outputs and outputs[name].requires_grad
            }
            sources = [
                (f"input {number}", each, leaves[id(each)])
                for number, each in enumerate(evidence.inputs)
                if each.requires_grad
            ]
            sources += adapters
            found: Sequence[torch.Tensor | None] = [None] * len(sources)
            if pairs:
                ends, starts = zip(*pairs.values(), strict=True)
                wanted = [leaf for *_, leaf in sources]
                found = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        values = forward_values(
            {n: (e.detach(), e.requires_grad) for n, e in outputs.items()}, rng_end
        )
        for (name, *_), gradient in zip(sources, found, strict=True):
            values[f"gradient of {name}"] = gradient
        return Resident(
            evidence.comparable(values), [(name, tensor) for name, tensor, _ in sources]
        )


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
    memory = takeover.host.read(block).to(takeover.device, copy=True)
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
        yield partial(runtime_of(layer).own_forward, layer), list(adapters.values())
    finally:
        for _, owner, key, parameter in places:
            owner[key] = parameter
        bindings.swap_out()


def _digest(data: torch.Tensor) -> bytes:
    return hashlib.sha256(data.numpy().data).digest()


def _digests(takeover: Takeover) -> list[bytes]:
    # Hashing releases the interpreter lock, so the blocks are hashed side by side. Few of them,
    # because blocks on a disk are in memory for as long.
    host = takeover.host
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda block: _digest(host.read(block)), range(len(host.slabs))))
