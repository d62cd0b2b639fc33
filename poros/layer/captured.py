"""Visits of a layer that are recorded once and replayed: see ``poros.graphs``.

A visit starts the same work each time: its block lies in the same slot, its adapters where they
were. So the forward, and the recomputation with its gradients, are recorded once for each form of
call, and then cost one call of the host instead of hundreds.

Note: Eager is the way out
    Whatever is not certain to be the same work runs as always, with the same bits, so mixing both
    shows nowhere: calls with hooks inside the layer, under autocast with its cache, beside tensors
    that layers share, while somebody watches operators or the self-check runs; forms that have not
    come often enough; whatever cannot be recorded.

Note: Proof
    The first replay is made beside the eager visit that it is to replace, from the same random
    state. If any bit differs, random state included, the recording is never used.

Note: Memory
    What a recording reads that is not at the same address at each call (inputs, arriving
    gradients) is copied to fixed memory before a replay, and all that it gives is copied out of
    fixed memory after it: autograd keeps what it is handed. Recordings share that memory, and the
    memory of their temporary tensors, because visits are one after the other.

Note: When it is recorded
    As a pass begins, not within one: a backward runs in a thread and a state of its own.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import RematerializationError
from poros.graphs import Fixed, FixedMemory, Recorder, Recording, Spec
from poros.layer.retained import is_packed_by_others
from poros.layer.rng import RngStash
from poros.slots.schedule import Phase

if TYPE_CHECKING:
    from poros.layer.body import LayerBody
    from poros.layer.call import LayerCall

_LEAST_VISITS = 2
"""Eager visits of a form before it is recorded."""
_MOST_FORMS = 4
"""Forms of one layer that are remembered."""

Gradients = Sequence[torch.Tensor | None]


@dataclass
class Replayed:
    """One recording, with the fixed memory that it reads from and writes to."""

    recording: Recording
    given: Fixed
    gives: Fixed
    places: Sequence[Any]
    """For each result where it is: its number in ``gives``; -1 - n if it is the n-th of what was
    given; None if there is none."""
    is_proved: bool = False

    def run(self, sources: Sequence[torch.Tensor], memory: "SharedMemory") -> list[Any]:
        """Replay it on ``sources``; what it gives, in memory of its own."""
        memory.fill(self.given, sources)
        self.recording.replay()
        made = self.gives.copies()
        return [
            None if place is None else made[place] if place >= 0 else sources[-1 - place]
            for place in self.places
        ]


@dataclass
class Form:
    """One form of call of a layer, and what is known of it."""

    conditions: Hashable
    attributes: Any
    addresses: Any
    num_visits: int = 0
    facts: Any = None
    """What an eager forward has found, for those that replay."""
    forward: Replayed | None = None
    backwards: dict[Hashable, Replayed | None] = field(default_factory=dict)
    """By which gradients arrive; None where one is wanted."""
    refusal: str | None = None
    """Why nothing of it is recorded."""

    def refuse(self, reason: str) -> None:
        self.refusal, self.forward, self.backwards = reason, None, {}


class SharedMemory(FixedMemory):
    """Fixed memory that knows what was last copied into it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._filled: dict[int, tuple[Callable[[], torch.Tensor | None], int]] = {}

    def begin_pass(self) -> None:
        """From now on nothing is taken to be there already."""
        self._filled.clear()

    def fill(self, fixed: Fixed, sources: Sequence[torch.Tensor]) -> None:
        """Copy ``sources`` in, but for those that are there: masks and tables of a whole pass."""
        with torch.no_grad():
            targets, values = [], []
            for target, source in zip(fixed.tensors, sources, strict=True):
                last = self._filled.get(id(target))
                if last is None or last[0]() is not source or last[1] != source._version:
                    self._filled[id(target)] = weakref.ref(source), source._version
                    targets.append(target)
                    values.append(source.detach())
            if targets:
                torch._foreach_copy_(targets, values)


class Captures:
    """The recorded visits of one prepared model.

    Args:
        recorder: Records.
        device: Where layers run.

    Attributes:
        num_replays: Visits that were replayed.
        eager: Visits that ran as always, by reason.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self.memory = SharedMemory(device)
        self._device = device
        self.num_replays = 0
        self.eager: Counter[str] = Counter()
        self._forms: dict[int, list[Form]] = {}

    def form_of(self, call: "LayerCall") -> Form | None:
        """The form of a call whose forward comes now; None if it is not to be replayed."""
        reason = call.obstacle() or _obstacle_around()
        if reason is not None:
            self.eager[reason] += 1
            return None
        forms = self._forms.setdefault(call.layer.index, [])
        conditions, addresses = call.conditions(), call.addresses()
        for form in forms:
            if form.conditions == conditions:
                if form.addresses != addresses or call.attributes_since(form.attributes):
                    forms.remove(form)  # moved, or with another rate of dropout
                    break
                return form
        if len(forms) >= _MOST_FORMS:
            del forms[0]
        forms.append(Form(conditions, call.attributes, addresses))
        return forms[-1]

    def note_forward(self, call: "LayerCall", form: Form, results: Sequence[torch.Tensor]) -> None:
        """An eager forward has run; replay beside it what has been recorded since."""
        self.eager["a form that is new"] += 1
        form.num_visits += 1
        if form.facts is None:
            form.facts = call.facts()
        if form.forward is not None and not form.forward.is_proved:
            with call.layer.visit(Phase.FORWARD, call.adapters), call.ambient.rng.replay():
                found = form.forward.run(call.tensors, self.memory)
                same_end = call.ends_with(RngStash.capture(call.layer.device))
            self._settle(form, form.forward, found, [each.detach() for each in results], same_end)

    def forward(self, call: "LayerCall", form: Form) -> list[torch.Tensor] | None:
        """The results of a forward that is replayed; None if it has to run."""
        if form.forward is None or not form.forward.is_proved:
            return None
        with call.layer.visit(Phase.FORWARD, call.adapters):
            results = form.forward.run(call.tensors, self.memory)
        self.num_replays += 1
        for result, (_, _, requires_grad) in zip(results, form.facts.forms, strict=True):
            result.requires_grad_(requires_grad)
        return results

    def backward(
        self,
        call: "LayerCall",
        form: Form,
        tensors: Sequence[torch.Tensor],
        gradients: Gradients,
    ) -> tuple[list[torch.Tensor | None], list[list[torch.Tensor | None]]] | None:
        """Replay the recomputation and its gradients; only inside a visit.

        Returns:
            The gradients of what requires one, and the terms of what is used several times; None if
            it has to run.
        """
        replayed = form.backwards.get(_mask(gradients))
        if replayed is None or not replayed.is_proved:
            self.eager["a form that is new"] += 1
            return None
        found = self._replay_backward(call, replayed, tensors, gradients)
        self.num_replays += 1
        return found

    def note_backward(
        self,
        call: "LayerCall",
        form: Form,
        tensors: Sequence[torch.Tensor],
        gradients: Gradients,
        outgoing: Gradients,
    ) -> None:
        """An eager backward has run, and its terms are still there; only inside its visit."""
        if form.refusal is not None:
            return
        mask = _mask(gradients)
        replayed = form.backwards.setdefault(mask, None)
        if replayed is None or replayed.is_proved:
            return
        terms = [term for repeated in call.repeated.values() for term in repeated.terms]
        try:
            found, again = self._replay_backward(call, replayed, tensors, gradients)
        except RematerializationError:  # it drew other random numbers
            self._settle(form, replayed, (), (), same_end=False)
            return
        flat = [term for group in again for term in group]
        self._settle(form, replayed, [*found, *flat], [*outgoing, *terms], same_end=True)

    def _replay_backward(
        self,
        call: "LayerCall",
        replayed: Replayed,
        tensors: Sequence[torch.Tensor],
        gradients: Gradients,
    ) -> tuple[list[Any], list[list[Any]]]:
        sources = [*tensors, *(each for each in gradients if each is not None)]
        with call.replaying():
            found = replayed.run(sources, self.memory)
            call.require_same_end()
        groups: list[list[Any]] = []
        for repeated in reversed(list(call.repeated.values())):
            number = repeated.num_terms
            groups.insert(0, found[len(found) - number :])
            del found[len(found) - number :]
        return found, groups

    def _settle(
        self, form: Form, replayed: Replayed, found: Gradients, wanted: Gradients, same_end: bool
    ) -> None:
        if same_end and all(map(_same, found, wanted)):
            replayed.is_proved = True
        else:
            form.refuse("a replay with other bits than the visit that it was to replace")
            self.eager[str(form.refusal)] += 1

    def record_wanted(self, layers: Sequence["LayerBody"]) -> None:
        """Record what has come often enough; not within a visit."""
        self.memory.begin_pass()
        for layer in layers:
            for form in self._forms.get(layer.index, ()):
                if form.refusal is None and form.num_visits >= _LEAST_VISITS:
                    self._record(layer, form)

    def _record(self, layer: "LayerBody", form: Form) -> None:
        wanted = [mask for mask, replayed in form.backwards.items() if replayed is None]
        if form.forward is not None and not wanted:
            return
        try:
            with (
                layer.visit(Phase.FORWARD, form.facts.adapters),
                RngStash.capture(layer.device).replay(),
            ):
                if form.forward is None:
                    form.forward = self._record_forward(form)
                for mask in wanted:
                    form.backwards[mask] = self._record_backward(form, mask)
        except (RuntimeError, NotImplementedError) as error:
            form.refuse(f"cannot be recorded: {str(error).splitlines()[0]}")
            self.eager[str(form.refusal)] += 1

    def _record_forward(self, form: Form) -> Replayed:
        facts = form.facts
        given = self.memory.of("inputs", facts.specs)
        gives: list[Fixed] = []

        def run() -> None:
            inputs = facts.inputs(given.tensors)
            with torch.enable_grad():
                results = [each.detach() for each in facts.run(inputs)]
            gives.append(self._give(results))

        recording = self._recorded(facts, run)
        return Replayed(recording, given, gives[0], range(len(gives[0].tensors)))

    def _record_backward(self, form: Form, mask: Hashable) -> Replayed:
        facts = form.facts
        arriving = [
            Spec(shape, dtype)
            for (shape, dtype, _), arrives in zip(facts.forms, mask, strict=True)  # type: ignore[call-overload]
            if arrives
        ]
        given = self.memory.of("arriving", (*facts.specs, *arriving))
        made: list[Any] = []

        def run() -> None:
            inputs = facts.inputs(given.tensors[: len(facts.specs)])
            gradients = iter(given.tensors[len(facts.specs) :])
            every = [next(gradients) if arrives else None for arrives in mask]  # type: ignore[attr-defined]
            values = facts.differentiate(inputs, every, not self.recorder.sees_operators)
            known = {id(tensor): -1 - number for number, tensor in enumerate(given.tensors)}
            own = [each for each in values if each is not None and id(each) not in known]
            gives = self._give(own)
            numbers = {id(each): number for number, each in enumerate(own)}
            places = [
                None if each is None else known.get(id(each), numbers.get(id(each)))
                for each in values
            ]
            made.extend((gives, places))

        recording = self._recorded(facts, run)
        return Replayed(recording, given, made[0], made[1])

    def _recorded(self, facts: Any, run: Callable[[], None]) -> Recording:
        with facts.recording():
            return self.recorder.record(run)

    def _give(self, values: Sequence[torch.Tensor]) -> Fixed:
        """Fixed memory with ``values`` in it; the copy is part of what is recorded."""
        gives = self.memory.of("results", [Spec.of(each) for each in values])
        with torch.no_grad():
            for target, value in zip(gives.tensors, values, strict=True):
                target.copy_(value.detach())
        return gives

    def forget(self) -> None:
        """Let go of all recordings and their memory."""
        self._forms.clear()
        self.memory = SharedMemory(self._device)


def _mask(gradients: Gradients) -> tuple[bool, ...]:
    return tuple(gradient is not None for gradient in gradients)


def _obstacle_around() -> str | None:
    """What somebody does around this call that a replay would not show."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "operators that are watched"
    return "saved tensors that are packed" if is_packed_by_others() else None


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bytes_ = [each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right)]
    return torch.equal(*bytes_)
