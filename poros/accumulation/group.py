"""Micro-batches that go through the layers together: a block is loaded once for all of them.

For each layer, from the first to the last, the forwards of all micro-batches; then each
micro-batch's norm, head and loss, and their backward; then for each layer, from the last to the
first, the backwards of all micro-batches. A gradient is summed over micro-batches in the order in
which a run of one after the other sums it, by the same node of autograd, so the bits are the same,
and hooks on parameters see the same gradients.

Note: The random plan
    One after the other, micro-batch g + 1 starts from the random state that g has left. Here it
    starts before g has ended, so that state is computed: what a layer draws depends on its kind and
    on shapes, so it is measured at the first layer, and at one of each other kind as soon as that
    is found to differ. Every state is compared with the planned one as soon as it is known. At that
    time nothing has happened to any gradient: the forwards are done again with what was found.
    What draws more or less each time runs one after the other.

Source:
    Block-major order: Rajbhandari et al. 2021 (ZeRO-Infinity) and Ren et al. 2021 (ZeRO-Offload)
    amortize a transfer over a larger batch; that it can be exact with dropout follows from
    generators that count what they have given (Salmon et al. 2011, Philox).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from poros.accumulation.calls import OTHER_VALUES, Environment, NotGrouped
from poros.accumulation.distributed import Ranks
from poros.accumulation.draws import DrawTable, between, later
from poros.accumulation.gradients import Gradients, Watch
from poros.accumulation.head import SharedHead
from poros.accumulation.micro_batch import MicroBatch
from poros.accumulation.unchanged import Around, Modules
from poros.errors import RematerializationError, UnsupportedModelError
from poros.stream.boundary import StreamedLayer
from poros.stream.condition import Condition
from poros.stream.rng import RngStash, Start
from poros.stream.settings import Settings


class _Mispredicted(Exception):
    """A layer has left another random state than was planned."""


class Group:
    """Micro-batches that go through the layers together.

    Args:
        modules: Of the model.
        layers: Of the model, in order.
        table: Of the model, too.
        ranks: It is trained on.
        code: Of the user, that runs for each micro-batch; see ``of_code``.
        head: Reads the head for all of them, if it is read in slices.
        is_known: Whether the loss was seen to call the model alike each time.
        make_room: Called when the room of the first micro-batch is known, before its layers run.

    Attributes:
        num_done: Micro-batches whose loss has gone backward to the last layer.
        is_over: Whether the others of the group have to begin anew.
    """

    def __init__(
        self,
        modules: Modules,
        layers: Sequence[StreamedLayer],
        table: DrawTable,
        ranks: Ranks,
        code: Sequence[Any] = (),
        head: SharedHead | None = None,
        is_known: bool = False,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_room = make_room
        inside = [module for layer in layers for module in layer.contents().modules()]
        self._modules = modules
        self._around = Around(modules.now(), inside, code)
        self._trained = modules.trained()
        self._mark = modules.mark(self._trained)
        self._watch = Watch(self._trained, self._asked_for_gradients, sees_grad=ranks.is_ddp)
        self._refused: NotGrouped | None = None
        """Kept, because code of users may catch it."""
        self._tail: MicroBatch | None = None
        """The one whose loss is being computed for good, up to its backward."""
        self._before = Gradients(())
        """As that began."""
        self._ranks = ranks
        self._has_last = False
        self._num_back = 0
        self._in_layers = {number for layer in layers for number in layer.contents().adapters().ids}
        self._is_known = is_known
        self._head = head
        self.num_done = 0
        self.is_over = False
        self._is_ahead = True
        self._layers = layers
        self._table = table
        self._kinds = [_kind(layer) for layer in layers]
        self._batches: list[MicroBatch] = []
        self._end = Start.capture(layers[0].device)
        """The random states behind all of them."""

    def forward(self, runs: Sequence[Callable[[], Any]]) -> None:
        """Take micro-batches through all layers.

        Args:
            runs: Each calls the model once with gradients and computes a loss. Called up to the
                model's last layer, and once more in ``tail``.

        Exactness:
            No gradient is touched. Random states are those before it.

        Raises:
            NotGrouped: If they have to run one after the other; nothing has happened.
        """
        if not torch.is_grad_enabled():
            raise NotGrouped("gradients are disabled around all micro-batches")
        if any(each._backward_hooks or _after(each) for each in self._trained):
            raise NotGrouped("hooks on parameters")
        start, settings = Start.capture(self._layers[0].device), Settings.capture()
        try:
            # One for each kind of layer and each shape that may turn out to differ.
            num_tries = 2 + len(runs) * (len(set(self._kinds)) - 1)
            for _ in range(num_tries):
                try:
                    self._forward(runs)
                    break
                except _Mispredicted:
                    start.restore()
                    self._around.put_back()
            else:
                raise NotGrouped("what is drawn at random does not depend on shapes alone")
            self._around.put_back()
            if self._head is not None and self._head.is_ahead:
                pairs = zip(self._batches, runs, strict=True)
                with self._ahead():
                    self._head.look_ahead([partial(batch.look_ahead, run) for batch, run in pairs])
            self._around.put_back()
        except BaseException:
            self._modules.train_again(self._trained)
            self._around.put_back()
            self._require_unedited()
            raise
        finally:
            start.restore()
            settings.restore()
        self._is_ahead = False
        self._watch.begin()

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Code of the user runs in the body before its turn has come."""
        self._watch.begin()
        try:
            with self._around.noting():
                yield
        finally:
            self._watch.end()
        if self._refused is not None:
            raise self._refused

    def _asked_for_gradients(self) -> None:
        """Code of the user reads or writes gradients: it gets those of one after the other."""
        if self._is_ahead:
            reason = "gradients are used before the model has run"
        elif torch._C._current_graph_task_id() != -1:
            reason = "gradients are used within a backward"
        else:
            if self._tail is not None and self._tail.has_arrived:
                self._count(self._tail)
            context = self._layers[0].context
            in_place, context.in_place = context.in_place, None
            self._watch.end()
            try:
                self._backward()
            finally:
                self._watch.begin()
                context.in_place = in_place
            if self._tail is None:
                return
            self._before = Gradients(self._trained)
            reason = "gradients are used while a loss is computed"
        self._refused = NotGrouped(reason)
        raise self._refused

    def _forward(self, runs: Sequence[Callable[[], Any]]) -> None:
        self._batches = []
        conditions: list[Condition] = []
        around = Environment.capture(self._layers[0].device)
        for run in runs:
            batch = MicroBatch(self._layers, around, conditions)
            with self._ahead():
                batch.collect(run)
            if not self._batches:
                self._make_room()
            self._require_unedited()
            if self._modules.train_again(self._trained):
                raise NotGrouped("the loss changes which parameters are trained")
            if not self._around.is_same():
                raise NotGrouped("the model's code changes the model")
            if Environment.capture(self._layers[0].device) != around:
                raise NotGrouped("the loss changes settings of PyTorch")
            self._table.require_predictable(batch.key)
            self._run_first(batch, conditions[0])
            self._batches.append(batch)
            later(batch.states[-1], self._table.of_tail(batch.key, batch.first_draws)).restore()
        self._end = Start.capture(self._layers[0].device)
        for index in range(1, len(self._layers)):
            with self._layers[index].in_a_row():
                self._require_condition(index, conditions[index])
                for batch in self._batches:
                    batch.forward(index)
                    self._check(index, batch)

    def _require_unedited(self) -> None:
        """Raise if the code of a loss edits what the model is made of: it cannot be taken back."""
        if self._modules.mark(self._trained) != self._mark:
            raise UnsupportedModelError(
                "expected a loss that leaves the parameters of the model alone, found one that "
                "edits them in place. Edit them between steps, or call backward for each "
                "micro-batch, without poros.accumulate or block-major trainers"
            )

    def _require_condition(self, index: int, condition: Condition) -> None:
        if not condition.equals(self._layers[index].condition()):
            raise NotGrouped("layers that the loss changes while it runs")

    def _run_first(self, batch: MicroBatch, condition: Condition) -> None:
        """Run the first layer, and plan the states of the others."""
        with self._layers[0].in_a_row():
            self._require_condition(0, condition)
            batch.forward(0)
        state = RngStash.capture(self._layers[0].device)
        draws = between(batch.states[0], state)
        if draws is None:
            self._table.note_layer(self._kinds[0], batch.key, None)
            raise _Mispredicted
        batch.first_draws = draws
        batch.states.append(state)
        for kind in self._kinds[1:]:
            known = draws if kind == self._kinds[0] else self._table.of_layer(kind, batch.key)
            state = later(state, draws if known is None else known)
            batch.states.append(state)

    def _check(self, index: int, batch: MicroBatch) -> None:
        state = RngStash.capture(self._layers[0].device)
        if not state.equals(batch.states[index + 1]):
            draws = between(batch.states[index], state)
            self._table.note_layer(self._kinds[index], batch.key, draws)
            raise _Mispredicted

    @contextmanager
    def tail(self, is_last: bool = False) -> Iterator[None]:
        """Compute the next micro-batch's loss in the body, as in ``run``, and call its backward.

        Args:
            is_last: Whether it is the last before the optimizer's step.

        Raises:
            NotGrouped: If it has to run one after the other, and those after it; the random state
                is the one at its beginning. ``backward`` is still to be called, for those before.
        """
        batch, device = self._batches[self.num_done], self._layers[0].device
        is_synced = self._ranks.is_synced
        if is_synced and not is_last:
            self.is_over = True
            raise NotGrouped("gradients are exchanged for each micro-batch")
        if changed := self._changed_between(batch):
            self.is_over = True
            raise NotGrouped(changed, may_pass=True)
        batch.start.restore()
        asked = nullcontext() if self._head is None else self._head.asked(is_for_good=True)
        self._tail, self._before, self._has_last = batch, Gradients(self._trained), is_last
        # Where gradients are exchanged, DDP would take an edge to a parameter for its gradient.
        inside = [] if is_synced else [e for e in self._trained if id(e) in self._in_layers]
        try:
            with asked, self._around.noting(), batch.tail(self._is_known, inside):
                yield
            if self._refused is not None:
                raise self._refused
            if is_synced and batch.is_awaited and not batch.has_arrived:
                # Its backward was told to go elsewhere, or DDP waits for gradients in vain.
                raise NotGrouped("the loss whose gradients are exchanged does not reach the layers")
            if self._tail is not None:
                self._count(batch)
        except NotGrouped as reason:
            self.is_over = True
            self._modules.train_again(self._trained)
            self._around.put_back()
            if self._tail is None or not self._before.undo():
                raise UnsupportedModelError(
                    f"expected micro-batches that can go through the layers together, found that "
                    f"they cannot ({reason}), when gradients were there already that cannot be "
                    "taken back. Call backward for each micro-batch, without poros.accumulate or "
                    "block-major trainers"
                ) from reason
            batch.start.restore()
            raise
        finally:
            self._has_last &= self._tail is None
            self._tail = None
        self._around.keep()
        self._is_known = True
        is_last = self.num_done == len(self._batches)
        if not Start.capture(device).equals(
            self._end if is_last else self._batches[self.num_done].start
        ):
            draws = between(batch.states[-1], RngStash.capture(device))
            self._table.note_tail(batch.key, draws, batch.first_draws)
            self.is_over = True
        # The loss may have changed what is trained: the layers of the others ran before it.
        self.is_over |= is_last or self._is_trained_otherwise()

    def _changed_between(self, batch: MicroBatch) -> str | None:
        """What was done since the micro-batch before that its layers have not seen."""
        if self.num_done and not Start.capture(self._layers[0].device).equals(batch.start):
            return "random numbers are drawn between micro-batches"
        if self._modules.mark(self._trained) != self._mark or self._is_trained_otherwise():
            return "parameters are edited, frozen or thawed between micro-batches"
        return None

    def _is_trained_otherwise(self) -> bool:
        return list(map(id, self._modules.trained())) != list(map(id, self._trained))

    def _count(self, batch: MicroBatch) -> None:
        """The backward of its loss has come to the last layer."""
        self._require_apart(batch, self._before)
        self.num_done += 1
        self._tail = None

    def _require_apart(self, batch: MicroBatch, before: Gradients) -> None:
        """A parameter of a layer, or before the layers, has its gradient from there alone.

        If the loss uses it too (a penalty on weights), one after the other sums both for each
        micro-batch, before they are added to what is there.
        """
        apart = self._in_layers | set(map(id, batch.leaves_below()))
        if batch.has_arrived_below or any(id(each) in apart for each in before.changed()):
            raise NotGrouped("the loss uses parameters of layers, or what goes into them, itself")

    def backward(self) -> None:
        """Take the gradients of all layers, of the micro-batches that are done.

        Raises:
            RematerializationError: If hooks draw random numbers as gradients pass, or a loss that
                was computed ahead was another one in the end.
        """
        self._watch.end()
        self._backward()

    def _backward(self) -> None:
        now = self._modules.trained()
        self._modules.train_again(self._trained)  # as their forwards had it
        try:
            self._backward_done()
        finally:
            self._modules.train_again(now)

    def _backward_done(self) -> None:
        done, self._num_back = self._batches[self._num_back : self.num_done], self.num_done
        # Before any layer's gradient is there, and while the device is still at it: waiting at the
        # end would have it idle until the next group's code has run.
        self._require_same(done)
        ways = self._ranks.ways(len(done), is_last=self._has_last and not self._tail)
        state = RngStash.capture(self._layers[0].device)
        for index in reversed(range(len(self._layers))) if done else ():
            with self._layers[index].in_a_row():
                for batch, way in zip(done, ways, strict=True):
                    batch.backward(index, way)
        for batch, way in zip(done, ways, strict=True):
            batch.backward_below(way)
        if not RngStash.capture(self._layers[0].device).equals(state):
            raise RematerializationError(
                "expected backwards that draw no random numbers, found some that do (a hook that "
                "adds noise to gradients?): micro-batches one after the other would have drawn "
                "them in another order. Call backward for each of them, without poros.accumulate "
                "or block-major trainers"
            )

    def _require_same(self, done: Sequence[MicroBatch]) -> None:
        if self._head is not None:
            self._head.require_same()
        differs = [each for batch in done for each in batch.differs]
        if differs and bool(torch.stack(differs).any()):
            raise RematerializationError(
                f"{OTHER_VALUES}. The gradients that are there now are wrong: throw them away"
            )


def _after(parameter: nn.Parameter) -> object:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _kind(layer: StreamedLayer) -> Hashable:
    """Equal for layers that draw alike, for inputs of one shape."""
    return tuple(
        (type(module), own.get("p"), own.get("attention_dropout"))
        for module, own in ((each, vars(each)) for each in layer.contents().modules())
    )
