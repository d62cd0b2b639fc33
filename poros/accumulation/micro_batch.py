"""One micro-batch whose layers are called one by one, and not by the model that holds them.

The model's own code runs twice. The first time it is stopped at its last layer, having said what
each layer is called with. Then the layers run, whenever their turn is. The second time it passes
the layers by, is handed what the last one has given, and goes on to its loss: so norm, head, loss
and whatever a trainer notes down are the model's and the trainer's own.

Note: What the model's code must be like
    Each layer is called once, in order, with gradients enabled, and is handed the very tensor that
    the layer before it has returned, untouched and unread; the random state, autocast and PyTorch's
    settings are those at the first layer; nothing that layers are given can be changed but by
    editing a tensor; nobody hooks into a layer; layers are the same for all micro-batches and stay
    so (``Condition``); and the second time they are called with what they were called with the
    first time. Anything else is seen, and the micro-batches then run one after the other
    (``NotGrouped``).

Note: Cuts
    The graph is cut before each layer and behind the last. What a layer is given comes out of a
    node that keeps the gradient that arrives there. It is no leaf: autocast would cast a leaf once
    for all its uses, and sum their gradients in the low precision.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from poros.accumulation.answers import Answers, bytes_of
from poros.accumulation.calls import (
    INPUT,
    OTHER_VALUES,
    Call,
    Environment,
    NotedCall,
    NotGrouped,
    Stopped,
    Unread,
    Watcher,
    input_of,
    is_fixed,
    require_unheard,
    tensors_of,
    watching,
)
from poros.accumulation.draws import NONE
from poros.errors import PorosError, UnsupportedModelError
from poros.kernels.nodes import nodes_from
from poros.stream.args import is_shared_mapping, recorded_outputs
from poros.stream.body import LayerBody
from poros.stream.boundary import StreamedLayer
from poros.stream.condition import Condition
from poros.stream.rng import RngStash, Start

Differentiate = Callable[[Any, torch.Tensor, torch.Tensor | None, Iterable[torch.Tensor]], None]
"""Takes the gradients of a part of the graph of one micro-batch: the edge behind it, the gradient
there, a leaf below it, and parameters, of which those that are trained have edges into it."""


def backward(
    edge: Any,
    gradient: torch.Tensor,
    anchor: torch.Tensor | None,
    below: Iterable[torch.Tensor],
) -> None:
    """Take gradients, as a ``Differentiate``."""
    torch.autograd.backward([edge], [gradient])


class Cut:
    """A value that passes from one part of the graph to the next, and its gradient back.

    Args:
        value: Behind the graph that has made it.
        needs_gradient: Whether anything in that graph is trained.

    Attributes:
        gradient: What has arrived in backward; None before.
        anchor: A leaf below the cut, which gets no gradient.
        is_spent: Whether the gradient was handed on.
    """

    def __init__(self, value: torch.Tensor, needs_gradient: bool) -> None:
        self.gradient: torch.Tensor | None = None
        self.anchor: torch.Tensor | None = None
        self.needs_gradient = needs_gradient
        self.is_spent = False
        self._values = [value]

    def look(self) -> torch.Tensor:
        """The value, which stays; nothing comes back from it."""
        return self._values[-1].detach().requires_grad_(self.needs_gradient)

    def take(self, trained: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The value, behind the cut; for once, since it may be freed from then on.

        Args:
            trained: Parameters before the cut: whoever asks for their gradients alone is refused.
        """
        value = self._values.pop()
        if not self.needs_gradient:
            return value
        self.anchor = torch.empty(0, device=value.device, requires_grad=True)
        taken: torch.Tensor = _Taken.apply(self.anchor, [value], self, *trained)
        return taken


class _Taken(torch.autograd.Function):
    """The value of a ``Cut``; its gradient goes there and no further."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, values: list[torch.Tensor], cut: Cut, *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.has_trained = cut, bool(trained)
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, ...]:
        node = get_gradient_edge(ctx.cut.anchor).node
        if ctx.has_trained and not torch._C._will_engine_execute_node(node):
            raise NotGrouped("the loss takes gradients of single parameters itself")
        if ctx.cut.gradient is not None or ctx.cut.is_spent:
            raise UnsupportedModelError(
                "expected one backward for each micro-batch, found a second one through the last "
                "layer's result. Call backward for each micro-batch, without poros.accumulate or "
                "block-major trainers"
            )
        ctx.cut.gradient = gradient
        return (None,) * len(ctx.needs_input_grad)


class MicroBatch:
    """One micro-batch on its way through the layers.

    Args:
        layers: Of the model, in order.
        around: What is around all micro-batches.
        conditions: Of the layers, as the first micro-batch of a group has found them.

    Attributes:
        start: The random states at which the model's code begins.
        differs: Whether layers were called with other values the second time: bools on the device.
        states: Random states before each layer, and behind the last; planned from the second on.
        first_draws: Of the first layer.
        key: Equal for micro-batches whose layers draw alike.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        around: Environment,
        conditions: list[Condition],
    ) -> None:
        self._trained: Sequence[torch.Tensor] = ()
        self._around = self._environment = around
        self._conditions = conditions
        self.start = Start.capture(layers[0].device)
        self.differs: list[torch.Tensor] = []
        self._answers = Answers()
        self._noted: list[NotedCall] = []
        """The calls of layers, in order."""
        self._again: list[NotedCall] = []
        """Those of the second time."""
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        """Distinct tensors that layers are called with, and their versions."""
        self.states: list[RngStash] = []
        self.first_draws = NONE
        self.key: Any = None
        self._layers = layers
        self._device = layers[0].device
        self._calls: list[Call] = []
        """Those that are still to be made."""
        self._given: torch.Tensor | None = None
        self._version = 0
        self._cuts: list[Cut] = []
        self._edges: list[Any] = []
        self._source: torch.Tensor | None = None
        self.has_arrived_below = False
        """Whether the loss has sent a gradient past all layers, to what the first one is given."""
        self._entering: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def is_watched(self) -> bool:
        """Whether code of a loss is running for it."""
        in_place = self._layers[0].context.in_place
        watcher = None if in_place is None else in_place()
        return watcher is not None and getattr(watcher, "micro_batch", None) is self

    # ------------------------------------------------------------- the model's code, first time

    def collect(self, run: Callable[[], Any]) -> None:
        """Run the model's code up to its last layer; random states are those of the first then.

        Raises:
            NotGrouped: If it is not what it must be like.
        """
        with self._watched(self._note, answers=False, begins=True) as watcher:
            try:
                run()
            except Stopped:
                self.states[0].restore()
                return
            except (PorosError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # Layers of some families return more than hidden states. Or it is the user's own
                # error, and comes again in its turn.
                raise NotGrouped(
                    f"the code of a loss ends with a {type(error).__name__} before its last layer"
                ) from error
            if watcher.reason is not None:
                raise watcher.reason
        raise NotGrouped("the model does not call all of its layers with gradients enabled")

    @contextmanager
    def _watched(
        self, take: Callable[..., Any], *, answers: bool, begins: bool = False
    ) -> Iterator[Watcher]:
        """Have ``take`` called in place of layers in the body; see ``Watcher`` and ``Answers``."""
        self._answers.prepare(answers)
        watcher = Watcher(self, take, begins=begins, enter_model=self._answers.begin)
        with watching(self._layers, watcher):
            try:
                yield watcher
            finally:
                self._answers.end()

    def _note(
        self, index: int, layer: LayerBody, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of the model's code; gives the input on, as if the layer had done nothing."""
        given = input_of(args, kwargs)
        if layer is not self._layers[index] or given is None:
            raise NotGrouped("the model does not call its layers once each, in order")
        if index == 0:
            self._answers.end()
            self._begin(given, args, kwargs)
        elif given is not self._given or given._version != self._version:
            raise NotGrouped("the model does something to hidden states between its layers")
        self._require_alike(index, layer)
        is_last = index == len(self._layers) - 1
        self._require_same_around(may_have_drawn=is_last)
        noted = NotedCall.of(args, kwargs, given, self._noted[-1] if self._noted else None)
        if any(each is not given and each.requires_grad for each in noted.tensors):
            raise NotGrouped("layers are given other tensors that need gradients")
        if not self._noted or noted is not self._noted[-1]:
            if any(map(is_shared_mapping, kwargs.values())):
                raise NotGrouped("layers share tensors")
            if not is_fixed((*noted.call.args, *noted.call.kwargs.values())):
                raise NotGrouped("layers are given objects that may change")
            for each in noted.tensors:
                self._seen.setdefault(id(each), (each, each._version))
        self._noted.append(noted)
        self._calls.append(noted.call)
        if is_last:
            self._given = None
            raise Stopped
        if index == 0:
            # In place of what layers return, which is not known yet.
            self._given = Unread.of(given, self)
            self._version = self._given._version
        return self._given

    def _require_alike(self, index: int, layer: LayerBody) -> None:
        """Each layer is to compute the same for all micro-batches, whenever it is called."""
        require_unheard(layer)
        if index == len(self._conditions):
            self._conditions.append(layer.condition().note())
            if self._conditions[-1].has_hooks:
                raise NotGrouped("hooks inside of layers")
        elif not self._conditions[index].equals(layer.condition()):
            raise NotGrouped("layers that change from one micro-batch to the next")

    def _begin(self, given: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorded_outputs():
            raise NotGrouped("outputs of layers are recorded")
        self.states = [RngStash.capture(self._device)]
        self._given, self._version = given, given._version
        self._environment = environment = Environment.capture(self._device)
        if environment.watchers != self._around.watchers:
            raise NotGrouped("somebody watches operators or packs saved tensors within the loss")
        self._entering = environment.entering(self._around)
        self.key = (
            tuple((each.shape, each.dtype) for each in tensors_of((*args, *kwargs.values()))),
            environment.surroundings.autocast,
        )
        # What is known of the input behind the model's code is its value and whether it needs a
        # gradient; the code itself, and a trained embedding, come again.
        self._cuts = [Cut(given.detach(), given.requires_grad)]

    # ------------------------------------------------------------------------------ the layers

    def forward(self, index: int) -> None:
        """Run layer ``index`` from the random state that is planned for it."""
        layer, (args, kwargs) = self._layers[index], self._calls[index]
        self.states[index].restore()
        if any(each._version != version for each, version in self._seen.values()):
            raise NotGrouped("what layers are called with changes before they run")
        # Around all, a region goes on, and keeps what it has cast.
        is_confined = not self._around.surroundings.is_autocast
        with self._entering(), torch.enable_grad(), layer.context.confined(is_confined):
            given = self._cuts[index].take()
            result = layer.forward(
                tuple(given if value is INPUT else value for value in args),
                {key: given if value is INPUT else value for key, value in kwargs.items()},
            )
        self._calls[index] = Call((), {})
        if not isinstance(result, torch.Tensor):
            raise NotGrouped("layers return more than hidden states")
        # Not the result itself: it may wait for its backward on the host.
        edge = get_gradient_edge(result) if result.requires_grad else None
        self._edges.append(edge)
        self._cuts.append(Cut(result.detach(), result.requires_grad))

    def backward(self, index: int, differentiate: Differentiate) -> None:
        """Take the gradients of layer ``index``, whose output's gradient has arrived."""
        edge, self._edges[index] = self._edges[index], None
        cut = self._cuts[index + 1]
        gradient, cut.gradient, cut.is_spent = cut.gradient, None, True
        if edge is not None and gradient is not None:
            # Not through its contents, which would end the row that its visits are in.
            module = self._layers[index].module()
            below = module.parameters() if module else ()
            differentiate(edge, gradient, self._cuts[index].anchor, below)

    @property
    def is_awaited(self) -> bool:
        """Whether anything in the layers is trained."""
        return self._cuts[-1].needs_gradient

    @property
    def has_arrived(self) -> bool:
        """Whether the backward of its loss has come to the last layer."""
        return self._cuts[-1].gradient is not None

    def _note_arrival(self, gradient: torch.Tensor) -> None:
        self.has_arrived_below = True

    def leaves_below(self) -> list[torch.Tensor]:
        """The parameters behind what the first layer is given."""
        nodes = nodes_from([self._source.grad_fn if self._source is not None else None])
        return [node.variable for node in nodes if hasattr(node, "variable")]

    def _compare(self, is_known: bool) -> None:
        """Have what layers are called with the second time compared with the first time.

        Args:
            is_known: Whether the loss is known to call the model alike: then the host does not wait
                for the device, and ``differs`` says it later.

        Raises:
            UnsupportedModelError: If they differ and that can be said now. What else the code has
                done cannot be taken back, so they cannot run one after the other either.
        """
        calls = {
            (id(old), id(new)): (old.tensors, new.tensors)
            for old, new in zip(self._noted, self._again, strict=False)
        }
        pairs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for before, given in calls.values():
            if list(map(_form, before)) != list(map(_form, given)):
                raise UnsupportedModelError(OTHER_VALUES)
            pairs |= {
                (id(old), id(new)): (old, new) for old, new in zip(before, given, strict=True)
            }
        found = [
            *self._answers.differs,
            *(
                (bytes_of(old) != bytes_of(new)).any()
                for old, new in pairs.values()
                if old is not new
            ),
        ]
        if (not is_known or self._device.type == "cpu") and any(map(bool, found)):
            raise UnsupportedModelError(OTHER_VALUES)
        self.differs += found

    def backward_below(self, differentiate: Differentiate) -> None:
        """Take the gradients of what the model's code computes before its layers."""
        below, gradient = self.leaves_below(), self._cuts[0].gradient
        source, self._source = self._source, None
        if source is not None and gradient is not None:
            differentiate(source, gradient, None, below)

    # ------------------------------------------------------------ the model's code, again

    def look_ahead(self, run: Callable[[], Any]) -> bool:
        """Run the model's code behind its layers up to where it is stopped; whether it was."""
        self.start.restore()
        self._again = []
        with self._watched(partial(self._pass_by, is_ahead=True), answers=True):
            try:
                run()
            except Stopped:
                return True
        return False

    @contextmanager
    def tail(self, is_known: bool, trained: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run the model's code again in the body: it passes the layers by.

        Args:
            is_known: See ``_compare``.
            trained: See ``Cut.take``.
        """
        self._trained, self._again = trained, []
        take = partial(self._pass_by, is_known=is_known)
        with self._watched(take, answers=is_known) as watcher:
            yield
        self._noted, self._again, self._seen = [], [], {}
        self._answers.forget()
        if watcher.reason is not None:
            raise watcher.reason
        if watcher.num_calls != len(self._layers):
            raise UnsupportedModelError(
                f"expected a loss that calls the model as it did before, found {watcher.num_calls} "
                f"of its {len(self._layers)} layers called. Call backward for each micro-batch, "
                "without poros.accumulate or block-major trainers"
            )

    def _require_same_around(self, *, may_have_drawn: bool) -> None:
        """Raise ``NotGrouped`` unless a layer is called in what was around the first one.

        Generators go on only: it is enough to look at them once, at the last layer.
        """
        if may_have_drawn and not RngStash.capture(self._device).equals(self.states[0]):
            raise NotGrouped("the model draws random numbers between its layers")
        if Environment.capture(self._device) != self._environment:
            raise NotGrouped("the model changes autocast or settings between its layers")

    def _pass_by(
        self,
        place: int,
        layer: LayerBody,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_ahead: bool = False,
        is_known: bool = True,
    ) -> Any:
        """A call of the model's code again; gives what the last layer has given, at the last.

        ``is_ahead``: not for good, so without a graph. ``is_known``: see ``_compare``.
        """
        if place < len(self._layers):
            self._layers[place].drop_caches(args, kwargs)
        given = input_of(args, kwargs)
        again = NotedCall.of(args, kwargs, given, self._again[-1] if self._again else None)
        if place < len(self._noted):
            is_repeated = (
                place > 0
                and again is self._again[-1]
                and self._noted[place] is self._noted[place - 1]
            )
            if not is_repeated and not again.plain.is_like(self._noted[place].plain):
                raise UnsupportedModelError(OTHER_VALUES)
        self._again.append(again)
        if place == len(self._layers) - 1:
            self._compare(is_known)
        if place >= len(self._layers) or layer is not self._layers[place] or given is None:
            raise NotGrouped("the model runs more than once with gradients for one loss")
        if place == 0:
            self._answers.end()
            if Environment.capture(self._device) != self._environment:
                raise NotGrouped("autocast or settings are others when the model runs again")
            if not RngStash.capture(self._device).equals(self.states[0]):
                raise NotGrouped("the model draws other random numbers when it runs again")
            if given.requires_grad and not is_ahead:
                self._source = given
                given.register_hook(self._note_arrival)
            return Unread.of(given, self) if len(self._layers) > 1 else self._last(is_ahead)
        if place < len(self._layers) - 1:
            return given
        return self._last(is_ahead)

    def _last(self, is_ahead: bool) -> torch.Tensor:
        self.states[-1].restore()
        return self._cuts[-1].look() if is_ahead else self._cuts[-1].take(self._trained)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
