"""Recording what a layer does in one form of call, and comparing it with the visit itself.

See ``poros.replay.captures``.

Note: Memory
    What a recording reads that is not at the same address at each call (inputs, arriving
    gradients) is copied to fixed memory before a replay, and all that it gives is copied out of
    fixed memory after it: autograd keeps what it is handed. Recordings share that memory, and the
    memory of their temporary tensors, because visits are one after the other. What a layer that
    keeps its graph holds from forward to backward is nobody else's: its recording has copies of the
    inputs, and what autograd has saved stays alive with it. A forward that was recorded before may
    use the same memory in between, so it is not replayed meanwhile (``HeldGraph.order``).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from poros.kernels.copies import copy_all
from poros.kernels.dense_memory import DenseLayer
from poros.replay.call import CallFacts
from poros.replay.casts import AdapterCasts
from poros.replay.forms import Form, HeldGraph, Replayed
from poros.replay.graphs import Fixed, Recorder, Recording, SharedMemory, Spec
from poros.replay.links import Links
from poros.replay.routing import OF_ADAPTERS, Gradients, Tensors
from poros.replay.uses import Around
from poros.stream.attention import AttentionKernels, unchanged_flags
from poros.stream.body import LayerBody


class Recordings:
    """Makes recordings of one model, of which ``recorder`` and ``memory`` are.

    Args:
        are_beside: Whether they may run at the same time as others.

    Attributes:
        links: Joins them.
    """

    def __init__(self, recorder: Recorder, memory: SharedMemory, are_beside: bool = False) -> None:
        self._recorder = recorder
        self._memory = memory
        self._are_beside = are_beside
        self.links = Links(recorder)
        self._num_held = 0
        self._dense: DenseLayer | None = None

    def record(self, layer: LayerBody, form: Form) -> None:
        """Record what is wanted of ``form``. Not within a visit.

        Raises:
            RuntimeError: Or whatever else the layer or the device raises, if it cannot be. Some of
                it may be recorded then.
        """
        facts, around = form.facts, form.around
        workspace = layer.context.workspace if self._are_beside else None
        with (
            nullcontext() if workspace is None else workspace.left_alone(),
            layer.weights.hold(None, facts.leaves),
            layer.assuming_dense(form.dense_address),
            facts.rng.replay(),
            facts.uncounted(),
            # Another thread would have workspaces of cuBLAS of its own.
            torch.autograd.set_multithreading_enabled(False),
        ):
            dense = layer.context.dense
            if dense is not None and form.dense_address is not None:
                weights = layer.weights.bindings.dense_weights
                dense.record(layer.index, weights, lambda make: self._recorder.record(make).replay)
                self._dense = dense
            if form.forward is None:
                with AttentionKernels() as attention:
                    form.forward, form.links = self._forward(layer, form), self.links
                    if around is not None:
                        form.backward = self._backward(layer, form, around)
                form.may_vary = attention.may_vary
            if form.wants_steady and around is not None:
                with unchanged_flags(), AttentionKernels(deterministic=True):
                    form.steady = self._backward(layer, form, around, afresh=True)

    def begin_pass(self) -> None:
        """As ``SharedMemory.begin_pass``."""
        self._memory.begin_pass()

    def forget(self) -> None:
        """Release what is recorded of the recorder's, and in dense weights: blocks will move."""
        if self._dense is not None:
            self._dense.forget_recorded()
        self._recorder.forget()

    def _forward(self, layer: LayerBody, form: Form) -> Replayed:
        facts = form.facts
        given = self._memory.of("inputs", facts.specs)
        gives, held = list[Fixed](), list[tuple[Tensors, Tensors]]()
        is_kept = form.kind == "kept"

        def run() -> None:
            tensors = [each.clone() for each in given.tensors] if is_kept else given.tensors
            inputs = facts.inputs(tensors)
            results = facts.run(inputs, has_graph=form.kind != "inference")
            gives.append(self._give([each.detach() for each in results]))
            if is_kept:
                held.append((inputs, results))

        recording, casts = self._record(layer, facts, run, is_held=is_kept)
        if is_kept:
            self._num_held += 1
            places = self._recorder.memory_of(recording)
            form.held = HeldGraph(*held[0], places, self.links, order=self._num_held)
        return Replayed(recording, given, gives[0], range(len(gives[0].tensors)), casts)

    def _backward(
        self, layer: LayerBody, form: Form, around: Around, afresh: bool = False
    ) -> Replayed:
        """The gradients of a call; ``afresh`` with its forward, whatever is kept."""
        facts = form.facts
        specs = [] if form.kind == "kept" and not afresh else facts.specs
        arriving = [
            Spec(shape, dtype)
            for (shape, dtype, _), arrives in zip(facts.forms, around.arriving, strict=True)
            if arrives
        ]
        given = self._memory.of("arriving", (*specs, *arriving))
        made: list[tuple[Fixed, list[int | None]]] = []

        def values() -> list[torch.Tensor | None]:
            arrived = iter(given.tensors[len(specs) :])
            gradients = [next(arrived) if arrives else None for arrives in around.arriving]
            if form.held is not None and not afresh:
                ends = form.held.results, form.held.inputs
                return facts.differentiate(*ends, gradients, around, keeps_graph=True)
            inputs = facts.inputs(given.tensors[: len(specs)])
            return facts.differentiate(facts.recompute(inputs), inputs, gradients, around)

        def run() -> None:
            found = values()
            there = [number for number, each in enumerate(found) if each is not None]
            # Gradients of adapters stay, and are summed up together; those of inputs go.
            sources = [facts.uses.sources[number] for number in there]
            groups = [OF_ADAPTERS if each.number >= len(facts.specs) else 0 for each in sources]
            gives = self._give([each for each in found if each is not None], groups)
            places = {number: place for place, number in enumerate(there)}
            made.append((gives, [places.get(number) for number in range(len(found))]))

        recording, casts = self._record(layer, facts, run)
        return Replayed(recording, given, *made[0], casts)

    def _record(
        self, layer: LayerBody, facts: CallFacts, run: Callable[[], None], is_held: bool = False
    ) -> tuple[Recording, AdapterCasts | None]:
        """Record ``run``, and the casts of adapters that it reads, but where it holds them."""
        tally = layer.context.tally
        if tally is None or not tally.is_grouped or is_held:
            return self._recorder.record(run, is_held), None
        casts = AdapterCasts(self._memory, [each.leaf for each in facts.leaves])
        with tally.casting(casts):
            recording = self._recorder.record(run)
        return recording, casts.record(self._recorder)

    def _give(self, values: Tensors, groups: Sequence[int] = ()) -> Fixed:
        """Fixed memory with ``values`` in it; the copy is part of what is recorded."""
        gives = self._memory.of("results", [Spec.of(each) for each in values], groups)
        with torch.no_grad():
            copy_all(gives.tensors, [value.detach() for value in values])
        return gives


def with_steady_attention(
    facts: CallFacts, tensors: Tensors, gradients: Gradients, around: Around
) -> list[torch.Tensor | None]:
    """The gradients of a call from the random state of now, by attention that repeats itself."""
    with facts.uncounted(), unchanged_flags(), AttentionKernels(deterministic=True):
        inputs = facts.inputs(tensors)
        return facts.differentiate(facts.recompute(inputs), inputs, gradients, around)


def different_ones(found: Gradients, wanted: Gradients, what: str) -> str | None:
    """Which of ``found`` have not the bits of ``wanted``."""
    if len(found) != len(wanted):
        return f"{len(found)} {what}s instead of {len(wanted)}"
    numbers = [
        str(number)
        for number, (left, right) in enumerate(zip(found, wanted, strict=True))
        if not _is_same(left, right)
    ]
    return f"{what} {', '.join(numbers)} of {len(wanted)}" if numbers else None


def _is_same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)
