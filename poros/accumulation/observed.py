"""The first micro-batch of its kind runs alone, and is watched: whether others may go together.

What code does is seen as it does it, and no bit is another. What only later ones do, code that
depends on data, is an error then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from poros.accumulation.calls import (
    Calls,
    HiddenStates,
    NotGrouped,
    key_of,
    require_hidden_states,
    watchers,
)
from poros.accumulation.draws import UNPREDICTABLE, Drawn
from poros.accumulation.gradients import Watch, has_hooks, leaves_of
from poros.accumulation.in_place import UNKNOWN, USES, InPlace
from poros.accumulation.modules import Modules
from poros.accumulation.names import Names
from poros.head.loss import LossInputs
from poros.kernels.nodes import weakly
from poros.model.runtime import Runtime
from poros.stream.boundary import StreamedLayer
from poros.stream.condition import Condition
from poros.stream.namespaces import OF_MODULES, bound, contents_of
from poros.stream.rng import Start, is_same_state
from poros.stream.settings import Settings
from poros.stream.stack import LayerStack


class Observer(InPlace):
    """Watches one micro-batch, whose loss ``code`` computes: functions, methods, objects.

    Attributes:
        reason: Why micro-batches like it have to run one after the other; None if they need not.
        may_pass: Whether the next one may be another one.
        names: Of the code, in its parts.
        drawn: What it has drawn, and ``key`` for which shapes; None if no count explains it.
    """

    def __init__(
        self,
        runtime: Runtime,
        modules: Modules,
        stack: LayerStack[StreamedLayer],
        code: Iterable[Any],
    ) -> None:
        super().__init__(runtime, modules, stack)
        self._watch = Watch(self._trained, self._asked, self._goes_back, self._used)
        self.reason: str | None = None
        self.may_pass = False
        self.drawn: Drawn | None = None
        self.key: Any = None
        self._tables = list(map(vars, self._inside))
        self._left = [contents_of(each, without=OF_MODULES) for each in self._tables]
        """What is in the modules of the layers."""
        self._settings = Settings.capture()
        self.names = Names(code, modules.now())
        self._calls = Calls(self._layers, watchers(), looks_at_all=True)
        self._conditions: list[Condition] = []
        self._handed: list[torch.Tensor] = []
        """What the model's code was handed of its layers but the last."""
        self._end_of_layer: Start | None = None
        self._states: list[Start] = []
        """As it begins, at the first layer, behind it, and behind the last."""
        self._last_node: Any = None
        """Of autograd, that has given the result of the last layer."""
        self._is_partial = False
        """Whether the latest backward is to give some gradients alone."""
        self._is_known = False
        """Whether it was seen as it began."""
        self._before_backward: Start | None = None
        self._is_autocast = torch.is_autocast_enabled(self._device.type)
        """Around all."""
        self._num_heads = 0
        self._below = set[int]()
        """Ids of the leaves of what the first layer is given."""
        self._given: Sequence[Any] = ()
        """To the module that holds the layers."""
        self._end: Start | None = None

    @property
    def reads_head(self) -> bool:
        """Whether its loss comes to a head that is not trained, once."""
        return self._num_heads == 1

    def refuse(self, why: str, may_pass: bool = False) -> None:
        """Note why; the first reason stays."""
        if self.reason is None:
            self.reason, self.may_pass = why, may_pass

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body runs the micro-batch to its end."""
        self._states = [Start.capture(self._device)]
        self._begin_part()
        try:
            with self._in_place():
                yield
        finally:
            self._end_part()
            self._calls.latest, self._below, self._given = None, set(), ()
            self._note_uses(False)
            self._handed, self._last_node = [], None
        self._conclude()

    def _begin_part(self) -> None:
        """Code of the loss begins that is not the layers'."""
        self._watch.begin()
        self.names.begin()

    def _end_part(self) -> None:
        self.names.end()
        self._watch.end()

    def begin_pass(self, make_room: Callable[[], None]) -> bool:
        """The model's own code begins; always a pass of its own."""
        make_room()
        return True

    def enter(self, holder: nn.Module, given: Sequence[Any]) -> None:
        """Note what the module that holds the layers is given; its code runs as it is."""
        self._given = given

    def call(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a layer."""
        is_first = not self._calls.num_calls
        if len(self._states) == 1:
            self._end_part()
            self._states.append(Start.capture(self._device))
            self.key = key_of(args, kwargs, self._device)
            if not self._outside.still_holds():
                self.refuse("the model's code changes the model", may_pass=True)
        if self.reason is not None and not self.may_pass:
            self._note_uses(False)
            return layer.forward_now(args, kwargs)
        try:
            given = self._calls.require(layer, args, kwargs)
            condition = layer.condition()
            if condition.has_hooks:
                raise NotGrouped("hooks inside of layers")
            if self._end_of_layer and not self._end_of_layer.equals(Start.capture(self._device)):
                raise NotGrouped("random numbers are drawn between layers")
            self._conditions.append(condition)
        except NotGrouped as reason:
            self.refuse(str(reason))
            return layer.forward_now(args, kwargs)
        if is_first and given.requires_grad:
            self._look_below(given)
        self._note_uses(False)
        found = layer.forward_now(args, kwargs)
        try:
            found = require_hidden_states(found)
            self._calls.require_unedited()
            if (found.shape, found.dtype) != (given.shape, given.dtype):
                raise NotGrouped("hidden states that change their form between layers")
        except NotGrouped as reason:
            self.refuse(str(reason))
            return found
        self._calls.note(found)
        self._end_of_layer = Start.capture(self._device)
        if is_first:
            self._states.append(self._end_of_layer)
        if self._calls.num_calls == len(self._layers):
            self._states.append(self._end_of_layer)
            self._last_node = found.grad_fn
            if found.requires_grad:
                found.register_hook(weakly(self._arrived))
            self._begin_part()
        elif type(found) is torch.Tensor:
            found.__dict__["used"] = weakly(self._note_use)
            self._handed.append(found)
        self._note_uses(True)
        return found

    def _look_below(self, given: torch.Tensor) -> None:
        """At what is trained of that which the first layer is ``given``."""
        below = leaves_of(given)
        self._below = set(map(id, below))
        is_autocast = torch.is_autocast_enabled(self._device.type)
        if given.is_leaf and is_autocast and any(given is each for each in self._given):
            self.refuse("a leaf goes into the layers under autocast, which casts it once")
        known = set(map(id, self._trained))
        for each in below:
            if id(each) not in known and (isinstance(each, nn.Parameter) or has_hooks([each])):
                self.refuse("trained tensors that are not the model's go into its layers")

    def _note_uses(self, is_on: bool) -> None:
        """From now on, uses of what layers have returned are noted, or no more."""
        for each in self._handed:
            each.__class__ = HiddenStates if is_on else torch.Tensor

    def _note_use(self) -> None:
        """The model's code uses what a layer but the last has returned."""
        self.refuse("the model computes with hidden states between its layers")

    def _comes_to_head(self, asked: LossInputs) -> None:
        if self._num_heads == 0 and len(self._states) == 4:
            self.names.begin()
        self._num_heads += 1

    def _asked(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.refuse("gradients are used within a backward")
        elif not self._calls.num_calls:
            self.refuse("gradients are used before the model has run")
        elif self._before_backward is None:
            self.refuse("gradients are used while a loss is computed")

    def _used(self, parameter: nn.Parameter) -> None:
        """Code of the loss computes with a parameter, or asks for its node of autograd."""
        if id(parameter) in self._in_layers:
            self.refuse(USES)

    def _goes_back(self, roots: list[Any], wanted: list[Any]) -> None:
        self._is_partial, self._is_known = bool(wanted), True
        why = self._why_apart(roots, wanted, self._in_layers | self._below, [self._last_node])
        if why is not None:
            self.refuse(why)

    def _arrived(self, gradient: torch.Tensor) -> None:
        """A gradient has come to the last layer."""
        self._watch.end()  # which has adapters run otherwise
        if not self._is_known:
            self.refuse(UNKNOWN)
        if self._before_backward is not None:
            self.refuse("a second backward of one loss")
        if self._is_partial:
            self.refuse("the loss takes gradients of single parameters itself")
        if has_hooks(self._trained):
            self.refuse("hooks on parameters")
        if torch.is_autocast_enabled(self._device.type) != self._is_autocast:
            self.refuse("a backward within an autocast region of the loss")
        self._before_backward = Start.capture(self._device)
        self._note_uses(False)
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._watch.begin()
        self._note_uses(True)
        before = self._before_backward
        if before is not None and not before.equals(Start.capture(self._device)):
            self.refuse("random numbers are drawn in the backwards of layers")

    def _conclude(self) -> None:
        if self._calls.num_calls < len(self._layers):
            self.refuse("the model does not call all of its layers with gradients enabled", True)
            return
        if [each._version for each in self._trained] != self._found.versions:
            self.refuse("the loss edits parameters of the model")
        if not self._is_unedited():
            self.refuse("the loss changes which parameters are trained", may_pass=True)
        if not self._outside.still_holds():
            self.refuse("the model's code changes the model", may_pass=True)
        left = [contents_of(each, without=OF_MODULES) for each in self._tables]
        for _, what in bound(self._left, left):
            self.refuse(f"layers leave {what} in their modules", may_pass=True)
        if self._settings != Settings.capture():
            self.refuse("the loss changes settings of PyTorch", may_pass=True)
        for layer, condition in zip(self._layers, self._conditions, strict=True):
            if not condition.equals(layer.condition()):
                self.refuse("layers that the loss changes while it runs")
        start, before, behind_first, behind = self._states
        end = self._end = Start.capture(self._device)
        if not all(is_same_state(start[index], end[index]) for index in (1, 2)):
            self.refuse("random numbers of Python or NumPy are drawn")
        self.drawn = Drawn.of([each.pytorch for each in (before, behind_first, behind, end)])
        if self.drawn is None:
            self.refuse(UNPREDICTABLE)
        if (name := self.names.torn()) is not None:
            self.refuse(f"the loss changes {name} before its layers or its head for what is behind")

    def look_between(self) -> None:
        """The next micro-batch comes: whether anything was done since that it would not see."""
        if self._end is not None and not self._end.equals(Start.capture(self._device)):
            self.refuse("random numbers are drawn between micro-batches")
        if not self._is_unedited():
            self.refuse("parameters are edited, frozen or thawed between micro-batches")
        if (name := self.names.changed_since()) is not None:
            self.refuse(f"{name} changes between micro-batches")
