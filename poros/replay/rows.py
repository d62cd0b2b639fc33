"""Visits of one layer by micro-batches, one behind the other: replayed one by one, or in one go.

The first visit of a row is looked up as any call is (``poros.replay.captures``). Nobody's code runs
from then to the end of the row, so what decides what the layer computes, and the state around it,
are for all of them those of the first.

Note: In one go
    A visit that is replayed by itself costs the host a launch, copies and objects of Python (on the
    host of an H100 0.15 ms in a forward), while a device may have nothing to do. So the recorded
    visit is joined with itself, once for each micro-batch, and what copies their tensors there and
    back. Hidden states are in fixed memory together, and results take their places; so do
    gradients. Gradients of adapters are summed in fixed memory, for one micro-batch after the
    other; parameters have none before.

Note: Two at a time
    The products of one micro-batch are too small to fill a device. So a visit is recorded twice,
    with other memory for all that it writes, and every other micro-batch is replayed by the second
    one, at the same time. The sums over micro-batches keep their order.

Note: Layers that keep their graphs
    The recording of such a layer has one graph in its memory. So the joined forward copies that of
    each micro-batch to memory of its own, and the joined backward copies each back; but for one of
    each recording, which is the last there in forward and the first in backward. Where calls are
    not all of one form, or fewer, and so are replayed one by one, their graphs wait there as well:
    there is no memory for more. So a row is made where their forwards, too, come one behind the
    other: those of the first layer are replayed as soon as code has come to them.

Note: Which
    Those of one form that draw no random numbers: what a micro-batch draws in one layer is not
    right behind what the one before it has drawn there. And those whose hidden states are small:
    with large ones a device is busy for longer than the host, and the memory is better used.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from poros.kernels.copies import copy_all
from poros.replay.call import LayerCall
from poros.replay.forms import Form, HeldGraph, Replayed, Room, Second
from poros.replay.graphs import MOST_JOINED, Recording, SharedMemory, Spec
from poros.replay.remat import Behind, Differentiate, ReplayedVisit
from poros.replay.routing import OF_ADAPTERS, GradientSums
from poros.replay.uses import Around
from poros.slots.schedule import Phase
from poros.stream.rng import RngStash

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
        total: The sum of the gradients of adapters, after a replay.
        branches: What is recorded of one, that may run at the same time as the others.
        homes: Where the graph of each waits, if the layer keeps them: of which recording it is, and
            the room; None for the recording's own memory.
        forward, backward: Those of all.
        parts: What these are joined of.
    """

    forward: Recording
    backward: Recording
    parts: Sequence[Recording]

    def __init__(
        self,
        form: Form,
        branches: Sequence[Second],
        memory: SharedMemory,
        number: int,
    ) -> None:
        hidden, *others = form.facts.specs
        self.branches = branches
        self.hidden = memory.of("hidden states of a row", [hidden] * number)
        self.gradients = memory.of("gradients of a row", [hidden] * number)
        piece = Spec.of(_piece_of(branches[0]))
        (self.total,) = memory.of("sums of a row", [piece]).tensors
        self._others = memory.of("what a row is given besides", others * number)
        self._num_others = len(others)
        self.homes = self._make_homes(number)
        self._waiting: WeakSet[LayerCall] = WeakSet()
        """The calls whose graphs are in these copies, until their backward."""

    def _make_homes(self, number: int) -> list[tuple[HeldGraph, Room | None]]:
        every = [each.held for each in self.branches if each.held]
        size = max((each.size for each in every), default=0)
        homes: list[tuple[HeldGraph, Room | None]] = [(each, None) for each in every]
        for part in range(len(every), number if every else 0):
            held = every[part % len(every)]
            homes.append((held, Room(held.places[0].new_empty(size))))
        return homes

    def branch_of(self, number: int) -> Second:
        """What the visit of that number is replayed by."""
        return self.branches[number % len(self.branches)]

    def given(self, number: int) -> list[torch.Tensor]:
        """What the visit of that number reads."""
        first = number * self._num_others
        return [self.hidden.tensors[number], *self._others.tensors[first:][: self._num_others]]

    def fill(self, ones: Sequence[Replayed], sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """Have the tensors of each call there, for one replay of a recording made of ``ones``."""
        for one in ones:
            one.given.forget()  # those of the last call are there then
        # Results take the places of hidden states, so none of these is there already.
        copy_all(self.hidden.tensors, [each[0].detach() for each in sources])
        self._others.fill([tensor for each in sources for tensor in each[1:]])

    def make_free(self) -> bool:
        """Have no graph where it leaves some; whether others' that wait there could go elsewhere.

        Those that a replay of it has left are gone.
        """
        rooms = [room for _, room in self.homes if room is not None]
        every = [each.held for each in self.branches if each.held]
        for held in every:
            for known in self._waiting:
                held.forget(known)
        self._waiting = WeakSet()
        are_elsewhere = all(held.vacate(rooms) for held in every)
        return are_elsewhere and all(held.in_flight() is None for held in every)

    def have_graphs(self, calls: Sequence[LayerCall]) -> None:
        """The graphs of its ``calls`` wait there from now on."""
        self._waiting = WeakSet(calls if self.homes else ())
        for call, (held, room) in zip(calls, self.homes, strict=bool(self.homes)):
            held.note_at(call, room)

    def has_graphs(self, calls: Sequence[LayerCall]) -> bool:
        """Whether the graphs of its ``calls`` wait there still, or are back in a recording's."""
        homes = zip(calls, self.homes, strict=bool(self.homes))
        return all(
            held.is_at(call, room) or (room is None and held.bring_back(call))
            for call, (held, room) in homes
        )


class Rows:
    """Replays visits of a layer that are one behind the other, and notes how many.

    Attributes:
        is_on: Whether there is room for rows.
        num_joined: Visits that were replayed in one go with others, of micro-batches or layers.

    ``note`` counts replays.
    """

    def __init__(self, memory: SharedMemory, note: Callable[[Form, int], None]) -> None:
        self.is_on, self.num_joined = True, 0
        self._memory, self._note = memory, note

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
        form, forward = visit.form, visit.form.forward
        if forward is None or not forward.is_proved or not _are_like(visit.call, form, [arguments]):
            return None
        if not form.put_aside():
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
        if form.held is not None:
            form.held.note_at(call, None)
        self._note(form, 1)
        return form.facts.result_of(results), visit.again(call, kept)

    def all(
        self, call: LayerCall, form: Form, behind: Sequence[Behind], differentiate: Differentiate
    ) -> list[tuple[Any, ReplayedVisit]]:
        """Replay a ``call`` of a recorded form, and those of the micro-batches right ``behind``.

        Returns:
            The layer's result, and the visit, of each; nothing if that is not recorded.
        """
        row: Row | None = form.rows.get(1 + len(behind))
        if row is None or not _are_like(call, form, [each.arguments for each in behind]):
            return []
        if not row.make_free():
            return []
        sources = [call.tensors, *([each.hidden, *each.arguments.others] for each in behind)]
        with call.layer.weights.occupy(Phase.FORWARD):
            row.fill([each.forward for each in row.branches], sources)
            row.forward.replay()
            results = row.hidden.copies()
        rngs = [each.rng for each in behind]
        calls = [call, *map(call.again, sources[1:], rngs)]
        row.have_graphs(calls)
        for each in calls:
            each.note_end_as(each.rng)
        self._note_joined(form, len(calls))
        first = ReplayedVisit(call, form, sources[0], differentiate)
        visits = [first, *map(first.again, calls[1:], sources[1:])]
        given = [form.facts.result_of([result]) for result in results]
        return list(zip(given, visits, strict=True))

    def backward(
        self,
        visits: Sequence[ReplayedVisit],
        gradients: Sequence[torch.Tensor],
        sums: GradientSums,
    ) -> Sequence[torch.Tensor | None] | None:
        """``ReplayedVisit.backward`` of each; None if that is not recorded, and nothing was done.

        ``sums`` have not begun.
        """
        form, recorded, number = visits[0].form, visits[0].form.backward, len(visits)
        if recorded is None or not recorded.is_proved or not _may_be_together(visits, gradients[0]):
            return None
        form.num_rows[number] += self.is_on
        most = _MOST_ROWS if form.held is None else 1
        if form.num_rows[number] == _LEAST_ROWS and len(form.rows) < most:
            form.rows.setdefault(number, None)
        row: Row | None = form.rows.get(number)
        if row is None:
            return None
        calls = [each.call for each in visits]
        arrived = _arrived(calls[0], form, recorded)
        piece = sums.may_begin(arrived, recorded)
        if piece is None or not row.has_graphs(calls):
            return None
        with torch.no_grad():
            sources = [visit.intact() for visit in visits]
            for visit in visits:
                visit.release()
            with calls[0].layer.weights.occupy(Phase.BACKWARD):
                ones = [each.backward for each in row.branches]
                if form.held is None:
                    row.fill(ones, sources)
                del sources
                for one in ones:
                    one.given.forget()  # what arrived for the last call is there then
                copy_all(row.gradients.tensors, gradients)
                row.backward.replay()
                sums.begin(arrived, recorded, piece, row.total)
                found = row.gradients.copies()
        self._note_joined(form, number)
        return found if form.facts.uses.of_tensors else [None] * number

    def _note_joined(self, form: Form, number: int) -> None:
        self.num_joined += number
        self._note(form, number)

    # ------------------------------------------------------------------- joining

    def begin_pass(self, is_on: bool, number: int, forms: Callable[[], Iterable[Form]]) -> None:
        """Join visits from now on, or none, of up to ``number`` micro-batches; ``forms``: all."""
        is_off = self.is_on and not is_on
        for form in forms() if is_off or number > 1 else ():
            # There is memory for the graphs of more than a row has.
            if is_off or (form.held is not None and 0 < max(form.rows, default=0) < number):
                form.leave_rows(anew=is_off)
        self.is_on = is_on

    def wants_second(self, form: Form) -> bool:
        """Whether a row is wanted of which two visits are to be replayed at a time."""
        is_new = form.second is None and not form.has_no_second
        return is_new and None in form.rows.values() and self._own_of(form) is not None

    def join(self, form: Form) -> bool:
        """Join what is recorded of ``form``, where that is wanted and can be.

        Returns:
            Whether that took memory.

        Raises:
            RuntimeError: If the device cannot.
        """
        wanted = [each for each, made in form.rows.items() if made is None]
        for number in wanted:
            form.rows[number] = self._joined(form, number)
            if form.rows[number] is None:
                del form.rows[number]
        if wanted and not form.rows:
            form.leave_rows()
        return bool(wanted)

    def _joined(self, form: Form, number: int) -> Row | None:
        own = self._own_of(form)
        if own is None:
            return None
        branches = [own] if form.second is None else [form.second, own]
        row = Row(form, branches, self._memory, number)
        forward, backward = self._forwards(row, number), self._backwards(form, row, number)
        forward_of_all, backward_of_all = (
            own.links.join(each.recordings, each.behind) for each in (forward, backward)
        )
        if forward_of_all is None or backward_of_all is None:
            return None
        row.forward, row.backward = forward_of_all, backward_of_all
        row.parts = [*forward.recordings, *backward.recordings]
        if own.held is not None:
            own.held.rooms = [room for _, room in row.homes if room is not None]
        return row

    def _own_of(self, form: Form) -> Second | None:
        """What is recorded of it, if that can be joined."""
        own = form.recorded
        if own is None or own.backward.gives.piece_of(OF_ADAPTERS) is None:
            return None
        return own if self._terms(form, own) or not any(form.facts.uses.of_tensors) else None

    def _terms(self, form: Form, branch: Second) -> list[torch.Tensor]:
        """Of the gradient of hidden states, in the fixed memory of a recorded backward."""
        uses = [use for each in form.facts.uses.of_tensors for use in each]
        places = [branch.backward.places[use] for use in uses]
        return [branch.backward.gives.tensors[each] for each in places if each is not None]

    def _forwards(self, row: Row, number: int) -> "Steps":
        steps = Steps()
        for branch in row.branches:
            steps.add(branch, branch.forward.casts.recordings if branch.forward.casts else [])
        for part in reversed(range(number)):
            branch, given = row.branch_of(part), row.given(part)
            forward, links = branch.forward, branch.links
            steps.add(branch, [links.copies(forward.given.tensors, given), forward.recording])
            held, room = row.homes[part] if row.homes else (None, None)
            if held is not None and room is not None:
                steps.add(branch, [links.copies(held.within(room), held.places)])
            steps.add(branch, [links.copies(given[:1], forward.gives.tensors)])
        return steps

    def _backwards(self, form: Form, row: Row, number: int) -> "Steps":
        steps = Steps()
        for branch in row.branches:
            steps.add(branch, branch.backward.casts.recordings if branch.backward.casts else [])
        summed: int | None = None
        for part in range(number):
            branch, gradient = row.branch_of(part), row.gradients.tensors[part]
            backward, links, given = branch.backward, branch.links, row.given(part)
            if row.homes:
                given = []
                held, room = row.homes[part]
                if room is not None:
                    steps.add(branch, [links.copies(held.places, held.within(room))])
            steps.add(branch, [links.copies(backward.given.tensors, [*given, gradient])])
            steps.add(branch, [backward.recording])
            piece = _piece_of(branch)
            taken = links.add(row.total, piece) if part else links.copies([row.total], [piece])
            summed = steps.add(branch, [taken], behind=summed)
            terms = self._terms(form, branch)
            steps.add(branch, [links.copy_of_sum(gradient, terms)] if terms else [])
        return steps


def _piece_of(branch: Second) -> torch.Tensor:
    """The gradients of adapters that its backward gives."""
    piece = branch.backward.gives.piece_of(OF_ADAPTERS)
    if piece is None:
        raise RuntimeError("expected gradients of adapters of one dtype, found several")
    return piece


def _arrived(
    call: LayerCall, form: Form, recorded: Replayed
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of a call, each used once, and their gradients in the memory of a backward."""
    places = [(number, recorded.places[use]) for number, (use,) in form.facts.uses.of_parameters]
    gives = recorded.gives.tensors
    return [(call.parameters[n], gives[place]) for n, place in places if place is not None]


class Steps:
    """Recordings that are to be joined: those of one branch in order.

    Attributes:
        recordings: All.
        behind: For each, the numbers of those that it waits for.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.behind: list[list[int]] = []
        self._last: dict[int, int] = {}

    def add(
        self, branch: object, recordings: Sequence[Recording], behind: int | None = None
    ) -> int | None:
        """Add to a branch what also waits for the number ``behind``; the number of the last."""
        for each in recordings:
            before = self._last.get(id(branch)), behind
            self.behind.append([number for number in before if number is not None])
            self._last[id(branch)] = len(self.recordings)
            self.recordings.append(each)
        return self._last.get(id(branch))


def _are_like(call: LayerCall, form: Form, others: Sequence[LayerCall]) -> bool:
    """Whether calls with the arguments of ``others`` are of the form of ``call``."""
    # Hidden states behind the first layer have a graph, if anything before is trained.
    return form.facts.has_gradient_of_hidden and all(each.is_like(call) for each in others)


def _may_be_together(visits: Sequence[ReplayedVisit], gradient: torch.Tensor) -> bool:
    """Whether visits can be one recording: see "Which"."""
    form, facts, first = visits[0].form, visits[0].form.facts, visits[0].call
    hidden = facts.specs[0]
    return (
        facts.uses.has_single_parameters
        and facts.forms[0][:2] == hidden
        and (gradient.shape, gradient.dtype) == hidden
        and len(visits) * gradient.nbytes <= MOST_JOINED
        and not torch._C._len_torch_dispatch_stack()
        and form.around == Around((True,), first.layer.surroundings())
        and form.dense_address == first.layer.dense_address
        and (form.held is None or visits[0].run == [len(visits)])
        and all(
            each.form is form
            and not each.call.has_drawn
            and each.call.offloaded is None
            and (form.held is None or each.run is visits[0].run)
            for each in visits
        )
    )
