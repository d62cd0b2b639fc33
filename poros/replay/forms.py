"""Forms of a layer's calls, and what is recorded of each: see ``poros.replay.captures``.

Two calls of a layer are of one form if they do the same work on the device but for what the tensors
hold that they are given: the same arguments but for tensors, tensors of the same form, the same
state around it, the same tensors of the layer at the same addresses.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from poros.replay.call import CallFacts, LayerCall
from poros.replay.casts import AdapterCasts
from poros.replay.graphs import Fixed, Recording, SharedMemory, Spec
from poros.replay.uses import Around, Uses
from poros.stream.condition import Condition
from poros.stream.context import Kind


@dataclass
class Replayed:
    """One recording, with the fixed memory that it reads from and writes to.

    Attributes:
        places: For each result where it is: its number in ``gives``; -1 - n if it is the n-th of
            what was given; None if there is none.
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
    is_proved: bool = False
    has_drawn: bool = True
    casts: AdapterCasts | None = None

    def run(
        self,
        sources: Sequence[torch.Tensor],
        memory: SharedMemory,
        in_place: bool = False,
        is_again: bool = False,
    ) -> list[torch.Tensor | None]:
        """Replay it on ``sources``; what it gives, in memory of its own.

        Args:
            sources: What it reads.
            memory: That recordings share.
            in_place: Whether the results may lie in fixed memory, until the next replay of any
                recording.
            is_again: Whether the layer's last replay is right before it, and its adapters are as
                they were.
        """
        memory.fill(self.given, sources)
        if self.casts is not None and not is_again:
            self.casts.replay()
        self.recording.replay()
        made = self.gives.tensors if in_place else self.gives.copies()
        return self.found_in(sources, made)

    def found_in(
        self, sources: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Its results, of what it reads and what it has ``made``."""
        return [
            None if place is None else made[place] if place >= 0 else sources[-1 - place]
            for place in self.places
        ]


class Row:
    """Visits of one form by several micro-batches, joined: see ``poros.replay.rows``.

    Args:
        memory: That recordings share.
        facts: Of the form: of hidden states there come such hidden states.
        number: Of the micro-batches.
        forward: Of one of them.
        backward: Likewise.
        total: Like the sum of the gradients of adapters.

    Attributes:
        hidden: Their hidden states, and after a replay their results.
        gradients: Those of their results, and after a replay those of their hidden states.
        total: The sum of the gradients of adapters, without those of these micro-batches and then
            with them.
        one_forward, one_backward: The recordings of one of them.
        forward, backward: Those of all.
        parts: What these are joined of.
    """

    forward: Recording
    backward: Recording
    parts: Sequence[Recording]

    def __init__(
        self,
        memory: SharedMemory,
        facts: CallFacts,
        number: int,
        forward: Replayed,
        backward: Replayed,
        total: torch.Tensor,
    ) -> None:
        hidden, *others = facts.specs
        self.one_forward, self.one_backward = forward, backward
        self.hidden = memory.of("hidden states of a row", [hidden] * number)
        self.gradients = memory.of("gradients of a row", [hidden] * number)
        (self.total,) = memory.of("sums of a row", [Spec.of(total)]).tensors
        self._others = memory.of("what a row is given besides", others * number)
        self._num_others = len(others)
        self._memory = memory

    def given(self, number: int) -> list[torch.Tensor]:
        """What the visit of that number reads."""
        first = number * self._num_others
        return [self.hidden.tensors[number], *self._others.tensors[first:][: self._num_others]]

    def fill(self, one: Replayed, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        """Have the tensors of each call there, for one replay of a recording made of ``one``."""
        one.given.forget()  # those of the last call are there then
        self._memory.fill(self.hidden, [each[0] for each in sources])
        self._memory.fill(self._others, [tensor for each in sources for tensor in each[1:]])
        self.hidden.forget()  # results take their places

    def fill_gradients(self, gradients: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Have the gradients of results there, and the sum so far, for one replay."""
        self._memory.fill(self.gradients, gradients)
        self.gradients.forget()
        self.total.copy_(total)


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
    """Of its forward."""
    facts: CallFacts | None = None
    """What calls that ran have shown, for those that replay."""
    forward: Replayed | None = None
    backwards: dict[Around, Replayed | None] = field(default_factory=dict)
    """None where one is wanted."""
    may_vary: bool = False
    """Whether its gradients need not repeat themselves (``AttentionKernels``)."""
    deterministic: dict[Around, Replayed | None] = field(default_factory=dict)
    """Backwards with attention that repeats itself, until what does not is proved by them; None
    where one is wanted."""
    rows: dict[int, Row | None] = field(default_factory=dict)
    """By the number of micro-batches; None where one is wanted."""
    num_rows: Counter[int] = field(default_factory=Counter)
    """Backwards by so many micro-batches, one behind the other."""
    held: Any = None
    """Of layers that keep their graph: inputs and results of the recorded forward."""
    order: int = 0
    """Of the recorded forward, among those of layers that keep their graph."""
    refusal: str | None = None
    """Why nothing of it is recorded."""
    in_flight: Callable[[], object | None] = lambda: None
    """The call whose forward was replayed last: of layers that keep their graph, that whose graph
    lies in the recording's memory."""

    @property
    def is_wanting(self) -> bool:
        """Whether something of it has come that is not recorded, and may be now."""
        if self.kind == "kept" and self.in_flight() is not None:
            return False
        recorded = (self.forward, *self.backwards.values(), *self.deterministic.values())
        return any(each is None for each in recorded)

    def is_there(self, call: LayerCall) -> bool:
        """Whether what its recorded backward reads is still that of the forward of ``call``."""
        is_same = self.dense_address == call.layer.dense_address
        return is_same and (self.kind != "kept" or self.in_flight() is call)

    def learn(self, facts: CallFacts, uses: Uses, around: Around) -> None:
        """A call that ran has been differentiated, and has shown ``uses``."""
        if self.facts is None and self.refusal is None:
            facts.learn(uses)
            self.facts = facts
            self.backwards.setdefault(around, None)

    def release(self, call: LayerCall) -> None:
        """The graph of a call that was kept is not needed any more."""
        if self.in_flight() is call:
            self.in_flight = lambda: None

    def drop_graph(self) -> None:
        """Have the forward of a layer that keeps its graph recorded anew, with its backwards."""
        self.forward, self.held = None, None
        self.backwards = dict.fromkeys(self.backwards)

    def again(self) -> "Form":
        """The same form, of which nothing is recorded."""
        return replace(
            self,
            forward=None,
            backwards=dict.fromkeys(self.backwards),
            deterministic={},
            rows={},
            num_rows=Counter(),
            held=None,
            in_flight=lambda: None,
        )

    def refuse(self, reason: str) -> None:
        self.refusal, self.forward, self.held = reason, None, None
        self.backwards, self.deterministic, self.rows = {}, {}, {}


class HeldGraphs:
    """Forms with a call whose graph lies in the memory of a recording, until its backward."""

    def __init__(self) -> None:
        self._forms: weakref.WeakSet[Form] = weakref.WeakSet()

    def add(self, form: Form) -> None:
        self._forms.add(form)

    def would_lose(self, form: Form) -> bool:
        """Whether replaying the forward of ``form`` could overwrite one of these graphs."""
        held = [each for each in self._forms if each.in_flight() is not None]
        return form.forward is not None and any(other.order > form.order for other in held)
