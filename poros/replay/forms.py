"""Forms of a layer's calls, and what is recorded of each: see ``poros.replay.captures``.

Two calls of a layer are of one form if they do the same work on the device but for what the tensors
hold that they are given: the same arguments but for tensors, tensors of the same form, the same
state around it, the same tensors of the layer at the same addresses.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from poros.kernels.copies import copy_all
from poros.replay.call import CallFacts, LayerCall
from poros.replay.casts import AdapterCasts
from poros.replay.graphs import Fixed, Recording
from poros.replay.links import Links
from poros.replay.routing import Tensors
from poros.replay.uses import Around, Uses
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.context import Kind


@dataclass
class Replayed:
    """One recording, with the fixed memory that it reads from and writes to.

    Attributes:
        places: For each result its number in ``gives``; None if there is none.
        is_proved: Whether it has given what an eager visit gave.
        casts: Makes the casts of adapters that it reads, in fixed memory that others share; None if
            it makes its own.
        has_drawn: Whether the call that it was proved beside has drawn random numbers. A recording
            draws as many each time.
    """

    recording: Recording
    given: Fixed
    gives: Fixed
    places: Sequence[int | None]
    casts: AdapterCasts | None = None
    is_proved: bool = False
    has_drawn: bool = True

    def run(
        self, sources: Sequence[torch.Tensor], in_place: bool = False, is_again: bool = False
    ) -> list[torch.Tensor | None]:
        """Replay it on ``sources``; what it gives, in memory of its own.

        Args:
            sources: What it reads.
            in_place: Whether the results may lie in fixed memory, until the next replay of any
                recording.
            is_again: Whether the layer's last replay is right before it, and its adapters are as
                they were.
        """
        self.given.fill(sources)
        if self.casts is not None and not is_again:
            self.casts.replay()
        self.recording.replay()
        made = self.gives.tensors if in_place else self.gives.copies()
        return [None if place is None else made[place] for place in self.places]


class Room:
    """Memory, in one piece, for a copy of a graph.

    Attributes:
        call: Gives the call whose graph is there, if it is not gone.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.call: Callable[[], object | None] = lambda: None


class HeldGraph:
    """The graph that a recorded forward leaves, in memory of its own, for a recorded backward.

    It is that of one call at a time. Those of others wait for their backward in copies, as long as
    their calls are there.

    Attributes:
        inputs, results: Of the recorded forward.
        places: All memory that the graph is in: flat, of one dtype.
        order: Of the recorded forward, among those that were recorded with the same ``links``.
        in_flight: Gives the call, or the visit of a segment (``poros.replay.segment``), whose graph
            is in its places, if it is not gone.
        rooms: Memory for copies that is there already, a row's; None without one.
    """

    def __init__(
        self,
        inputs: Tensors,
        results: Tensors,
        places: Sequence[torch.Tensor],
        links: Links,
        order: int,
    ) -> None:
        self.inputs, self.results, self.places = inputs, results, places
        self.links, self.order = links, order
        self.in_flight: Callable[[], object | None] = lambda: None
        self.rooms: Sequence[Room] | None = None
        self._aside: WeakKeyDictionary[object, Room] = WeakKeyDictionary()

    @property
    def size(self) -> int:
        """Elements in all places."""
        return sum(map(len, self.places))

    def within(self, room: Room) -> Sequence[torch.Tensor]:
        """What is for each place in a room, which may be larger."""
        return room.memory[: self.size].split([len(each) for each in self.places])

    def note_at(self, call: object, room: Room | None) -> None:
        """The graph of ``call`` is in ``room`` from now on; None: in its places."""
        if room is None:
            self.in_flight = ref(call)
        else:
            self._aside[call], room.call = room, ref(call)

    def is_at(self, call: object, room: Room | None) -> bool:
        """Whether the graph of ``call`` is in ``room``; None: in its places."""
        return self.in_flight() is call if room is None else self._aside.get(call) is room

    def put_aside(self, for_now: bool = False) -> bool:
        """Have the graph of the call in flight in a copy; whether it is.

        Where there is a row, there is memory for its rooms, and for one more ``for_now``.
        """
        call = self.in_flight()
        if not isinstance(call, LayerCall):
            return False
        free = (each for each in self.rooms or () if each.call() is None)
        room = next((each for each in free if len(each.memory) >= self.size), None)
        if room is None and (for_now or self.rooms is None):
            room = self.new_room()
        if room is None:
            return False
        copy_all(self.within(room), self.places)
        self.note_at(call, room)
        self.in_flight = lambda: None
        return True

    def vacate(self, rooms: Sequence[Room]) -> bool:
        """Have the graphs that wait in these wait elsewhere; whether there is memory for that."""
        for call, room in list(self._aside.items()):
            if room in rooms:
                other = self.new_room()
                if other is None:
                    return False
                copy_all(self.within(other), self.within(room))
                self.note_at(call, other)
                room.call = lambda: None
        return True

    def bring_back(self, call: object) -> bool:
        """Have the graph of ``call`` in its places; whether it is there."""
        if self.in_flight() is call:
            return True
        if call not in self._aside:
            return False
        if self.in_flight() is not None and not self.put_aside(for_now=True):
            return False
        copy_all(self.places, self.within(self._aside[call]))
        self.forget(call)
        self.note_at(call, None)
        return True

    def forget(self, call: object) -> None:
        """The graph of ``call`` is not needed any more."""
        room = self._aside.pop(call, None)
        if room is not None:
            room.call = lambda: None
        if self.in_flight() is call:
            self.in_flight = lambda: None

    def overwritten(self, others: Iterable["HeldGraph"]) -> list["HeldGraph"]:
        """Those of which a replay of its forward could overwrite a graph."""
        later = (each for each in others if each.links is self.links and each.order > self.order)
        return [each for each in later if each.in_flight() is not None]

    def new_room(self) -> Room | None:
        """Memory for a copy; None if the device has none."""
        try:
            return Room(self.places[0].new_empty(self.size))
        except torch.OutOfMemoryError:
            return None


class Second(NamedTuple):
    """A form that was recorded once more, with other memory, for visits at the same time."""

    forward: Replayed
    backward: Replayed
    held: HeldGraph | None
    links: Links


def hold_tensors(modules: Sequence[nn.Module]) -> bool:
    """Whether modules hold tensors that are neither parameters nor buffers.

    These are plain attributes, and in lists and dictionaries: a recording would go on reading one
    where another has taken its place. That an attribute comes, or becomes a tensor, is noticed by
    ``poros.stream.attributes``.
    """
    for module in modules:
        for key, value in vars(module).items():
            if key in _OWN_TABLES:
                continue
            held = value.values() if isinstance(value, dict) else value
            held = held if isinstance(value, list | tuple | dict) else (value,)
            if any(isinstance(each, torch.Tensor) for each in held):
                return True
    return False


_OWN_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False)
class Form:
    """One form of call of a layer, and what is known of it."""

    kind: Kind
    conditions: tuple[Hashable, ...]
    """Its kind, the address below, and what is fixed in its calls."""
    condition: Condition
    """Of the layer, when it came last."""
    dense_address: int | None = None
    """Of the layer's dense weights that its calls share."""
    num_visits: int = 0
    last_visit: int = 0
    """Its number among all visits of the layer."""
    num_replays: int = 0
    """Of its recorded forward."""
    refusal: str | None = None
    """Why nothing of it is recorded."""
    shown: CallFacts | None = None
    """What calls that ran have shown, for those that replay; the same from then on."""
    num_looks: int = 0
    """Calls that ran and were looked at."""
    pass_of_look: int = 0
    """The pass in which one was whose backward may show that: others in it show nothing else."""
    around: Around | None = None
    """What its first backward ran under, and its recorded one does. Others run."""
    forward: Replayed | None = None
    backward: Replayed | None = None
    may_vary: bool = False
    """Whether its gradients need not repeat themselves (``AttentionKernels``)."""
    wants_steady: bool = False
    steady: Replayed | None = None
    """The backward with attention that repeats itself, until ``backward`` is proved by it."""
    rows: dict[int, Any] = field(default_factory=dict)
    """By the number of micro-batches (``poros.replay.rows``); None where one is wanted."""
    num_rows: Counter[int] = field(default_factory=Counter)
    """Backwards by so many micro-batches, one behind the other."""
    held: HeldGraph | None = None
    """Of layers that keep their graph."""
    links: Links | None = None
    """Of what is recorded."""
    second: Second | None = None
    """For every other visit of a row."""
    has_no_second: bool = False
    """Whether the device could not record one."""

    @property
    def facts(self) -> CallFacts:
        """What was ``shown``."""
        if self.shown is None:
            raise LookupError("expected a form that calls have shown, found one that is new")
        return self.shown

    @property
    def recorded(self) -> Second | None:
        """What is recorded of it, if its forward and its backward are."""
        if self.forward is None or self.backward is None or self.links is None:
            return None
        return Second(self.forward, self.backward, self.held, self.links)

    def is_for(self, condition: Condition) -> bool:
        """Whether its calls are those of the layer in this condition."""
        now = condition.training, condition.adapter_state
        return condition.reads_as(self.condition) and self.conditions[2][-2:] == now  # type: ignore[index]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """``LayerCall.arguments`` of its calls."""
        return self.conditions[2][:-2]  # type: ignore[index]

    @property
    def is_wanting(self) -> bool:
        """Whether something of it has come that is not recorded, and may be now."""
        if self.kind == "kept" and self.in_flight() is not None:
            return False
        return self.forward is None or (self.wants_steady and self.steady is None)

    def in_flight(self) -> object | None:
        """What has its graph in the places of ``held``; None if nothing has."""
        return None if self.held is None else self.held.in_flight()

    def backward_of(self, call: LayerCall, around: Around) -> Replayed | None:
        """The recorded backward, if what it reads is still that of the forward of ``call``."""
        is_same = around == self.around and self.dense_address == call.layer.dense_address
        if not is_same or self.backward is None:
            return None
        if self.held is None or self.held.bring_back(call):
            return self.backward
        second = self.second
        is_there = second is not None and second.held is not None and second.held.bring_back(call)
        return second.backward if is_there and second is not None else None

    def put_aside(self) -> bool:
        """Have its places free for the graph of another call; whether they are, or it has none."""
        return self.held is None or self.in_flight() is None or self.held.put_aside()

    def unrecorded(self) -> "Form":
        """One of the same calls, of which nothing is recorded."""
        nothing: Any = dict.fromkeys(("forward", "backward", "held", "steady"))
        return replace(self, **nothing, rows={}, wants_steady=self.may_vary)

    def trade(self, other: "Form") -> None:
        """Take what was recorded of ``other``, its like; what it has is for every other visit.

        Its rows are to be joined anew.
        """
        self.second = self.recorded
        self.forward, self.backward, self.links = other.forward, other.backward, other.links
        self.steady = other.steady
        if self.held is not None and other.held is not None:
            other.held.rooms = self.held.rooms
        self.held, self.rows = other.held, dict.fromkeys(self.rows)

    def want_rows_anew(self) -> None:
        """Have its rows, and the ``second``, made once more, unless one is in use."""
        if self.second is not None and all(each.in_flight() is None for each in self.all_held()):
            wanted = dict.fromkeys(self.rows)
            self.leave_rows()
            self.rows = wanted

    def learn(self, facts: CallFacts, uses: Uses, around: Around) -> None:
        """A call that ran has been differentiated, and has shown ``uses``."""
        if self.shown is None and self.refusal is None:
            facts.learn(uses)
            self.shown, self.around = facts, around

    def found_as(self, condition: Condition) -> None:
        """Its layer is as it was, but for where it lies."""
        self.condition = condition
        self.facts.found_as(condition)

    def move_to(self, dense_address: int | None) -> None:
        """Its calls, of which nothing is recorded, have the layer's dense weights there."""
        self.conditions, self.dense_address = self.conditions_at(dense_address), dense_address

    def conditions_at(self, dense_address: int | None) -> tuple[Hashable, ...]:
        """Those of such calls."""
        return self.kind, dense_address, *self.conditions[2:]

    def release(self, call: object) -> None:
        """The graph of a call that was kept, or of a segment, is not needed any more."""
        for held in self.all_held():
            held.forget(call)

    def all_held(self) -> list[HeldGraph]:
        """``held``, and that of the ``second``; none if it keeps no graph."""
        second = None if self.second is None else self.second.held
        return [each for each in (self.held, second) if each is not None]

    def leave_rows(self, anew: bool = False) -> None:
        """Have none, and nothing that is there for them; what waits there is computed again.

        ``anew``: those that had come often enough are wanted again, once they have done so anew.
        """
        if self.second is not None:  # which was recorded first
            self.forward, self.backward, self.held, self.links = self.second
            self.steady, self.wants_steady = None, False
        self.second, self.rows = None, {}
        self.num_rows = Counter() if anew else self.num_rows
        if self.held is not None:
            self.held.rooms = None

    def clear(self) -> None:
        """Nothing of it is recorded; what is known stays."""
        self.forward = self.backward = self.steady = self.held = self.links = self.second = None
        self.wants_steady = self.has_no_second = False
        self.num_replays, self.rows, self.num_rows = 0, {}, Counter()

    def refuse(self, reason: str) -> None:
        self.clear()
        self.refusal = reason


def expect_rows(layers: Sequence[LayerBody], forms: Mapping[int, dict[Any, Form]]) -> None:
    """Take what a call by itself has shown of a form to hold where dense weights are shared.

    They have the same bits, and operators read them in the same places of the graph.
    """
    for layer in layers:
        address, known = layer.shared_address, forms.get(layer.index, {})
        for form in [] if address is None else list(known.values()):
            is_seen = form.shown is not None and form.refusal is None and form.forward is None
            is_alone = form.kind != "inference" and form.dense_address is None
            if is_seen and is_alone and form.conditions_at(address) not in known:
                del known[form.conditions]
                form.move_to(address)
                known[form.conditions] = form
