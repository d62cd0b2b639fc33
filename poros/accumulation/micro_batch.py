"""One micro-batch, whose code parks as it calls the last layer, until all layers have run.

The code of its loss runs once, in the order in which its author wrote it, with the values and in
the surroundings of a plain run. Its calls of layers are noted: of all but the last it is handed
tensors without values, which it can only pass on. So the layers run one after the other for all
micro-batches, with nobody's code between them.

Note: Cuts
    The graph is cut before the first layer, behind each layer and so before each of the others.
    What is handed on comes out of a node that keeps the gradient that arrives there. It is no leaf:
    autocast would cast a leaf once for all its uses, and sum their gradients in the low precision.
    A layer whose visits are replayed has no graph at all: see ``poros.replay.remat.ReplayedVisit``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from poros.accumulation.calls import (
    ADVICE,
    Calls,
    HiddenStates,
    NotGrouped,
    Watchers,
    WithoutValues,
    key_of,
    require_hidden_states,
)
from poros.accumulation.gradients import add_by_hand, leaves_of
from poros.accumulation.parked import ParkedCode
from poros.errors import RematerializationError, UnsupportedModelError
from poros.kernels.nodes import weakly
from poros.replay.call import LayerCall
from poros.replay.remat import Behind, ReplayedVisit, Together
from poros.replay.routing import GradientSums
from poros.stream.boundary import StreamedLayer
from poros.stream.rng import RngStash, Start, is_same_state


class Cut:
    """A value that passes from one part of the graph to the next, and its gradient back.

    Attributes:
        visit: That has made it without a graph, if one has, until its gradients were taken.
        edge: Of the graph that has made it; None if nothing in that is trained.
        gradient: What has arrived in backward; None before.
        anchor: A leaf below the cut, which gets no gradient.
        is_open: Whether a gradient may arrive now.
        arrives: Called as one arrives; may raise.
    """

    def __init__(self, value: torch.Tensor, visit: ReplayedVisit | None = None) -> None:
        # Not the value itself: it may wait for its backward on the host.
        self.edge = get_gradient_edge(value) if value.requires_grad else None
        self.visit = visit
        self.gradient: torch.Tensor | None = None
        self.anchor: torch.Tensor | None = None
        self.is_open = False
        self.arrives: Callable[[], None] | None = None
        self._values = [value.detach()]

    def take(self) -> torch.Tensor:
        """The value, behind the cut; for once, since it may be freed from then on."""
        value = self._values.pop()
        if not self.is_awaited:
            return value
        self.anchor = torch.empty(0, device=value.device, requires_grad=True)
        taken: torch.Tensor = _Taken.apply(self.anchor, [value], self)
        return taken

    @property
    def value(self) -> torch.Tensor:
        """The value, which has not been taken, without a graph."""
        return self._values[0]

    def release(self) -> None:
        """The value is not needed any more."""
        self._values.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether anything before the cut is trained."""
        return self.edge is not None or self.visit is not None

    def hand_on(
        self,
        by_hand: bool,
        below: Iterable[torch.Tensor],
        before: "Cut | None" = None,
        sums: GradientSums | None = None,
    ) -> None:
        """Take the gradients of what is before this cut, up to the one ``before``.

        ``by_hand``: whether no node of autograd is to accumulate those of parameters, ``below``.
        """
        edge, visit, gradient = self.edge, self.visit, self.gradient
        self.edge = self.visit = self.gradient = None
        if gradient is None:
            return
        if visit is not None and before is not None:
            before.gradient = visit.backward(gradient, sums or GradientSums())
            return
        if before is not None:
            before.is_open = True
        if edge is not None and by_hand:
            add_by_hand(edge, gradient, None if before is None else before.anchor, below)
        elif edge is not None:
            torch.autograd.backward([edge], [gradient])
        if before is not None:
            before.is_open = False


class _Taken(torch.autograd.Function):
    """The value of a ``Cut``; its gradient goes there and no further."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, values: list[torch.Tensor], cut: Cut
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, ...]:
        if not ctx.cut.is_open or ctx.cut.gradient is not None or not ctx.cut.is_awaited:
            raise UnsupportedModelError(
                "expected one backward for each micro-batch, which goes through the last layer's "
                "result, found another one, or one through the result of a layer before, or of "
                f"another micro-batch. {ADVICE}"
            )
        if ctx.cut.arrives is not None:
            ctx.cut.arrives()
        ctx.cut.gradient = gradient
        return (None,) * len(ctx.needs_input_grad)


class MicroBatch:
    """One micro-batch on its way through the layers.

    ``run`` calls the model once with gradients, and takes the loss's gradients; it runs once.
    ``enter`` is called as it calls the first layer, and may raise ``NotGrouped``.

    Attributes:
        start: The random states at which its code begins.
        state: Those at which it goes on.
        code: The code.
        reason: Why it has to run alone, found out before its first layer.
        error: What is wrong with it, found out later; code of users may have caught it.
        failure: What a layer has raised; its code gets that as it goes on.
        key: Equal for micro-batches whose layers draw alike.
        planned: The random state that it is planned to have behind its layers, if it is.
        bounds: The random states before its first layer, behind it, and behind the last.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        around: Watchers,
        run: Callable[[], Any],
        enter: Callable[[], None],
    ) -> None:
        self.start = Start.capture(layers[0].device)
        self.code = ParkedCode(run, layers[0].device)
        self.reason: str | None = None
        self.error: UnsupportedModelError | None = None
        self.failure: Exception | None = None
        self.key: Any = None
        self.planned: RngStash | None = None
        self.bounds: list[RngStash] = []
        self._enter = enter
        self._layers = layers
        self._device = layers[0].device
        self._calls = Calls(layers, around)
        self.state = self.start
        self._called_at = self.start
        """As it calls its first layer."""
        self._cuts: list[Cut] = []
        self._noted: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of the layers, as far as these have not run, and their kinds."""
        self._replayed: dict[int, LayerCall] = {}
        """A call that was replayed, of each kind."""
        self._form = torch.Size(), torch.float32
        """Of its hidden states."""
        self._source: torch.Tensor | None = None

    # ------------------------------------------------------------------------------- its code

    @property
    def num_called(self) -> int:
        """Layers that its code has called."""
        return self._calls.num_calls

    def resume(self) -> None:
        """Go on up to the call of the last layer, then to the head; alone, to the end."""
        self.state.restore()
        try:
            self.code.resume()
        finally:
            self.state = Start.capture(self._device)

    def run_layer(
        self,
        index: int,
        together: Together,
        before: ReplayedVisit | None,
        behind: Sequence["MicroBatch"],
    ) -> ReplayedVisit | None:
        """Run a layer that its code has called, in the state that this has left; cut behind it.

        Gives back its visit, if it is no node of a graph; ``before`` is such a one of another
        micro-batch, right before. Those ``behind`` are replayed with it, if they can be. If it
        raises: ``failure``.
        """
        layer, (kind, args, kwargs) = self._layers[index], self._noted.pop(0)
        known, captures = self._replayed.get(kind), layer.context.captures
        cut = self._cuts[index]
        try:
            if before is not None and known is not None and captures is not None and cut.is_awaited:
                again = captures.rows.one(before, known, cut.value, self.state.pytorch)
                if again is not None:
                    return self._note_replayed(index, *again)
            given = cut.take()
            args = tuple(given if isinstance(each, HiddenStates) else each for each in args)
            kwargs = {
                key: given if isinstance(each, HiddenStates) else each
                for key, each in kwargs.items()
            }
            self.state.pytorch.restore()
            theirs = list(filter(None, (each._comes_next(index) for each in behind)))
            together.behind = theirs if len(theirs) == len(behind) else ()
            run = partial(layer.forward_now, args, kwargs)
            result = require_hidden_states(self.code.run_in_context(run))
            if (result.shape, result.dtype) != self._form:
                raise NotGrouped("hidden states that change their form between layers")
        except NotGrouped as reason:
            raise self.refuse(str(reason)) from reason
        except Exception as error:
            self.failure = error
            self._note_drawn()
            return None
        made, together.made, together.behind = together.made, [], ()
        visit = made[0][1] if made else None
        if visit is not None:
            self._replayed[kind] = visit.call
        self._note_run(index, result, visit)
        for each, (of_it, its_visit) in zip(behind, made[1:], strict=False):
            each._noted.pop(0)
            each._note_replayed(index, of_it, its_visit)
        return visit

    def has_run(self, index: int) -> bool:
        """Whether that layer has run, or was replayed."""
        return len(self._cuts) > index + 1

    def _comes_next(self, index: int) -> Behind | None:
        """Its next call, of that layer, if it can be replayed behind that of another one."""
        known, cut = self._replayed.get(self._noted[0][0]), self._cuts[index]
        if known is None or not cut.is_awaited:
            return None
        return Behind(known, cut.value, self.state.pytorch)

    def require_unedited(self) -> None:
        """Raise if what its layers are given was edited since it was noted."""
        try:
            self._calls.require_unedited()
        except NotGrouped as reason:
            raise self.refuse(str(reason)) from reason

    def _note_run(
        self, index: int, result: torch.Tensor, visit: ReplayedVisit | None, has_drawn: bool = True
    ) -> None:
        """A layer has run: cut behind it."""
        self._cuts.append(Cut(result, visit))
        if has_drawn:
            self._note_drawn()
        number = (index == 0) + (index == len(self._layers) - 1)
        self.bounds += [self.state.pytorch] * number

    def _note_replayed(
        self, index: int, result: torch.Tensor, visit: ReplayedVisit
    ) -> ReplayedVisit:
        """A layer was replayed, behind that of another one."""
        self._cuts[index].release()
        self._note_run(index, result, visit, visit.call.has_drawn)
        return visit

    def _note_drawn(self) -> None:
        """A layer has drawn: its code goes on from there."""
        self.state = self.state._replace(pytorch=RngStash.capture(self._device))

    def _hand_on(self) -> torch.Tensor:
        """What its code is handed for the result of a layer that is to run: it has no values."""
        shape, dtype = self._form
        return WithoutValues.like(shape, dtype, self._device, weakly(self._refuse_use))

    def _refuse_use(self) -> None:
        raise self.refuse("the model computes with hidden states between its layers")

    def finish(self) -> None:
        """Go on to the end."""
        self.require_unedited()
        self.state.restore()
        self._cuts[-1].is_open = True
        self.code.resume()
        self._cuts[-1].is_open = False

    def wait(self, why: str) -> None:
        """It has to run alone: called by its code before its first layer, for its turn to come."""
        self.reason = why
        self.code.park()

    def call(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a layer by its code."""
        is_first = not self._calls.num_calls
        is_last = layer is self._layers[-1]
        try:
            given = self._calls.require(layer, args, kwargs)
            if is_first:
                self._enter()
            elif is_last and not self._called_at.equals(Start.capture(self._device)):
                raise NotGrouped("random numbers are drawn between layers")
        except NotGrouped as reason:
            if not is_first:
                raise self.refuse(str(reason)) from reason
            self.wait(str(reason))
            return layer.forward_now(args, kwargs)
        if is_first:
            args, kwargs = self._begin(given, args, kwargs)
        self._noted.append((self._calls.kind, args, kwargs))
        handed = None if is_last else self._hand_on()
        self._calls.note(handed)
        if not is_last:
            return handed
        self.code.park()
        if self.failure is not None:
            raise self.failure
        return self._cuts[-1].take()

    def _begin(
        self, given: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first layer is called: cut the graph before it; its arguments but for the value."""
        self.key, self._form = key_of(args, kwargs, self._device), (given.shape, given.dtype)
        self._called_at = Start.capture(self._device)
        self.bounds = [self._called_at.pytorch]
        cut = Cut(given)
        self._cuts = [cut]
        cut.is_open = True
        if given.requires_grad:
            self._source = given
        taken = self._hand_on()
        return (
            tuple(taken if value is given else value for value in args),
            {key: taken if value is given else value for key, value in kwargs.items()},
        )

    def refuse(self, why: str) -> UnsupportedModelError:
        """What is to be raised, found out on its way: it cannot run alone any more."""
        self.error = UnsupportedModelError(
            "expected a loss that calls the model as the first one of its kind did, found that "
            f"micro-batches cannot go through the layers together ({why}), when they were on "
            f"their way. {ADVICE}"
        )
        return self.error

    # ------------------------------------------------------------------------- random numbers

    def begin_at(self, now: Start) -> None:
        """It should have begun at ``now``, wherever it did begin: raises if it has drawn others."""
        parts = []
        for began, held, wanted in zip(self.start, self.state, now, strict=True):
            if not is_same_state(began, wanted) and not is_same_state(began, held):
                raise RematerializationError(
                    "expected random numbers as micro-batches one after the other draw them, found "
                    "that the one before, or what ran since then, has drawn others than those "
                    "before had: the layers of this one have run with wrong ones. Gradients of "
                    f"the ones before are right, this one has none yet. {ADVICE}"
                )
            parts.append(held if is_same_state(began, wanted) else wanted)
        self.start, self.state = now, Start(*parts)

    # ------------------------------------------------------------------------------- backward

    @property
    def is_awaited(self) -> bool:
        """Whether anything in the layers is trained."""
        return self._cuts[-1].is_awaited

    @property
    def has_arrived(self) -> bool:
        """Whether the backward of its loss has come to the last layer."""
        return self._cuts[-1].gradient is not None

    def before_arrival(self, call: Callable[[], None]) -> None:
        """Have ``call`` called as the backward of its loss comes to the last layer."""
        self._cuts[-1].arrives = weakly(call)

    def leaves_below(self) -> list[torch.Tensor]:
        """The leaves of what the first layer is given."""
        return leaves_of(self._source)

    def backward(self, index: int, by_hand: bool, sums: GradientSums) -> None:
        """Take the gradients of layer ``index``, whose output's gradient has arrived."""
        # Not through its contents, which would end the row that its visits are in.
        module = self._layers[index].module()
        below, before = module.parameters() if module else (), self._cuts[index]
        self._cuts[index + 1].hand_on(by_hand, below, before, sums)

    @staticmethod
    def backward_together(batches: Sequence["MicroBatch"], index: int, sums: GradientSums) -> bool:
        """``backward`` for all of them in one go; whether that could be done."""
        cuts = [each._cuts[index + 1] for each in batches]
        visits = [each.visit for each in cuts if each.visit is not None]
        gradients = [each.gradient for each in cuts if each.gradient is not None]
        if not len(cuts) == len(visits) == len(gradients) > 1:
            return False
        captures = visits[0].call.layer.context.captures
        found = None if captures is None else captures.rows.backward(visits, gradients, sums)
        if found is None:
            return False
        for batch, cut, gradient in zip(batches, cuts, found, strict=True):
            cut.visit = cut.gradient = None
            batch._cuts[index].gradient = gradient
        return True

    def backward_below(self, by_hand: bool) -> None:
        """Take the gradients of what the model's code computes before its layers."""
        below, self._source = self.leaves_below(), None
        self._cuts[0].hand_on(by_hand, below)
