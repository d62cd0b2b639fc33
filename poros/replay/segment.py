"""Kept layers one behind the other that are replayed in one go: see ``poros.replay.captures``.

A layer that keeps its graph is recorded by itself. Replayed by itself, it costs the host more than
a small micro-batch costs the device (a step of 7B at 512 tokens on an H200: 69 to 71 ms beside 48
of kernels, benchmarks/results/kept_h200_202611.md). So what is recorded of a few layers in a row is
joined, with the copies between, and they are one node of the graph.

Note: Calls that wait
    The code of the model calls one layer after the other. Each call is looked up as it comes, and
    waits; its caller gets a tensor without values (``Pending``). The call of the last layer replays
    all of them. Whoever uses a ``Pending`` before that has the waiting calls run one by one, and
    goes on with their values, and so does any call that is not the recorded one. A ``Pending`` that
    is used when the layers behind have been replayed has no values any more: an error.

Note: Which
    Layers whose recordings have given the right bits, and draw no random numbers: a joined graph
    takes the state of one generator once. Each gives one tensor, of the form of its hidden states.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError
from poros.kernels.forwards import has_hooks
from poros.kernels.nodes import unwritten_tensors
from poros.replay.call import NUM_OF_FORM, LayerCall, total
from poros.replay.forms import Form, Replayed
from poros.replay.graphs import Recording, SharedMemory, Spec
from poros.replay.links import Links
from poros.replay.pending import Pending, Result, with_values
from poros.replay.remat import written
from poros.replay.routing import OF_ADAPTERS, Gradients, Tensors, Terms, hand_in
from poros.replay.uses import Around, Source
from poros.stream.args import as_result
from poros.stream.body import LayerBody
from poros.stream.boundary import StreamedLayer, without_caches
from poros.stream.condition import Condition
from poros.stream.stack import LayerStack

_MOST_IN_VAIN = 3
"""Times that calls have waited one after the other and were not replayed, before none waits."""


class Owner(Protocol):
    """``poros.replay.captures.Captures``."""

    def may_replay(self, layers: Sequence[LayerBody], forms: Sequence[Form]) -> bool:
        """Whether calls of these forms may be replayed now, in order, with their graphs."""

    def note_kept(self, forms: Sequence[Form], visit: object) -> None:
        """They were; their graphs are kept as long as ``visit`` is there."""

    def note_backwards(self, number: int) -> None:
        """So many were replayed."""

    def backward(
        self, call: LayerCall, form: Form, tensors: Tensors, gradients: Gradients
    ) -> tuple[Gradients, Replayed | None]:
        """The gradients of a call by itself."""


class _Waiting(NamedTuple):
    """A call that waits: what it was given, but for hidden states, and its result.

    ``call``: the first one that waits which was given the very same.
    """

    layer: StreamedLayer
    others: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: LayerCall
    result: Result

    def is_alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether another call was given the very same, but for hidden states."""
        mine, others = (*self.others, *self.kwargs.values()), (*args[1:], *kwargs.values())
        is_same = len(args) == len(self.others) + 1 and tuple(kwargs) == tuple(self.kwargs)
        return is_same and all(map(is_, mine, others))


class _Part:
    """What a segment has of layer ``number`` in it, whose calls are of one ``form``."""

    def __init__(self, number: int, form: Form, memory: SharedMemory) -> None:
        forward, backward = form.forward, form.backward
        if forward is None or backward is None:
            raise LookupError("expected a form that is recorded, found one that is not")
        self.form, self.forward, self.backward = form, forward, backward
        self.parameters = form.condition.parameters
        self.arguments = form.arguments
        self.key = key_of(form.arguments)
        facts, uses = form.facts, form.facts.uses
        num_tensors = len(facts.specs)
        self.of_hidden = [use for each in uses.of_tensors for use in each]
        self.terms = [
            backward.gives.tensors[place]
            for use in self.of_hidden
            if (place := backward.places[use]) is not None
        ]
        found = [
            (use, place)
            for use, place in enumerate(backward.places)
            if place is not None and uses.sources[use].number >= num_tensors
        ]
        found.sort(key=lambda each: each[1])  # as they lie
        self._uses = [use for use, _ in found]
        specs = [Spec.of(backward.gives.tensors[place]) for _, place in found]
        groups = [OF_ADAPTERS] * len(specs)
        self._taken = memory.of(f"gradients of layer {number} of a segment", specs, groups)
        by_source = zip(uses.by_source, uses.single, strict=True)
        self.wanted = [
            use for source, use in by_source if source.number >= num_tensors or not number
        ]
        """For what the node of the graph is given of it, the use that its gradient is of."""

    def is_current(self) -> bool:
        return self.form.forward is self.forward and self.form.backward is self.backward

    def is_current_for(self, visit: "SegmentVisit") -> bool:
        """Whether the backward that is recorded is that of the visit."""
        return self.is_current() and self.form.in_flight() is visit

    def take(self, links: Links) -> Recording:
        """Record that gradients of adapters are put aside, before the next backward."""
        piece, place = (each.piece_of(OF_ADAPTERS) for each in (self.backward.gives, self._taken))
        if piece is None or place is None:
            raise LookupError("expected gradients of one dtype, found several")
        return links.copies([place], [piece])

    def gradients(self, is_first: bool) -> list[torch.Tensor | None]:
        """For each use its gradient, in memory of its own; those of adapters, or ``is_first``."""
        if is_first:
            made = self.backward.gives.copies()
            return [None if place is None else made[place] for place in self.backward.places]
        found: list[torch.Tensor | None] = [None] * len(self.backward.places)
        for use, gradient in zip(self._uses, self._taken.copies(), strict=True):
            found[use] = gradient
        return found


class Segment:
    """Layers in a row that are replayed in one go.

    Args:
        layers: These.
        forms: Of the calls of each, recorded; their conditions are those of now.
        memory: Of the recordings.
        links: Records the copies between them.
        owner: Of the recordings.

    Raises:
        LookupError: If the device joins no recordings at all.
        RuntimeError: If it cannot join these.
    """

    def __init__(
        self,
        layers: Sequence[LayerBody],
        forms: Sequence[Form],
        memory: SharedMemory,
        links: Links,
        owner: Owner,
    ) -> None:
        self._layers, self._owner = layers, owner
        self._stack = LayerStack(layers)
        self._condition = self._stack.condition()
        self._waiting: list[_Waiting] = []
        self._given: list[tuple[torch.Tensor, int]] = []
        """What calls that wait were given, and its versions then."""
        self._num_in_vain = 0
        hidden = [forms[0].facts.specs[0]]
        self._hidden = memory.of("hidden states of a segment", hidden)
        self._gradient = memory.of("gradient of a segment", hidden)
        self.parts = [_Part(number, form, memory) for number, form in enumerate(forms)]
        others = [spec for form in forms for spec in form.facts.specs[1:]]
        self._others = memory.of("what a segment is given besides", others)
        self._forwards, before = list[Recording](), self._hidden.tensors[0]
        others_left = iter(self._others.tensors)
        for part in self.parts:
            given, *besides = part.forward.given.tensors
            sources = [before, *(next(others_left) for _ in besides)]
            self._forwards += [links.copies([given, *besides], sources), part.forward.recording]
            (before,) = part.forward.gives.tensors
        self._backwards, terms = list[Recording](), self._gradient.tensors
        for number, part in reversed(list(enumerate(self.parts))):
            (arriving,) = part.backward.given.tensors
            casts = part.backward.casts
            self._backwards += [
                links.copy_of_sum(arriving, terms),
                *([] if casts is None else casts.recordings),
                part.backward.recording,
                *([part.take(links)] if number else []),
            ]
            terms = part.terms
        forward, backward = links.join(self._forwards), links.join(self._backwards)
        if forward is None or backward is None:
            raise LookupError("expected a device that joins recordings, found one that does not")
        self._forward, self._backward = forward, backward

    def modules(self) -> list[nn.Module]:
        """The layers and all modules in them."""
        return self._stack.contents.modules()

    def is_current(self) -> bool:
        """Whether what it is joined of is what is recorded of its layers."""
        return all(part.is_current() for part in self.parts)

    # ------------------------------------------------------------------- forward

    def call(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the forward of one of its layers, with gradients."""
        number = layer.index - self._layers[0].index
        if not number and any(each.result.is_held() for each in self._waiting):
            self.run_waiting()
        elif not number:
            self.forget_waiting()
        found = self._waiting_call(number, layer, args, kwargs)
        if found is None:
            self.run_waiting()
            return layer.forward_now(with_values(args), with_values(kwargs))
        self._waiting.append(found)
        if len(self._waiting) < len(self.parts):
            return found.result.hand_on(self._hidden.tensors[0])
        if any(each.result.is_held() for each in self._waiting[:-2]):  # by code that may use it
            self.run_waiting()
            return found.result.take()
        return self._replay()

    def _waiting_call(
        self, number: int, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Waiting | None:
        """The call, if it can be replayed with those that wait."""
        # Hooks on layers behind would run before the calls that wait.
        called = [layer] if number else self._layers
        modules = [module for each in called if (module := each.module()) is not None]
        if number != len(self._waiting) or not args or has_hooks(*modules):
            return None
        call: LayerCall | None
        if not number:
            call = self._first_call(layer, args, kwargs)
        elif not (self._is_next(args[0]) and self._is_as_before()):
            return None
        elif self._waiting[-1].is_alike(args, kwargs):
            call = self._waiting[-1].call
        else:
            call = self._other_call(layer, args, kwargs)
        key = None if call is None else key_of(call.arguments())
        if call is None or key != self.parts[number].key:
            return None
        return _Waiting(layer, args[1:], kwargs, call, Result(self.run_waiting))

    def _first_call(
        self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerCall | None:
        forms = [part.form for part in self.parts]
        if (
            getattr(args[0], "shape", None) != self._hidden.tensors[0].shape
            or self._num_in_vain >= _MOST_IN_VAIN
            or not self.is_current()
            or not self._owner.may_replay(self._layers, forms)
            or any(each.cast_trained_biases() for each in self._layers)
            or not self._stack.is_current()
        ):
            return None
        for each in self._layers:
            each.weights.require_ready()
        now = self._stack.condition()
        if not now.reads_as(self._condition) or now.training != self._condition.training:
            return None
        call = self._looked_up(layer, args, kwargs, now)
        if call is not None and call.arguments() != self.parts[0].arguments:
            layer.context.forget_casts(now.trained.ids)
            return None
        return call

    def _other_call(
        self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerCall | None:
        """A call with other arguments than the one before it, besides hidden states."""
        first = self._waiting[0].call
        given = as_result(self._hidden.tensors[0])  # of which its form alone is looked at
        call = self._looked_up(layer, (given, *args[1:]), kwargs, first.condition)
        if call is not None:
            call.shares_casts = first.shares_casts
        return call

    def _looked_up(
        self,
        layer: StreamedLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        condition: Condition,
    ) -> LayerCall | None:
        args, kwargs = without_caches(args, kwargs)
        try:
            call = LayerCall(layer, args, kwargs, condition)
        except UnsupportedModelError:
            return None
        call.let_go()
        if call.obstacle() is not None or not call.is_plain:
            return None
        self._given += [(each, each._version) for each in call.tensors[bool(self._waiting) :]]
        return call

    def _is_next(self, given: Any) -> bool:
        """Whether that is what the last call that waits has handed on."""
        return isinstance(given, Pending) and given.result is self._waiting[-1].result

    def _is_as_before(self) -> bool:
        """Whether a layer that runs now runs as when the first one that waits was called."""
        first = self._waiting[0].call
        return first.obstacle() is None and first.surroundings == first.layer.surroundings()

    def _require_unedited(self) -> None:
        if any(each._version != version for each, version in self._given):
            raise UnsupportedModelError(
                f"{self._layers[0].name}: expected what a layer is given to be left alone until "
                "the layers behind it are called, found a tensor edited in place. Edit a copy, or "
                "use poros.prepare(model, cuda_graphs=False)"
            )

    def forget_waiting(self) -> None:
        """Calls that wait are not to run."""
        self._waiting, self._given = [], []

    def run_waiting(self) -> None:
        """Have the calls that wait run one by one."""
        if not self._waiting:
            return
        self._require_unedited()
        if not self._is_as_before():
            raise UnsupportedModelError(
                f"{self._layers[0].name}: expected a model's code to leave autocast, settings and "
                "modes of PyTorch alone between two layers, found that it changes some. Use "
                "poros.prepare(model, cuda_graphs=False)"
            )
        self._num_in_vain += 1
        waiting, self._waiting, self._given = self._waiting, [], []
        first = waiting[0].call
        first.layer.context.forget_casts(first.condition.trained.ids)
        hidden = first.tensors[0]
        with torch.inference_mode(False), torch.enable_grad():
            for each in waiting:
                hidden = each.layer.forward_now((hidden, *each.others), each.kwargs)
                each.result.value = hidden

    def _replay(self) -> torch.Tensor:
        self._require_unedited()
        waiting, self._waiting, self._given = self._waiting, [], []
        first, calls = waiting[0].call, [each.call for each in waiting]
        waiting[0].layer.begin_graph(waiting[0].others, waiting[0].kwargs)
        self._num_in_vain = 0
        self._hidden.fill(first.tensors[:1])
        self._others.fill([tensor for call in calls for tensor in call.others])
        for part in self.parts:
            part.forward.given.forget()
        self._hidden.forget()
        self._forward.replay()
        (result,) = self.parts[-1].forward.gives.copies()
        kept = {id(each): each for call in calls for each in call.others}
        visit = SegmentVisit(self, calls)
        self._owner.note_kept([part.form for part in self.parts], visit)
        given: list[torch.Tensor] = []
        terms: Mapping[Source, Terms] = {}
        for number, (part, each) in enumerate(zip(self.parts, waiting, strict=True)):
            facts = part.form.facts
            tensors = [None] * len(facts.specs) if number else first.tensors
            about = facts.uses, facts.gives_casts, each.layer.name
            handed, several = hand_in(tensors, part.parameters, *about)
            given += handed
            terms = terms if number else several
        all_kept = [first.tensors[0], *kept.values()]
        for call in calls:
            call.tensors = call.others = ()  # autograd keeps them from here on
        output: torch.Tensor = ReplayedSegment.apply(visit, terms, result, all_kept, *given)
        return output

    # ------------------------------------------------------------------ backward

    def backward(self, visit: "SegmentVisit", gradient: torch.Tensor) -> list[Gradients]:
        """For each layer the gradient of each use; of hidden states, those of the first layer."""
        visit.condition.require_same_tensors(visit.condition.marks)
        around = Around((True,), self._layers[0].surroundings())
        is_as_recorded = (
            not torch._C._len_torch_dispatch_stack()
            and self.parts[0].form.around == around  # that of all
            and all(part.is_current_for(visit) for part in self.parts)
            and all(each.dense_address is None for each in self._layers)
        )
        if not is_as_recorded:
            return self._one_by_one(visit, gradient)
        for each in self._layers:
            each.weights.require_ready()
        for part in self.parts:
            part.backward.given.forget()
        self._gradient.fill([gradient])
        self._gradient.forget()
        self._backward.replay()
        self._owner.note_backwards(len(self.parts))
        return [part.gradients(is_first=part is self.parts[0]) for part in self.parts]

    def _one_by_one(self, visit: "SegmentVisit", gradient: torch.Tensor) -> list[Gradients]:
        if not self._stack.is_current():
            raise RematerializationError(
                f"{self._layers[0].name}: expected the modules of the forward, in this layer and "
                "those behind it, found others at their backward; change them between steps"
            )
        self._stack.condition().require_as(visit.condition, visit.condition.marks)
        found: list[Gradients] = []
        arriving: torch.Tensor | None = gradient
        each_of = zip(self.parts, self._layers, visit.calls, visit.inputs, strict=True)
        for part, layer, call, inputs in reversed(list(each_of)):
            tensors = [each.detach() for each in inputs]
            asked = call.of_layer(layer), part.form, tensors, (arriving,)
            of_uses, _ = self._owner.backward(*asked)
            found.insert(0, of_uses)
            arriving = total(of_uses[use] for use in part.of_hidden)
        return found


class SegmentVisit:
    """One replayed forward of a segment, until its graph is gone."""

    def __init__(self, segment: Segment, calls: Sequence[LayerCall]) -> None:
        self.segment, self.calls, self.condition = segment, calls, calls[0].condition
        self.inputs = [held.inputs for part in segment.parts if (held := part.form.held)]
        """What each layer was given, in memory of its recording."""
        self._modules = segment.modules()  # live as long as their graph

    def release(self) -> None:
        """No gradient of it is taken any more."""
        for part in self.segment.parts:
            part.form.release(self)


class ReplayedSegment(torch.autograd.Function):
    """Gives what the replayed forward of a segment gave: as ``poros.replay.remat`` for a layer.

    Exactness, errors and the order of gradients are those of its layers one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        visit: SegmentVisit,
        terms: Mapping[Source, Terms],
        result: torch.Tensor,
        kept: Sequence[torch.Tensor],
        *given: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.visit, ctx.terms = visit, terms
        ctx.save_for_backward(*kept)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        visit: SegmentVisit = ctx.visit
        segment, first = visit.segment, visit.calls[0]
        if torch.is_grad_enabled():
            first.refuse_second_order()
        unwritten_tensors(ctx, written(first))
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        found = segment.backward(visit, gradient)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            visit.release()
        uses = segment.parts[0].form.facts.uses
        for source, terms in ctx.terms.items():
            terms.given = [found[0][use] for use in uses.several[source]]
        return (
            *[None] * 4,
            *(
                None if use is None else of_layer[use]
                for part, of_layer in zip(segment.parts, found, strict=True)
                for use in part.wanted
            ),
        )


def key_of(arguments: Sequence[Any]) -> Any:
    """``LayerCall.arguments`` but for whether hidden states have a graph."""
    args, kwargs, (hidden, *others), *rest = arguments
    return args, kwargs, hidden[:NUM_OF_FORM], others, rest
