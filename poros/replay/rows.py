"""Visits of one layer by micro-batches, one behind the other: replayed one by one, or in one go.

The first visit of a row is looked up and replayed as any call is (``poros.replay.captures``).
Nobody's code runs from then to the end of the row, so what decides what the layer computes, and
the state around it, are for all of them those of the first.

Note: In one go
    A visit that is replayed by itself costs the host a launch, copies and objects of Python (on the
    host of an H100 0.15 ms in a forward), while a device may have nothing to do. So the recorded
    visit is joined with itself, once for each of the micro-batches behind the first one, and what
    copies their tensors there and back. Hidden states are in fixed memory together, and results
    take their places; so do gradients. What all layers are given alike (masks, tables of positions)
    is copied to fixed memory once in a pass. Gradients of adapters are added to a copy of the sum
    so far, for one micro-batch after the other.

Note: Which
    Those of one form that draw no random numbers: what a micro-batch draws in one layer is not
    right behind what the one before it has drawn there. And those whose hidden states are small:
    with large ones a device is busy for longer than the host, and the memory is better used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from poros.replay.call import LayerCall
from poros.replay.forms import Form, Replayed
from poros.replay.graphs import SharedMemory
from poros.replay.remat import ReplayedVisit
from poros.replay.routing import GradientSums
from poros.slots.schedule import Phase
from poros.stream.rng import RngStash

_MOST_BYTES = 2**26
"""Of the hidden states of a row. There is memory for these twice."""
_MOST_ROWS = 4
"""Of one form: numbers of micro-batches that are joined."""
_LEAST_ROWS = 4
"""Of one form, before it is joined: the first steps move blocks, and all is recorded anew."""


class Rows:
    """Replays visits that are right behind another one of their layer.

    Args:
        memory: That recordings share.
        note: Is told of how many visits of a form were replayed.

    Attributes:
        num_joined: Visits that were replayed in one go with others.
    """

    def __init__(self, memory: SharedMemory, note: Callable[[Form, int], None]) -> None:
        self.num_joined = 0
        self._memory, self._note = memory, note

    def one(
        self, visit: ReplayedVisit, arguments: LayerCall, hidden: torch.Tensor, rng: RngStash
    ) -> tuple[Any, ReplayedVisit] | None:
        """Replay a call of the layer that ``visit`` is of, for another micro-batch right behind it.

        Args:
            visit: Without a graph.
            arguments: A call of another layer by the micro-batch, with the same arguments but for
                the hidden states.
            hidden: These.
            rng: The random states that it begins with. They are those of now only if it draws.

        Returns:
            The layer's result, and the visit; None if the call is of another form.
        """
        form, facts = visit.form, visit.facts
        forward = _forward_of(visit, [arguments])
        if forward is None:
            return None
        call = visit.call.again([hidden, *arguments.others], rng)
        if forward.has_drawn:
            rng.restore()
        kept = call.offload_input()
        with call.layer.weights.occupy(Phase.FORWARD):
            results = forward.run(call.tensors, self._memory, is_again=True)
        if forward.has_drawn:
            call.note_end()
        else:
            call.note_end_as(rng)
        self._note(form, 1)
        return facts.result_of(results), visit.again(call, kept)

    def all(
        self,
        visit: ReplayedVisit,
        arguments: Sequence[LayerCall],
        hidden: Sequence[torch.Tensor],
        rngs: Sequence[RngStash],
    ) -> list[tuple[Any, ReplayedVisit]] | None:
        """``one`` for each of several micro-batches; None if that is not recorded."""
        row = visit.form.rows.get(len(arguments))
        if row is None or _forward_of(visit, arguments) is None:
            return None
        sources = [[given, *known.others] for known, given in zip(arguments, hidden, strict=True)]
        with visit.call.layer.weights.occupy(Phase.FORWARD):
            row.fill(row.one_forward, sources)
            row.forward.replay()
            results = row.hidden.copies()
        found: list[tuple[Any, ReplayedVisit]] = []
        for source, result, rng in zip(sources, results, rngs, strict=True):
            call = visit.call.again(source, rng)
            call.note_end_as(rng)
            found.append((visit.facts.result_of([result]), visit.again(call, source)))
        self._note_joined(visit.form, len(found))
        return found

    # ----------------------------------------------------------------- backwards

    def backward(
        self,
        visits: Sequence[ReplayedVisit],
        gradients: Sequence[torch.Tensor],
        sums: GradientSums,
    ) -> Sequence[torch.Tensor | None] | None:
        """``ReplayedVisit.backward`` of each; None if that is not recorded, and nothing was done.

        Args:
            visits: Right behind one whose backward was replayed, and has begun ``sums``.
            gradients: Of their results.
            sums: Of the gradients of the layer's parameters.
        """
        form, behind, number = visits[0].form, sums.behind, len(visits)
        if behind is None or not _may_be_together(visits, form, gradients[0]):
            return None
        form.num_rows[number] += 1
        if form.num_rows[number] == _LEAST_ROWS and len(form.rows) < _MOST_ROWS:
            form.rows.setdefault(number, None)
        row, total = form.rows.get(number), sums.total_of(behind)
        if row is None or total is None or row.one_backward is not behind:
            return None
        with torch.no_grad():
            sources = [visit.intact() for visit in visits]
            for visit in visits:
                visit.release()
            with visits[0].call.layer.weights.occupy(Phase.BACKWARD):
                row.fill(row.one_backward, sources)
                row.fill_gradients(gradients, total)
                row.backward.replay()
                total.copy_(row.total)
                found = row.gradients.copies()
        self._note_joined(form, number)
        return found if visits[0].facts.uses_of_tensors else [None] * number

    def _note_joined(self, form: Form, number: int) -> None:
        self.num_joined += number
        self._note(form, number)


def _forward_of(visit: ReplayedVisit, arguments: Sequence[LayerCall]) -> Replayed | None:
    """The recorded forward of ``visit``, if calls with these ``arguments`` are of its form."""
    form = visit.form
    is_alike = form.kind == "recomputed" and all(each.is_like(visit.call) for each in arguments)
    # Hidden states behind the first layer have a graph, if anything before is trained.
    is_alike &= visit.facts.has_gradient_of_hidden
    forward = form.forward
    return forward if is_alike and forward is not None and forward.is_proved else None


def _may_be_together(visits: Sequence[ReplayedVisit], form: Form, gradient: torch.Tensor) -> bool:
    """Whether visits can be one recording: see "Which"."""
    facts, first = visits[0].facts, visits[0].call
    hidden = facts.specs[0]
    return (
        form.kind == "recomputed"
        and facts.uses_parameters_once
        and len(facts.uses_of_tensors) <= 1
        and facts.forms[0][:2] == hidden
        and (gradient.shape, gradient.dtype) == hidden
        and len(visits) * gradient.nbytes <= _MOST_BYTES
        and not first.is_seen()
        and form.is_there(first)
        and all(
            each.form is form and not each.call.has_drawn and each.call.offloaded is None
            for each in visits
        )
    )
