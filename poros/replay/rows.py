"""Visits of one layer by micro-batches, one behind the other: replayed one by one, or in one go.

The first visit of a row is looked up and replayed as any call is (``poros.replay.captures``).
Nobody's code runs from then to the end of the row, so what decides what the layer computes, and
the state around it, are for all of them those of the first.

Note: In one go
    The host takes longer to start a short recording than a device takes for it. So the visits
    behind the first one are recorded once more, all of them as one. Their hidden states are copied
    to fixed memory, and results take their places; so do gradients. What all layers are given alike
    (masks, tables of positions) is copied once in a pass. Gradients of adapters are added to a copy
    of the sum so far, for one micro-batch after the other.

Note: Which
    Those of one form that draw no random numbers: what a micro-batch draws in one layer is not
    right behind what the one before it has drawn there. And those whose hidden states are small:
    with large ones a device is busy for longer than the host, and the memory is better used.

Note: Proof
    Their first replay is made beside those of the visits one by one, and compared with them. With
    attention that does not repeat itself, it is a recording with attention that does, beside such
    visits: see "Proof" in ``poros.replay.captures``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from poros.replay.call import LayerCall
from poros.replay.forms import Form, Replayed, Row
from poros.replay.graphs import SharedMemory
from poros.replay.recording import Recordings, different_ones, with_steady_attention
from poros.replay.remat import ReplayedVisit
from poros.replay.routing import GradientSums
from poros.replay.uses import Around
from poros.slots.schedule import Phase
from poros.stream.rng import RngStash

_MOST_BYTES = 2**26
"""Of the hidden states of a row. There is memory for these twice."""

Settle = Callable[[LayerCall, Form, Any, str | None], None]
"""Takes a call, its form, what was recorded, and what of it differs; says so or refuses it."""


class Rows:
    """Replays visits that are right behind another one of their layer.

    Args:
        memory: That recordings share.
        recordings: Makes them.
        settle: Is told what a comparison has shown.
        note: Is told of how many visits of a form were replayed.
    """

    def __init__(
        self,
        memory: SharedMemory,
        recordings: Recordings,
        settle: Settle,
        note: Callable[[Form, int], None],
    ) -> None:
        self._memory, self._recordings = memory, recordings
        self._settle, self._note = settle, note

    # ------------------------------------------------------------------ forwards

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
        form, row = visit.form, visit.form.rows.get(len(arguments))
        if row is None or _forward_of(visit, arguments) is None:
            return None
        each_one = list(zip(arguments, hidden, rngs, strict=True))
        found: list[tuple[Any, ReplayedVisit]] = []
        if not row.forward.is_proved:
            for each in each_one:
                made = self.one(visit, *each)
                if made is not None:  # as it is: of that form
                    found.append(made)
        sources = [[given, *known.others] for known, given, _ in each_one]
        with visit.call.layer.weights.occupy(Phase.FORWARD):
            results = row.run_forward(sources)
        if not row.forward.is_proved:
            different = different_ones(results, [result for result, _ in found], "result")
            self._settle(visit.call, form, row.forward, different)
            return found
        for source, result, rng in zip(sources, results, rngs, strict=True):
            call = visit.call.again(source, rng)
            call.note_end_as(rng)
            found.append((visit.facts.result_of([result]), visit.again(call, source)))
        self._note(form, len(found))
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
        form, behind = visits[0].form, sums.behind
        if behind is None or not _may_be_together(visits, form, gradients[0]):
            return None
        row = form.rows.setdefault(len(visits), None) if form.has_rows else None
        total = sums.total_of(behind)
        if row is None or total is None or form.backwards.get(row.around) is not behind:
            return None
        with torch.no_grad():
            sources = [visit.intact() for visit in visits]
            if row.backward.is_proved:
                for visit in visits:
                    visit.release()
                with visits[0].call.layer.weights.occupy(Phase.BACKWARD):
                    found = row.run_backward(row.backward, sources, gradients, total)
                self._note(form, len(visits))
                return found if visits[0].facts.uses_of_tensors else [None] * len(visits)
            return self._proved(row, visits, sources, gradients, sums, total)

    def _proved(
        self,
        row: Row,
        visits: Sequence[ReplayedVisit],
        sources: Sequence[Sequence[torch.Tensor]],
        gradients: Sequence[torch.Tensor],
        sums: GradientSums,
        total: torch.Tensor,
    ) -> Sequence[torch.Tensor | None]:
        """Take the gradients one by one, and compare those of the row with them."""
        form, call = visits[0].form, visits[0].call
        before, behind = total.clone(), sums.behind
        hidden = [each.backward(given, sums) for each, given in zip(visits, gradients, strict=True)]
        places = [
            behind.gives.tensors[place]
            for use, place in enumerate(behind.places)
            if visits[0].facts.is_of_adapter(use) and place is not None
        ]

        def parts_of(memory: torch.Tensor) -> list[torch.Tensor]:
            return [memory.as_strided(*_place_of(each)) for each in places]

        wanted: list[torch.Tensor | None] = [*hidden, *parts_of(total)]
        recording = row.backward if row.steady is None else row.steady
        if row.steady is not None:
            wanted = self._steady(row.around, visits, sources, gradients, parts_of(before.clone()))
        with call.layer.weights.occupy(Phase.BACKWARD):
            found = row.run_backward(recording, sources, gradients, before)
        given = found if visits[0].facts.uses_of_tensors else [None] * len(visits)
        different = different_ones([*given, *parts_of(before)], wanted, "gradient")
        if different is not None and row.steady is None and form.may_vary:
            # Seen for the first time: it is recorded anew, with what it is to be compared with.
            form.rows[len(visits)], self._recordings.varies = None, True
            return hidden
        row.steady = None
        self._settle(call, form, row.backward, different)
        return hidden

    def _steady(
        self,
        around: Around,
        visits: Sequence[ReplayedVisit],
        sources: Sequence[Sequence[torch.Tensor]],
        gradients: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Run the backwards with attention that repeats itself: gradients, and ``sums`` of them."""
        facts, layer = visits[0].facts, visits[0].call.layer
        hidden: list[torch.Tensor | None] = []
        for visit, given, gradient in zip(visits, sources, gradients, strict=True):
            with ExitStack() as stack:
                stack.enter_context(layer.visit(Phase.BACKWARD, facts.leaves))
                stack.enter_context(visit.call.ambient.rng.replay())
                found = with_steady_attention(facts, given, [gradient], around)
            hidden += facts.gradients_of_tensors(found) or [None]
            own = [
                each
                for use, each in enumerate(found)
                if each is not None and facts.is_of_adapter(use)
            ]
            for summed, each in zip(sums, own, strict=True):
                summed.add_(each)
        return [*hidden, *sums]


def _forward_of(visit: ReplayedVisit, arguments: Sequence[LayerCall]) -> Replayed | None:
    """The recorded forward of ``visit``, if calls with these ``arguments`` are of its form."""
    form = visit.form
    is_alike = form.kind == "recomputed" and all(each.is_like(visit.call) for each in arguments)
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


def _place_of(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())
