"""Visits of a layer that are recorded once and replayed: see ``poros.replay.graphs``.

A visit starts the same work each time: its block lies in the same slot, its adapters where they
were. So forwards, and recomputations with their gradients, are recorded once for each form of call.

Note: Eager is the way out
    Whatever is not certain to be the same work keeps the graph of its forward
    (``poros.stream.general``), with the same bits, so mixing both shows nowhere: calls with hooks
    inside the layer, beside tensors that layers share, while somebody watches operators or the
    self-check runs; whatever cannot be recorded. A layer that keeps its graph on the device keeps
    one at a time in its recording. Those of several micro-batches that go together wait in copies;
    any other second forward before the backward of the first, and a form of call that is not the
    recorded one, go as those of a recomputed layer.

Note: Proof
    The first replay of a forward is made beside the forward in the graph around it, that of a
    backward beside a recomputation with its gradients, from the same random state. If any bit
    differs, random state included, the recording is never used. Gradients of an attention that does
    not repeat itself (``poros.stream.attention``) cannot be compared: then a recording of the same
    visit with attention that does is compared with such a visit.

Note: When it is recorded
    Once calls of its form have run and a backward has shown how it uses what it is given
    (``poros.replay.uses``); as a pass begins, not within one: a backward runs in a thread and a
    state of its own. What calls have shown holds wherever blocks lie: in another room the same
    forms are recorded as the next pass begins.
"""

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from poros.errors import ParityError, UnsupportedModelError
from poros.replay.call import LEAVES, CallFacts, LayerCall, is_checked
from poros.replay.forms import Form, HeldGraph, Replayed, expect_rows, hold_tensors
from poros.replay.graphs import Recorder, SharedMemory
from poros.replay.recording import Recordings, different_ones, with_steady_attention
from poros.replay.remat import Backward, RematerializeLayer, ReplayedVisit
from poros.replay.routing import Gradients, Tensors, hand_in
from poros.replay.rows import Rows
from poros.replay.segments import Segments
from poros.replay.uses import Around, Observation, walk
from poros.slots.schedule import Phase
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.context import Kind
from poros.utils.formatting import first_line

logger = logging.getLogger(__name__)

_LEAST_VISITS = 1
"""Eager visits of a layer's first form before it is recorded, and one more of others. Of several
micro-batches together it is ``_LEAST_REPLAYS`` of others: a row of rare length may not come again,
and its recordings take memory that steps of the usual length have filled. One more in all for each
recording of the layer that had to make way before it was worth its while."""
_SEVERAL = 3
_LEAST_REPLAYS = 4
"""From which on a recording was: it takes about as long as two visits that run."""
_FIRST_USES = 2
"""Visits of a form in which a layer may leave values in its modules, as bitsandbytes does."""
_LOOKED_AT = 16
"""Visits of a form that are looked at; then those whose number is a power of two."""
_MOST_RECORDED = 4
"""Forms of one layer that are recorded at a time; of a layer that keeps its graph, one."""
_IDLE_VISITS = 16
"""Visits of a layer after which a recorded form that did not come gives way to another."""
_MOST_FORMS = 64
"""Forms of one layer that are remembered."""

NEW = "a form that has not come often enough, or a check"
"""Every run has such visits."""
ARGUMENTS = "arguments that a layer may write to"
OTHER_SURROUNDINGS = "a backward in other surroundings than the first one of its form"


class Captures:
    """The recorded visits of one prepared model.

    Args:
        recorder: Records on ``device``.
        is_strict: Whether a recording with other bits is an error.
        most_tokens: Of a call, for it to be recorded.

    Attributes:
        num_replays: Visits that were replayed.
        eager: Visits that ran as always, by reason.
        rows: Replays visits by micro-batches, one behind the other.
        segments: Kept layers that are replayed together.
        num_recorded: Visits of layers that were recorded.
        is_on: Whether there is room for recordings.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        is_strict: bool = False,
        most_tokens: float = math.inf,
    ) -> None:
        memory = SharedMemory(device)
        self.num_replays = 0
        self.is_on = True
        self.eager: Counter[str] = Counter()
        self.num_recorded = 0
        self._held: weakref.WeakSet[HeldGraph] = weakref.WeakSet()
        """Memory of recordings that may have the graph of a call, until its backward."""
        self.rows = Rows(memory, self.note_replays)
        self._recordings = Recordings(recorder, memory)
        self._all, self._seconds = [self._recordings], None
        if (beside := recorder.beside()) is not None:
            self._seconds = Recordings(beside, SharedMemory(device), are_beside=True)
            self._all.append(self._seconds)
        self.segments = Segments(memory, self._recordings.links, self)
        self._device = device
        self._is_strict = is_strict
        self._most_tokens = most_tokens
        self._forms: dict[int, dict[Any, Form]] = {}
        self._num_passes, self._num_grouped = 0, 1
        self._num_visits: Counter[int] = Counter()
        self._num_wasted: Counter[int] = Counter()
        self._has_moved = False
        """Whether blocks have got other places since layers were recorded."""

    # ------------------------------------------------------------------ forwards

    def call(
        self,
        kind: Kind,
        layer: LayerBody,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        condition: Condition,
        run: Callable[[], Any],
        beside: Callable[[], Any] | None = None,
    ) -> Any:
        """Replay a call of a layer if it is recorded, else ``run`` it; return its result.

        ``condition``: what decides what it computes, now. ``beside``: its forward beside a replay
        that is compared with it, if that is another one than ``run``.
        """
        try:
            call = LayerCall(layer, args, kwargs, condition)
        except UnsupportedModelError:
            self.eager[ARGUMENTS] += 1
            return run()
        if kind != "inference" and not call.needs_gradient:
            return run()
        form = self._form_of(call, kind)
        if form is not None and form.kind == "kept":
            other = None if form.forward is not None else self._in_the_way(layer, form)
            # There is memory for the graphs of all micro-batches that go together.
            is_free = form.in_flight() is None or (self._num_grouped > 1 and form.put_aside())
            are_watched = any(hasattr(each, "is_watched") for each in call.parameters)
            if (other is not None or not is_free) and not are_watched:
                run = beside or run  # a recording has the memory that there is for the graph
            if not is_free or (other is not None and not self._has_place(layer, form)):
                # The device computes it twice then: less than the host takes to run it once.
                form = self._form_of(call, "recomputed")
            elif not self._spares_others(form):
                form.clear()
                self._num_wasted[layer.index] += 1
        if form is None:
            return run()
        if form.forward is None or is_checked(layer, kind):
            return self._observed(call, form, run)
        return self._replayed(call, form, form.forward, beside or run)

    def _observed(self, call: LayerCall, form: Form, run: Callable[[], Any]) -> Any:
        """Run a call of a form that is not recorded; its backward shows what is to be known."""
        first = torch._C._autograd._get_sequence_nr()
        number = form.num_visits + 1
        # Once a pass; and seldom, if no backward shows anything: looking costs each of them.
        is_due = form.num_looks < _LOOKED_AT or not number & (number - 1)
        is_known = form.refusal is not None or form.shown is not None
        if is_known or form.pass_of_look == self._num_passes or not is_due:
            self._note_visit(form)
            return run()
        form.num_looks += 1
        returned, left = call.seen(run)
        self._note_visit(form)
        if left and number > _FIRST_USES:
            self._refuse(call.layer, form, LEAVES, ", ".join(sorted(left)))
        if left:
            return returned
        try:
            template, results = call.taken_apart(returned)
            facts = CallFacts(call, template, results)
            if form.kind == "inference":
                form.shown = facts
                return returned
            uses = walk(results, call.tensors, call.parameters, call.has_casts, first)
        except UnsupportedModelError as error:
            self._refuse(call.layer, form, str(error))
            return returned
        # A cast that was there before has its gradient when others want it.
        if not any(use.source.is_cast and use.end._sequence_nr() < first for use in uses):
            learn = partial(form.learn, facts)
            Observation(uses, len(call.tensors), results, self._device, learn)
            form.pass_of_look = self._num_passes
        return returned

    def _replayed(
        self, call: LayerCall, form: Form, forward: Replayed, run: Callable[[], Any]
    ) -> Any:
        """Replay a call whose forward is recorded."""
        phase = Phase.INFERENCE if form.kind == "inference" else Phase.FORWARD
        results: Any
        if not forward.is_proved:
            returned, left = call.seen(run)
            self._note_visit(form)
            if left:
                self._refuse(call.layer, form, LEAVES, ", ".join(sorted(left)))
                return returned
            call.note_end()
            with call.layer.weights.occupy(phase), call.rng.replay():
                results = forward.run(call.tensors)
                same_end = call.ends_alike()
            forward.has_drawn = call.has_drawn
            wanted = [each.detach() for each in call.taken_apart(returned)[1]]
            different = different_ones(results, wanted, "result")
            self._settle(call, form, forward, different if same_end else "random numbers")
            return returned
        call.mappings = ()  # they hold what other layers leave, with its graph
        together = call.layer.context.together if form.facts.may_be_apart else None
        if together is not None:
            made = self.rows.all(call, form, together.behind, self.backward)
            together.made += made
            if made:
                self._held.update(form.all_held())
                return made[0][0]
        # Before the forward, which the copy overlaps with.
        kept = call.offload_input() if form.kind == "recomputed" else call.tensors
        with call.layer.weights.occupy(phase):
            results = forward.run(call.tensors)
        call.note_end()
        self.note_replays(form, 1)
        if form.kind == "inference":
            return form.facts.result_of(results)
        if form.held is not None:
            form.held.note_at(call, None)
            self._held.add(form.held)
        if together is not None:
            result = form.facts.result_of(results)
            together.made.append((result, ReplayedVisit(call, form, kept, self.backward)))
            return result
        uses, gives_casts = form.facts.uses, form.facts.gives_casts
        given, terms = hand_in(call.tensors, call.parameters, uses, gives_casts, call.layer.name)
        outputs = RematerializeLayer.apply(call, form, self.backward, terms, results, kept, *given)
        call.tensors = ()  # autograd keeps them from here on, and releases them after backward
        return form.facts.result_of(outputs)

    def _spares_others(self, form: Form) -> bool:
        """Whether a replay of the forward of ``form`` can overwrite no graph that is held."""
        lost = [each for held in form.all_held() for each in held.overwritten(self._held)]
        return not lost or (self._num_grouped > 1 and all(one.put_aside(True) for one in lost))

    def note_replays(self, form: Form, number: int) -> None:
        """Count forwards of ``form`` that were replayed."""
        self.num_replays += number
        form.num_replays += number

    def may_replay(self, layers: Sequence[LayerBody], forms: Sequence[Form]) -> bool:
        """Whether calls of these forms may be replayed now, in order, with their graphs."""
        return (
            self.is_on
            and not any(is_checked(each, "kept") for each in layers)
            and all(form.in_flight() is None for form in forms)
            and self._spares_others(forms[0])  # the first that was recorded
        )

    def note_kept(self, forms: Sequence[Form], visit: object) -> None:
        """They were; their graphs are kept as long as ``visit`` is there."""
        for form in forms:
            if form.held is not None:
                form.held.note_at(visit, None)
                self._held.add(form.held)
            form.last_visit += 1
            self.note_replays(form, 1)
        self.rows.num_joined += len(forms)

    def note_backwards(self, number: int) -> None:
        """So many backwards of layers in a row were replayed in one go."""
        self.num_replays += number
        self.rows.num_joined += number

    def _note_visit(self, form: Form, reason: str = NEW) -> None:
        self.eager[form.refusal or reason] += 1
        form.num_visits += 1

    def _form_of(self, call: LayerCall, kind: Kind) -> Form | None:
        """The form of a call whose forward comes now; None if it is not to be replayed."""
        if not self.is_on:
            reason: str | None = "no room for recordings in the budget"
        elif call.num_tokens > self._most_tokens:
            reason = "so many tokens that the device is busy anyway"
        else:
            reason = call.obstacle()
        if reason is not None:
            self.eager[reason] += 1
            return None
        forms = self._forms.setdefault(call.layer.index, {})
        dense = call.layer.dense_address
        conditions, now = (kind, dense, call.conditions()), call.condition
        form = forms.pop(conditions, None)
        # Moved, or with another rate of dropout?
        if form is None or not now.reads_as(form.condition):
            forms = {k: old for k, old in forms.items() if old.condition.contents is now.contents}
            self._forms[call.layer.index] = forms  # the others hold adapters that are gone
            form = Form(kind, conditions, now, dense)
            if hold_tensors(now.contents.modules()):
                form.refuse("a module that holds tensors beside its parameters and buffers")
        form.condition = now
        forms[conditions] = form  # the last of them
        form.last_visit = self._num_visits[call.layer.index] = (
            self._num_visits[call.layer.index] + 1
        )
        while len(forms) > _MOST_FORMS:
            del forms[next(iter(forms))]
        return form

    # ----------------------------------------------------------------- backwards

    def backward(
        self,
        call: LayerCall,
        form: Form,
        tensors: Tensors,
        gradients: Gradients,
        *,
        in_place: bool = False,
        behind: Replayed | None = None,
    ) -> tuple[Gradients, Replayed | None]:
        """The gradients of a call whose forward was replayed, for each use of a source.

        Args:
            call: The call.
            form: What is known of such calls.
            tensors: What was kept of it.
            gradients: Of its results.
            in_place: Whether they may lie in fixed memory, until the next replay.
            behind: The recording of the layer that was replayed right before, for another
                micro-batch; nobody's code has run since.

        Returns:
            These; and the recording that has given them, if it was one.
        """
        around = Around(tuple(each is not None for each in gradients), call.layer.surroundings())
        is_seen = torch._C._len_torch_dispatch_stack() > 0  # by somebody who wants to see operators
        replayed = None if is_seen else form.backward_of(call, around)
        asked = Backward(call, form, tensors, gradients, around)
        if replayed is not None and replayed.is_proved:
            with call.layer.weights.occupy(Phase.BACKWARD):
                found = asked.with_input().replay(replayed, in_place, behind is replayed)
            self.num_replays += 1
            return found, replayed
        call.require_unchanged()
        with call.layer.visit(Phase.BACKWARD, form.facts.leaves):
            asked = asked.with_input()
            wanted = asked.run()
        if not is_seen:
            is_other = form.backward is not None and around != form.around
            self._note_visit(form, OTHER_SURROUNDINGS if is_other else NEW)
        if replayed is not None:
            self._prove_backward(asked, replayed, wanted)
        return wanted, None

    def _prove_backward(self, asked: "Backward", replayed: Replayed, wanted: Gradients) -> None:
        """A backward has run: compare its replay with it."""
        form, steady = asked.form, asked.form.steady
        if form.wants_steady and steady is None:
            return  # it is recorded as the next pass begins
        different = asked.differs(replayed, wanted)
        if different and steady is None and form.may_vary:
            form.wants_steady = True
            return
        if different and steady is not None:
            own_visit = asked.call.layer.visit(Phase.BACKWARD, form.facts.leaves)
            with own_visit, asked.call.rng.replay():
                facts, about = form.facts, (asked.tensors, asked.gradients, asked.around)
                wanted = with_steady_attention(facts, *about)
            different = asked.differs(steady, wanted)
        form.steady, form.wants_steady = None, False
        self._settle(asked.call, form, replayed, different)

    # ----------------------------------------------------------------- recording

    def begin_pass(
        self,
        layers: Sequence[LayerBody],
        is_on: bool = True,
        joins: bool = True,
        num_grouped: int = 1,
        are_rows: bool = False,
        holder: nn.Module | None = None,
    ) -> bool:
        """Record what has come often enough, not within a visit; whether anything was recorded.

        Args:
            layers: Of the model.
            is_on: Whether there is room for recordings.
            joins: Whether there is room for joined ones.
            num_grouped: Micro-batches that go through the layers together.
            are_rows: Whether calls of the pass share a layer's dense weights, if there is memory
                for them.
            holder: Holds the layers, if their calls may wait for those of layers behind.
        """
        self.segments.begin_pass(holder, layers)
        for recordings in self._all:
            recordings.begin_pass()
        self._num_passes, self._num_grouped = self._num_passes + 1, num_grouped
        if not is_on and self.is_on:
            self.forget()
        self.rows.begin_pass(joins, num_grouped, self._all_forms)
        self.is_on = is_on
        # Within a backward the model is checkpointed; memory of inference mode is of no use later.
        is_within = torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled()
        if not is_on:
            return False
        if self._has_moved:
            self._take_up(layers)
        if are_rows:
            expect_rows(layers, self._forms)
        if is_within:
            return False
        begun, num_before, has_given_back = time.perf_counter(), self.num_recorded, False
        for layer, form in self._wanted(layers, num_grouped >= _SEVERAL):
            if self._is_ready(layer, form):
                if not has_given_back:
                    torch.cuda.empty_cache()  # replayed visits cannot have what others left
                has_given_back = True
                self._record(layer, form)
        has_joined = self._join(layers)
        self.segments.join(layers, self._forms)
        made = self.num_recorded - num_before
        if made:
            took = time.perf_counter() - begun
            logger.info("poros: recorded %d calls of layers as CUDA graphs in %.1f s", made, took)
        return made > 0 or has_joined

    def _wanted(self, layers: Sequence[LayerBody], is_group: bool) -> list[tuple[LayerBody, Form]]:
        found, of_others = [], _LEAST_REPLAYS if is_group else _LEAST_VISITS + 1
        for layer in layers:
            forms = self._forms.get(layer.index, {}).values()
            in_use = {form.kind for form in forms if form.num_replays}
            for form in forms:
                is_first = form.forward is not None or form.kind not in in_use
                least = _LEAST_VISITS if is_first else of_others
                least += self._num_wasted[layer.index]
                if form.num_visits >= least and form.refusal is None and form.is_wanting:
                    found.append((layer, form))
        return found

    def _is_ready(self, layer: LayerBody, form: Form) -> bool:
        """Whether it can be recorded now; if need be, another one makes way."""
        if not _is_as_shown(layer, form) or not self._has_place(layer, form):
            return False
        other = self._in_the_way(layer, form)
        if other is not None:
            del self._forms[layer.index][other.conditions]
            self._num_wasted[layer.index] += other.num_replays < _LEAST_REPLAYS
        return True

    def _in_the_way(self, layer: LayerBody, form: Form) -> Form | None:
        """The recorded form that came last ago, if there is no place for one more of its kind."""
        others = [each for each in self._forms[layer.index].values() if each.kind == form.kind]
        recorded = [each for each in others if each.forward is not None]
        if form in recorded or len(recorded) < (1 if form.kind == "kept" else _MOST_RECORDED):
            return None
        return min(recorded, key=lambda each: each.last_visit)

    def _has_place(self, layer: LayerBody, form: Form) -> bool:
        """Whether it is recorded, or may be: what is in its way has not come for long."""
        other = self._in_the_way(layer, form)
        return other is None or self._num_visits[layer.index] - other.last_visit >= _IDLE_VISITS

    def _record(self, layer: LayerBody, form: Form) -> None:
        try:
            self._recordings.record(layer, form)
            self.num_recorded += 1
        except (RuntimeError, NotImplementedError, UnsupportedModelError) as error:
            self._refuse(layer, form, "cannot be recorded: " + first_line(error))

    def _join(self, layers: Sequence[LayerBody]) -> bool:
        """Join what is recorded of forms that come in rows; whether that took memory."""
        has_taken = is_behind = False
        for layer in layers:
            for form in self._forms.get(layer.index, {}).values():
                try:
                    if is_behind and form.held is not None:
                        form.want_rows_anew()  # replays are to be in the order of recordings
                    if self._seconds is not None and self.rows.wants_second(form):
                        if form.in_flight() is not None or not _is_as_shown(layer, form):
                            continue  # perhaps as another pass begins
                        if not has_taken:
                            torch.cuda.empty_cache()
                        has_taken, is_behind = True, is_behind or form.held is not None
                        self._record_second(layer, form, self._seconds)
                    has_taken |= self.rows.join(form)
                except RuntimeError as error:
                    why = first_line(error)
                    logger.warning("poros: visits of %s are not joined: %s", layer.name, why)
                    form.leave_rows()
        return has_taken

    def _record_second(self, layer: LayerBody, form: Form, seconds: Recordings) -> None:
        """Record ``form`` once more. That is to be proved."""
        other = form.unrecorded()
        try:
            seconds.record(layer, other)
        except (RuntimeError, NotImplementedError, UnsupportedModelError) as error:
            form.has_no_second = True
            logger.warning("poros: calls of %s go one at a time: %s", layer.name, first_line(error))
            return
        form.trade(other)
        self.num_recorded += 1

    def _settle(
        self, call: LayerCall, form: Form, replayed: Replayed, different: str | None
    ) -> None:
        if different is None:
            replayed.is_proved = self.segments.is_behind = True
            return
        reason = "a recording gave other bits than the visit it was to replace"
        if self._is_strict:
            raise ParityError(
                f"{call.layer.name}: expected a recorded visit (cuda_graphs=True) to give the bits "
                f"of the visit that it replaces, found others: {different}. Nothing was trained "
                "with it. Use cuda_graphs=None, which runs such layers without recordings, or False"
            )
        self._refuse(call.layer, form, reason, different)

    def _refuse(self, layer: LayerBody, form: Form, reason: str, about: str = "") -> None:
        if reason not in self.eager:
            more = f" ({about})" if about else ""
            logger.warning("poros: %s runs without a CUDA graph: %s%s", layer.name, reason, more)
        form.refuse(reason)
        self.eager[reason] += 1

    def _all_forms(self) -> list[Form]:
        return [form for of_layer in self._forms.values() for form in of_layer.values()]

    @property
    def terms_to_come(self) -> Sequence[str]:
        """Terms of a plan (``poros.planning.formula``) for memory that is not taken yet."""
        forms = self._all_forms()
        if not self.is_on or any(row for form in forms for row in form.rows.values()):
            return ()
        is_recorded = any(form.forward is not None for form in forms)
        return ("copies",) if is_recorded else ("recordings", "copies")

    def forget(self) -> None:
        """Release all recordings and their memory; a backward that is to come runs.

        What calls have shown of their forms holds wherever blocks lie: as the next pass begins,
        the same forms are recorded anew.
        """
        self.segments.forget()
        for form in self._all_forms():
            form.clear()
        self._has_moved = True
        for recordings in self._all:
            recordings.forget()

    def _take_up(self, layers: Sequence[LayerBody]) -> None:
        """Know forms of before again, of layers that have not changed but for their places.

        Of a layer that keeps its graph from now on, or no longer does, they are of another kind.
        """
        moved, self._forms, self._has_moved = self._forms, {}, False
        for layer in layers:
            now, known = layer.condition(), self._forms.setdefault(layer.index, {})
            address = layer.shared_address
            kinds: list[Kind] = ["kept"] if layer.weights.is_pinned else []
            for form in sorted(
                moved.get(layer.index, {}).values(), key=lambda each: -each.last_visit
            ):
                before = form.condition
                is_same = now.is_like(before)
                is_known = form.shown is not None and form.refusal is None
                if is_known and is_same:
                    if form.kind != "inference":
                        form.kind = kinds.pop() if kinds else "recomputed"
                    form.found_as(now)
                    form.move_to(address if form.dense_address is not None else None)
                    known.setdefault(form.conditions, form)


def _is_as_shown(layer: LayerBody, form: Form) -> bool:
    """Whether the layer does now what calls of the form have shown; a recording runs its code."""
    now = layer.condition()
    # Adapters may be switched off for a while; hooks would run more often than the user's.
    return form.shown is not None and not now.has_hooks and form.is_for(now)
