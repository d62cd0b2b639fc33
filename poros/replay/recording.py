"""Recording what a layer does in one form of call, and comparing it with the visit itself.

See ``poros.replay.captures``.

Note: Memory
    What a recording reads that is not at the same address at each call (inputs, arriving
    gradients) is copied to fixed memory before a replay, and all that it gives is copied out of
    fixed memory after it: autograd keeps what it is handed. Recordings share that memory, and the
    memory of their temporary tensors, because visits are one after the other. What a layer that
    keeps its graph holds from forward to backward is nobody else's: its recording has copies of the
    inputs, and what autograd has saved stays alive with it. A forward that was recorded before may
    use the same memory in between, so it is not replayed meanwhile (``HeldGraphs``).
"""

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

import torch

from poros.kernels.copies import copy_all
from poros.kernels.dequantize import DenseLayer
from poros.replay.call import CallFacts, total
from poros.replay.casts import AdapterCasts
from poros.replay.forms import Form, Replayed, Row
from poros.replay.graphs import Fixed, Recorder, Recording, SharedMemory, Spec
from poros.replay.routing import OF_ADAPTERS, Gradients, Tensors
from poros.replay.uses import Around
from poros.stream.attention import AttentionKernels, unchanged_flags
from poros.stream.body import LayerBody


class Recordings:
    """Makes the recordings of one model.

    Args:
        recorder: Records.
        memory: That recordings share.

    Attributes:
        varies: Whether attention was seen not to repeat itself, so that what proves a recording is
            recorded with it; it takes memory of its own.
    """

    def __init__(self, recorder: Recorder, memory: SharedMemory) -> None:
        self.varies = False
        self._recorder = recorder
        self._memory = memory
        self._num_held = 0
        self._dense: DenseLayer | None = None
        self._known: WeakValueDictionary[Hashable, Recording] = WeakValueDictionary()
        """What rows of several layers have in common; rows hold the tensors of it."""

    def record(self, layer: LayerBody, form: Form) -> None:
        """Record what is wanted of ``form``. Not within a visit.

        Raises:
            RuntimeError: Or whatever else the layer or the device raises, if it cannot be. Some of
                it may be recorded then.
        """
        facts = form.facts
        if facts is None:
            return
        is_late = form.forward is not None and None in form.backwards.values()
        if form.kind == "kept" and is_late:
            # A backward belongs to the graph of a forward, which others have changed since.
            form.drop_graph()
        wanted = [around for around, made in form.backwards.items() if made is None]
        with (
            layer.weights.hold(None, facts.leaves),
            layer.assuming_dense(form.dense_address),
            facts.recording(),
            # Another thread would have workspaces of cuBLAS of its own.
            torch.autograd.set_multithreading_enabled(False),
        ):
            dense = layer.context.dense
            if dense is not None and form.dense_address is not None:
                weights = layer.weights.bindings.dense_weights
                dense.record(layer.index, weights, lambda make: self._recorder.record(make).replay)
                self._dense = dense
            with AttentionKernels() as attention:
                if form.forward is None:
                    form.forward = self._forward(layer, form, facts)
                for around in wanted:
                    form.backwards[around] = self._backward(layer, form, facts, around)
            form.may_vary |= attention.may_vary
            if form.may_vary and self.varies:
                form.deterministic |= dict.fromkeys(wanted)
            for around in [each for each, made in form.deterministic.items() if made is None]:
                with unchanged_flags(), AttentionKernels(deterministic=True):
                    steady = self._backward(layer, form, facts, around, afresh=True)
                    form.deterministic[around] = steady

    def join(self, form: Form) -> None:
        """Join what is recorded of ``form`` for rows of micro-batches, where that is wanted.

        Raises:
            RuntimeError: If it cannot be.
        """
        for number in [each for each, made in form.rows.items() if made is None]:
            row = None if form.facts is None else self._row(form, form.facts, number)
            if row is None:
                del form.rows[number]
            else:
                form.rows[number] = row

    def forget(self) -> None:
        """Release what is recorded of the recorder's, and in dense weights: blocks will move."""
        if self._dense is not None:
            self._dense.forget_recorded()
        self._recorder.forget()

    def _forward(self, layer: LayerBody, form: Form, facts: CallFacts) -> Replayed:
        given = self._memory.of("inputs", facts.specs)
        gives: list[Fixed] = []
        is_kept = form.kind == "kept"

        def run() -> None:
            tensors = [each.clone() for each in given.tensors] if is_kept else given.tensors
            inputs = facts.inputs(tensors)
            results = facts.run(inputs, has_graph=form.kind != "inference")
            gives.append(self._give([each.detach() for each in results]))
            if is_kept:
                self._num_held += 1
                form.held, form.order = (inputs, results), self._num_held

        recording, casts = self._record(layer, facts, run, is_held=is_kept)
        places = range(len(gives[0].tensors))
        return Replayed(recording, given, gives[0], places, casts=casts)

    def _backward(
        self,
        layer: LayerBody,
        form: Form,
        facts: CallFacts,
        around: Around,
        afresh: bool = False,
    ) -> Replayed:
        """The gradients of a call; ``afresh`` with its forward, whatever is kept."""
        arriving = [
            Spec(shape, dtype)
            for (shape, dtype, _), arrives in zip(facts.forms, around.arriving, strict=True)
            if arrives
        ]
        if form.kind == "kept" and not afresh:
            return self._of_kept(layer, form, facts, around, arriving)
        given = self._memory.of("arriving", (*facts.specs, *arriving))

        def values() -> list[torch.Tensor | None]:
            number = len(facts.specs)
            inputs = facts.inputs(given.tensors[:number])
            results = facts.recompute(inputs, not self._recorder.sees_operators)
            gradients = _spread(given.tensors[number:], around)
            return facts.differentiate(results, inputs, gradients, around)

        return self._gradients(layer, given, values, facts)

    def _of_kept(
        self,
        layer: LayerBody,
        form: Form,
        facts: CallFacts,
        around: Around,
        arriving: Sequence[Spec],
    ) -> Replayed:
        inputs, results = form.held
        given = self._memory.of("arriving", arriving)

        def values() -> list[torch.Tensor | None]:
            gradients = _spread(given.tensors, around)
            return facts.differentiate(results, inputs, gradients, around, keeps_graph=True)

        return self._gradients(layer, given, values, facts)

    def _gradients(
        self,
        layer: LayerBody,
        given: Fixed,
        values: Callable[[], list[torch.Tensor | None]],
        facts: CallFacts,
    ) -> Replayed:
        made: list[tuple[Fixed, list[int | None]]] = []

        def run() -> None:
            found = values()
            known = {id(tensor): -1 - number for number, tensor in enumerate(given.tensors)}
            own = [
                (each, OF_ADAPTERS if facts.is_of_adapter(number) else 0)
                for number, each in enumerate(found)
                if each is not None and id(each) not in known
            ]
            # Gradients of adapters stay, and are summed up together; those of inputs go.
            gives = self._give([each for each, _ in own], [group for _, group in own])
            numbers = {id(each): number for number, (each, _) in enumerate(own)}
            places = [
                None if each is None else known.get(id(each), numbers.get(id(each)))
                for each in found
            ]
            made.append((gives, places))

        recording, casts = self._record(layer, facts, run)
        return Replayed(recording, given, *made[0], casts=casts)

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

    def _row(self, form: Form, facts: CallFacts, number: int) -> Row | None:
        """The visits of so many micro-batches, joined; None if they cannot be."""
        forward = form.forward
        backward = next((each for each in form.backwards.values() if each is not None), None)
        piece = None if backward is None else backward.gives.piece_of(OF_ADAPTERS)
        if forward is None or backward is None or piece is None or forward.places[0] is None:
            return None
        uses = [use for each in facts.uses_of_tensors for use in each]
        if uses and all(backward.places[use] is None for use in uses):
            return None
        row = Row(self._memory, facts, number, forward, backward, piece)
        forwards, backwards = list[Recording](), list[Recording]()
        for part in range(number):
            given, gradient = row.given(part), row.gradients.tensors[part]
            result = forward.gives.tensors[forward.places[0]]
            forwards += [
                self._copies(forward.given.tensors, given),
                forward.recording,
                self._copies([given[0]], [result]),
            ]
            found = backward.found_in([*given, gradient], backward.gives.tensors)
            terms = [each for use in uses if (each := found[use]) is not None]
            backwards += [
                self._copies(backward.given.tensors, [*given, gradient]),
                backward.recording,
                self._sums(row.total, piece),
                *([self._copies_of_sum(gradient, terms)] if terms else []),
            ]
        forward_of_all, backward_of_all = map(self._recorder.join, (forwards, backwards))
        if forward_of_all is None or backward_of_all is None:
            return None
        row.forward, row.backward = forward_of_all, backward_of_all
        row.parts = [*forwards, *backwards]
        return row

    def _copies(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Recording:
        return self._once(lambda: copy_all(places, sources), "copy", *places, *sources)

    def _sums(self, place: torch.Tensor, term: torch.Tensor) -> Recording:
        def run() -> None:
            place.add_(term)

        return self._once(run, "sum", place, term)

    def _copies_of_sum(self, place: torch.Tensor, terms: Sequence[torch.Tensor]) -> Recording:
        def run() -> None:
            found = total(terms)
            if found is not None:
                place.copy_(found)

        return self._once(run, "copy of a sum", place, *terms)

    def _once(self, run: Callable[[], None], what: str, *tensors: torch.Tensor) -> Recording:
        """Record what is done with these tensors, once for all layers."""
        key = what, *[(each.data_ptr(), each.shape, each.dtype) for each in tensors]
        found = self._known.get(key)
        if found is None:
            with torch.no_grad():
                found = self._known[key] = self._recorder.record(run)
        return found

    def _give(self, values: Tensors, groups: Sequence[int] = ()) -> Fixed:
        """Fixed memory with ``values`` in it; the copy is part of what is recorded."""
        gives = self._memory.of("results", [Spec.of(each) for each in values], groups)
        with torch.no_grad():
            copy_all(gives.tensors, [value.detach() for value in values])
        return gives


def _spread(arrived: Tensors, around: Around) -> list[torch.Tensor | None]:
    """``arrived`` in the places of the results that have a gradient."""
    gradients = iter(arrived)
    return [next(gradients) if arrives else None for arrives in around.arriving]


def with_steady_attention(
    facts: CallFacts, tensors: Tensors, gradients: Gradients, around: Around
) -> list[torch.Tensor | None]:
    """The gradients of a call from the random state of now, by attention that repeats itself."""
    with facts.recording(draws_anew=True), unchanged_flags(), AttentionKernels(deterministic=True):
        inputs = facts.inputs(tensors)
        results = facts.recompute(inputs, leaves_out=False)
        return facts.differentiate(results, inputs, gradients, around)


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
