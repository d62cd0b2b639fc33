"""Visits of one layer by micro-batches, one behind the other: replayed one by one, or in one go.

The first visit of a row is looked up and replayed as any call is (``poros.replay.captures``).
Nobody's code runs from then to the end of the row, so what decides what the layer computes, and
the state around it, are for all of them those of the first.

Note: In one go
    A visit that is replayed by itself costs the host a launch, copies and objects of Python (on the
    host of an H100 0.15 ms in a forward), while a device may have nothing to do. So the recorded
    visit is joined with itself, once for each of the micro-batches behind the first one, and what
    copies their tensors there and back. Hidden states are in fixed memory together, and results
    take their places; so do gradients. Gradients of adapters are added to a copy of the sum so far,
    for one micro-batch after the other.

Note: Layers that keep their graphs
    The recording of such a layer has one graph in its memory. So the joined forward copies that of
    each micro-batch to memory of its own, and the joined backward copies each back. Where calls are
    not all of one form, or fewer, and so are replayed one by one, their graphs wait there as well:
    there is no memory for more.

Note: Which
    Those of one form that draw no random numbers: what a micro-batch draws in one layer is not
    right behind what the one before it has drawn there. And those whose hidden states are small:
    with large ones a device is busy for longer than the host, and the memory is better used.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import is_
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch

from poros.kernels.copies import copy_all
from poros.replay.call import LayerCall, total
from poros.replay.forms import Form, HeldGraph, Replayed
from poros.replay.graphs import Recorder, Recording, SharedMemory, Spec
from poros.replay.remat import ReplayedVisit
from poros.replay.routing import OF_ADAPTERS, GradientSums
from poros.slots.schedule import Phase
from poros.stream.rng import RngStash

_MOST_BYTES = 2**26
"""Of the hidden states of a row. There is memory for these twice."""
_MOST_ROWS = 4
"""Of one form: numbers of micro-batches that are joined. One of layers that keep their graphs, of
which each has copies."""
_LEAST_ROWS = 4
"""Of one form, before it is joined: the first steps move blocks, and all is recorded anew."""


class Row:
    """Visits of one form by a ``number`` of micro-batches, joined.

    Attributes:
        hidden: Their hidden states, and after a replay their results.
        gradients: Those of their results, and after a replay those of their hidden states.
        total: The sum of the gradients of adapters, without those of these micro-batches and then
            with them.
        one_backward: The recorded backward of one of them.
        aside: Copies of the graph of each, and of the one before them, of a layer that keeps them.
        forward, backward: Those of all.
        parts: What these are joined of.
    """

    forward: Recording
    backward: Recording
    parts: Sequence[Recording]

    def __init__(self, form: Form, memory: SharedMemory, number: int, piece: torch.Tensor) -> None:
        hidden, *others = form.facts.specs
        self.one_backward = form.backward
        self.hidden = memory.of("hidden states of a row", [hidden] * number)
        self.gradients = memory.of("gradients of a row", [hidden] * number)
        (self.total,) = memory.of("sums of a row", [Spec.of(piece)]).tensors
        self._others = memory.of("what a row is given besides", others * number)
        self._num_others = len(others)
        self.aside = [form.held.room() for _ in range(number + 1)] if form.held else []
        if form.held is not None:
            form.held.rooms += self.aside
        self._waiting: WeakSet[LayerCall] = WeakSet()
        """The calls whose graphs are in these copies, until their backward."""

    def given(self, number: int) -> list[torch.Tensor]:
        """What the visit of that number reads."""
        first = number * self._num_others
        return [self.hidden.tensors[number], *self._others.tensors[first:][: self._num_others]]

    def fill(self, one: Replayed, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """Have the tensors of each call there, for one replay of a recording made of ``one``."""
        one.given.forget()  # those of the last call are there then
        # Results take the places of hidden states, so none of these is there already.
        copy_all(self.hidden.tensors, [each[0].detach() for each in sources])
        self._others.fill([tensor for each in sources for tensor in each[1:]])

    def make_free(self, held: HeldGraph) -> bool:
        """Have nothing in its copies; whether there is memory for others' graphs that wait there.

        Those that a replay of it has left are gone.
        """
        for known in self._waiting:
            held.forget(known)
        self._waiting = WeakSet()
        return held.vacate(self.aside)

    def have_aside(self, held: HeldGraph, calls: Sequence[LayerCall]) -> None:
        """The graphs of ``calls`` wait in its copies from now on."""
        self._waiting = WeakSet(calls)
        for call, copies in zip(calls, self.aside, strict=False):
            held.note_aside(call, copies)

    def has_aside(self, held: HeldGraph, calls: Sequence[LayerCall]) -> bool:
        """Whether the graphs of ``calls`` wait in its copies, behind that of the first one."""
        return all(map(is_, map(held.aside, calls), self.aside[1:]))

    def fill_gradients(self, gradients: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Have the gradients of results there, and the sum so far, for one replay."""
        copy_all(self.gradients.tensors, gradients)
        self.total.copy_(total)


class Links:
    """What passes tensors on between recordings that are joined: each copy is recorded once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: WeakValueDictionary[Hashable, Recording] = WeakValueDictionary()
        """What several have in common; they hold the tensors of it."""

    def join(self, recordings: Sequence[Recording]) -> Recording | None:
        """As ``Recorder.join``."""
        return self._recorder.join(recordings)

    def copies(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Recording:
        """Of ``sources`` to their places."""
        return self._once(lambda: copy_all(places, sources), "copy", *places, *sources)

    def add(self, place: torch.Tensor, term: torch.Tensor) -> Recording:
        """Of a term to the sum in its place."""

        def run() -> None:
            place.add_(term)

        return self._once(run, "sum", place, term)

    def copy_of_sum(self, place: torch.Tensor, terms: Sequence[torch.Tensor]) -> Recording:
        """Of the sum of ``terms``, one after the other."""

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


class Rows:
    """Replays visits that are right behind another one of their layer, and notes how many.

    Attributes:
        num_joined: Visits that were replayed in one go with others, of micro-batches or layers.
        links: Joins recordings.
    """

    def __init__(
        self, memory: SharedMemory, recorder: Recorder, note: Callable[[Form, int], None]
    ) -> None:
        self.num_joined = 0
        self._memory, self._note = memory, note
        self.links = Links(recorder)

    def one(
        self, visit: ReplayedVisit, arguments: LayerCall, hidden: torch.Tensor, rng: RngStash
    ) -> tuple[Any, ReplayedVisit] | None:
        """Replay a call of the layer that ``visit`` is of, for another micro-batch right behind it.

        Args:
            visit: Without a graph.
            arguments: A call of another layer by the micro-batch, with the same arguments but for
                the ``hidden`` states.
            hidden: Hidden states.
            rng: The random states that it begins with. They are those of now only if it draws.

        Returns:
            The layer's result, and the visit; None if the call is of another form.
        """
        form, forward = visit.form, _forward_of(visit, [arguments])
        if forward is None or not form.put_aside():
            return None
        call = visit.call.again([hidden, *arguments.others], rng)
        if forward.has_drawn:
            rng.restore()
        kept = call.offload_input() if form.held is None else call.tensors
        with call.layer.weights.occupy(Phase.FORWARD):
            results = forward.run(call.tensors, is_again=True)
        if forward.has_drawn:
            call.note_end()
        else:
            call.note_end_as(rng)
        form.in_flight = ref(call)
        self._note(form, 1)
        return form.facts.result_of(results), visit.again(call, kept)

    def all(
        self,
        visit: ReplayedVisit,
        arguments: Sequence[LayerCall],
        hidden: Sequence[torch.Tensor],
        rngs: Sequence[RngStash],
    ) -> list[tuple[Any, ReplayedVisit]] | None:
        """``one`` for each of several micro-batches; None if that is not recorded."""
        row: Row | None = visit.form.rows.get(len(arguments))
        forward = None if row is None else _forward_of(visit, arguments)
        if row is None or forward is None:
            return None
        form, held = visit.form, visit.form.held
        if held is not None:
            if form.in_flight() is not visit.call or not row.make_free(held):
                return None
            form.in_flight = lambda: None  # its graph gives way to those of the others
        sources = [[given, *known.others] for known, given in zip(arguments, hidden, strict=True)]
        with visit.call.layer.weights.occupy(Phase.FORWARD):
            row.fill(forward, sources)
            row.forward.replay()
            results = row.hidden.copies()
        found: list[tuple[Any, ReplayedVisit]] = []
        for source, result, rng in zip(sources, results, rngs, strict=True):
            call = visit.call.again(source, rng)
            call.note_end_as(rng)
            found.append((form.facts.result_of([result]), visit.again(call, source)))
        if held is not None:
            row.have_aside(held, [visit.call, *(each.call for _, each in found)])
        self._note_joined(form, len(found))
        return found

    def backward(
        self,
        visits: Sequence[ReplayedVisit],
        gradients: Sequence[torch.Tensor],
        sums: GradientSums,
    ) -> Sequence[torch.Tensor | None] | None:
        """``ReplayedVisit.backward`` of each; None if that is not recorded, and nothing was done.

        They are right behind one whose backward was replayed, and has begun ``sums``.
        """
        form, behind, number = visits[0].form, sums.behind, len(visits)
        if behind is None or not _may_be_together(visits, gradients[0]):
            return None
        form.num_rows[number] += 1
        most = _MOST_ROWS if form.held is None else 1
        if form.num_rows[number] == _LEAST_ROWS and len(form.rows) < most:
            form.rows.setdefault(number, None)
        row, total = form.rows.get(number), sums.total_of(behind)
        if row is None or total is None or row.one_backward is not behind:
            return None
        if form.held is not None:
            calls = [each.call for each in visits]
            if not form.put_aside() or not row.has_aside(form.held, calls):
                return None
        with torch.no_grad():
            sources = [visit.intact() for visit in visits]
            for visit in visits:
                visit.release()
            with visits[0].call.layer.weights.occupy(Phase.BACKWARD):
                if form.held is None:
                    row.fill(behind, sources)
                behind.given.forget()  # what arrived for the last call is there then
                row.fill_gradients(gradients, total)
                row.backward.replay()
                total.copy_(row.total)
                found = row.gradients.copies()
        self._note_joined(form, number)
        return found if form.facts.uses.of_tensors else [None] * number

    def _note_joined(self, form: Form, number: int) -> None:
        self.num_joined += number
        self._note(form, number)

    # ------------------------------------------------------------------- joining

    def join(self, form: Form) -> bool:
        """Join what is recorded of ``form``, where that is wanted and can be.

        Returns:
            Whether that took memory for graphs.

        Raises:
            RuntimeError: If the device cannot.
        """
        wanted = [each for each, made in form.rows.items() if made is None]
        for number in wanted:
            form.rows[number] = self._joined(form, number)
            if form.rows[number] is None:
                del form.rows[number]
        return bool(wanted) and form.held is not None

    def _joined(self, form: Form, number: int) -> Row | None:
        forward, backward = form.forward, form.backward
        piece = None if backward is None else backward.gives.piece_of(OF_ADAPTERS)
        if forward is None or backward is None or piece is None:
            return None
        uses = [use for each in form.facts.uses.of_tensors for use in each]
        places = [backward.places[use] for use in uses]
        terms = [backward.gives.tensors[each] for each in places if each is not None]
        if uses and not terms:
            return None
        row = Row(form, self._memory, number, piece)
        (result,) = forward.gives.tensors
        own = () if form.held is None else form.held.places
        saved = [self.links.copies(copies, own) for copies in row.aside]
        brought_back = [self.links.copies(own, copies) for copies in row.aside[1:]]
        forwards, backwards = saved[:1], list[Recording]()
        for part in range(number):
            given, gradient = row.given(part), row.gradients.tensors[part]
            forwards += [
                self.links.copies(forward.given.tensors, given),
                forward.recording,
                *saved[part + 1 :][:1],
                self.links.copies([given[0]], [result]),
            ]
            read = [gradient] if row.aside else [*given, gradient]
            backwards += [
                *brought_back[part:][:1],
                self.links.copies(backward.given.tensors, read),
                backward.recording,
                self.links.add(row.total, piece),
                *([self.links.copy_of_sum(gradient, terms)] if terms else []),
            ]
        forward_of_all, backward_of_all = map(self.links.join, (forwards, backwards))
        if forward_of_all is None or backward_of_all is None:
            return None
        row.forward, row.backward = forward_of_all, backward_of_all
        row.parts = [*forwards, *backwards]
        return row


def _forward_of(visit: ReplayedVisit, arguments: Sequence[LayerCall]) -> Replayed | None:
    """The recorded forward of ``visit``, if calls with these ``arguments`` are of its form."""
    form = visit.form
    is_alike = all(each.is_like(visit.call) for each in arguments)
    # Hidden states behind the first layer have a graph, if anything before is trained.
    is_alike &= visit.form.facts.has_gradient_of_hidden
    forward = form.forward
    return forward if is_alike and forward is not None and forward.is_proved else None


def _may_be_together(visits: Sequence[ReplayedVisit], gradient: torch.Tensor) -> bool:
    """Whether visits can be one recording: see "Which"."""
    form, facts, first = visits[0].form, visits[0].form.facts, visits[0].call
    hidden = facts.specs[0]
    return (
        facts.uses.has_single_parameters
        and facts.forms[0][:2] == hidden
        and (gradient.shape, gradient.dtype) == hidden
        and len(visits) * gradient.nbytes <= _MOST_BYTES
        and not torch._C._len_torch_dispatch_stack()
        and form.dense_address == first.layer.dense_address
        and all(
            each.form is form and not each.call.has_drawn and each.call.offloaded is None
            for each in visits
        )
    )
