"""Micro-batches that go through the layers together: a block is loaded once for all of them.

The code of each runs up to its call of the last layer, and its calls of layers are noted; then the
layers run, each for all micro-batches (the first one as soon as code has called it, since it tells
what is drawn at random); then each in its turn computes norm,
head and loss, and their backward; then for each layer, from the last to the first, the backwards of
all micro-batches. A gradient is summed over micro-batches in the order in which a run of one after
the other sums it, by the same node of autograd, so the bits are the same.

Note: The random plan
    One after the other, micro-batch g + 1 starts from the random state that g has left. Here it
    starts before g has ended, so that state is computed: what a micro-batch draws depends on
    shapes, so it is known from one that was seen before, or from what its first layer draws. Every
    state is compared with the planned one as soon as it is known.

Source:
    Block-major order: Rajbhandari et al. 2021 (ZeRO-Infinity) and Ren et al. 2021 (ZeRO-Offload)
    amortize a transfer over a larger batch; that it can be exact with dropout follows from
    generators that count what they have given (Salmon et al. 2011, Philox).
"""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from poros.accumulation.calls import ADVICE, NotGrouped, watchers
from poros.accumulation.distributed import Ranks
from poros.accumulation.draws import UNPREDICTABLE, Drawn, DrawTable, between, later
from poros.accumulation.gradients import has_hooks
from poros.accumulation.head import SharedHead
from poros.accumulation.host_values import HostValues
from poros.accumulation.in_place import UNKNOWN, InPlace
from poros.accumulation.micro_batch import MicroBatch
from poros.accumulation.modules import Modules
from poros.accumulation.names import Names, Spaces
from poros.accumulation.parked import Regions
from poros.errors import RematerializationError, UnsupportedModelError, VRAMBudgetError
from poros.head.loss import LossInputs, SlicedLossState
from poros.model.runtime import Runtime
from poros.replay.remat import Together
from poros.replay.routing import GradientSums
from poros.stream.boundary import StreamedLayer
from poros.stream.condition import Condition
from poros.stream.rng import RngStash, Start
from poros.stream.stack import LayerStack

logger = logging.getLogger(__name__)


class Group(InPlace):
    """Micro-batches that go through the layers together, and share the head if ``shares_head``.

    Attributes:
        num_done: Micro-batches whose loss has gone backward to the last layer.
        behind: The one that is to run alone behind them, its code begun, if any.
        reason: Why fewer than all go together, if it is to be said.
    """

    are_rows = True

    def __init__(
        self,
        runtime: Runtime,
        modules: Modules,
        stack: LayerStack[StreamedLayer],
        table: DrawTable,
        ranks: Ranks,
        names: Names,
        shares_head: bool,
    ) -> None:
        super().__init__(runtime, modules, stack)
        self.num_done = 0
        self.behind: MicroBatch | None = None
        self.reason: str | None = None
        self._table = table
        self._ranks = ranks
        self._names = names
        reader = runtime.head if shares_head else None
        self._head = None if reader is None or reader.holds_all else SharedHead(reader)
        self._batches: list[MicroBatch] = []
        self._is_confined = not (
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        )
        """Whether no autocast region is around all, which would go on and keep what it has cast."""
        self._most = 0
        """Micro-batches that there is memory for."""
        self._num_back = 0
        self._running: MicroBatch | None = None
        self._behind_outside = self._outside
        self._has_stopped = False
        """Whether there were others behind one of which a layer has raised."""
        self._turn: MicroBatch | None = None  # to the end of its code
        self._tail: MicroBatch | None = None
        """The one whose loss is being computed for good, up to its backward."""
        self._last: MicroBatch | None = None
        """The last one of the step."""
        self._seen_back: MicroBatch | None = None
        """The one whose backward was seen as it began."""
        self._between: Spaces = []
        """What names were bound to as the latest code ended."""
        self._values = HostValues()
        """While code of the model, and of nobody else, runs up to its first layer."""
        self._condition: Condition | None = None
        """Of the layers, as the code of the first one has called them."""
        self._regions: Regions | None = None
        """In which it has."""

    @property
    def is_over(self) -> bool:
        """Whether all have been finished, but for the one ``behind``."""
        return self.num_done == len(self._batches)

    @property
    def is_on_its_way(self) -> bool:
        """Whether it has begun and is not closed."""
        return bool(self._batches) or self.behind is not None

    @property
    def num_together(self) -> int:
        return len(self._batches)

    # ------------------------------------------------------------------------------- forward

    def start(self, runs: Sequence[Callable[[], Any]], has_last: bool) -> None:
        """Take micro-batches through all layers, as many as may go together.

        Args:
            runs: Each calls the model once with gradients, computes a loss, and calls its backward.
            has_last: Whether the last of them is the last before the optimizer's step.

        Exactness:
            No gradient is touched. Random states are those before it.
        """
        start = Start.capture(self._device)
        self._most = len(runs)
        try:
            with self._in_place():
                self._begin(runs, has_last)
                self._require_unedited()
                if self._batches and not self._still_hold():
                    raise self._batches[0].refuse("layers that the loss changes while it runs")
                for index in range(1, len(self._layers)):
                    self._run_layer(index, self._batches)
                    self._end_at_failure()
                self._require_planned()
                if self._head is not None:
                    self._head.read(self._batches, self._go_on)
        except BaseException:
            self.close()
            raise
        finally:
            start.restore()
        self._names.look_at_read()
        self._between = self._names.now()
        self._watch.begin()

    def _run_layer(self, index: int, batches: Sequence[MicroBatch]) -> None:
        """Run a layer for them, up to one for which it raises."""
        if not batches:
            return
        layer = self._layers[index]
        for batch in batches:
            batch.require_unedited()
        together, before = Together(), None
        # DDP sees nodes of a graph alone.
        takes = None if self._ranks.is_ddp else together
        grouped = layer.context.grouped(self._is_confined, takes)
        with batches[0].code.inside(), layer.in_a_row(), grouped:
            for batch in batches:
                behind = batches[1:] if batch is batches[0] else []
                before = batch.run_layer(index, together, before, behind)
                if batch.failure is not None:
                    break
                if self._is_confined:
                    torch.clear_autocast_cache()
                if batches[-1].has_run(index):
                    break

    def _begin(self, runs: Sequence[Callable[[], Any]], has_last: bool) -> None:
        """Run the code of each up to its last layer, and the first layer for each."""
        around = watchers()
        self._runtime.num_grouped = self._most
        try:
            for number, run in enumerate(runs):
                batch = MicroBatch(self._layers, around, run, self._enter_layers)
                self._batches.append(batch)
                is_last = has_last and number == len(runs) - 1
                with self._ranks.turn(number, is_last=is_last):
                    try:
                        self._go_on(batch)
                    finally:
                        self._values.__exit__()
                if batch.code.is_over and batch.num_called and batch.code.error is None:
                    raise batch.refuse(
                        f"{batch.num_called} of {len(self._layers)} layers were called"
                    )
                is_alone = batch.reason is not None or batch.code.is_over
                if not is_alone:
                    self._run_layer(0, [batch])
                if is_alone or batch.failure is not None:
                    self.behind = self._batches.pop()
                    self._behind_outside = self._outside.now()
                    self._require_outside()
                    self.reason = batch.reason
                    return
                if len(self._batches) == self._most or not self._plan_behind(batch):
                    return
        finally:
            self._runtime.num_grouped = 1

    def _plan_behind(self, batch: MicroBatch) -> bool:
        """Have the random state that this one will leave; whether it is known."""
        if not self._table.is_predictable(batch.key):
            self.reason = UNPREDICTABLE
            return False
        first = between(*batch.bounds[:2])
        plan = None if first is None else self._table.plan(batch.key, first)
        if plan is None:
            return False
        batch.planned = later(batch.bounds[0], plan.layers)
        end = later(batch.planned, plan.tail)
        batch.state._replace(pytorch=end).restore()
        return True

    def _go_on(self, batch: MicroBatch) -> None:
        """Its code goes on, before its turn to end has come."""
        part, before = int(bool(batch.num_called)), self._names.now()
        self._watch.begin()
        self._running = batch
        try:
            with self._names.again(part):
                batch.resume()
        finally:
            self._running = None
            self._watch.end()
        if batch.error is not None:
            raise batch.error
        self._require_whole(batch, before, [part])
        if not isinstance(batch.code.error, Exception):
            batch.code.reraise()

    def _require_whole(self, batch: MicroBatch, before: Spaces, parts: Sequence[int]) -> None:
        """Raise if these parts of its code have changed what other parts of others are to read."""
        begun, self._between = (*self._batches, *filter(None, [self.behind])), self._names.now()
        if all(each is batch or each.code.is_over for each in begun):
            return
        name = self._names.changed(before, self._between, parts)
        name = name or self._names.passed(parts[0])
        if name is not None:
            raise batch.refuse(f"the loss changes {name}, which another part of it reads")

    def _comes_to_head(self, asked: LossInputs) -> SlicedLossState | None:
        return None if self._head is None else self._head(asked)

    def _enter_layers(self) -> None:
        """The code of one has come to its first layer."""
        if not self._outside.still_holds():
            raise NotGrouped("the model's code changes the model")
        regions = Regions.capture(self._device)
        if self._condition is None and self._stack.is_current():
            self._regions, self._condition = regions, self._stack.condition()
            self._table.begin(self._condition)
        elif not self._still_hold():
            raise NotGrouped("layers that the loss changes while it runs")
        if self._condition and self._condition.has_hooks:
            raise NotGrouped("hooks inside of layers")
        if regions != self._regions:
            raise NotGrouped("autocast or settings that are others for some micro-batches")

    def _still_hold(self, wherever: bool = False) -> bool:
        """Whether layers compute what they did; ``wherever``: blocks may lie elsewhere."""
        before, stack = self._condition, self._stack
        return (
            before is not None and stack.is_current() and stack.condition().equals(before, wherever)
        )

    def begin_pass(self, make_room: Callable[[], None]) -> bool:
        """The model's own code begins; whether this is a pass of its own."""
        batch = self._running
        if batch is None or not batch.code.is_running or batch.num_called:
            return False
        room = self._runtime.room
        try:
            make_room()
        except VRAMBudgetError as error:
            if self._runtime.num_grouped == 1:
                raise
            if len(self._batches) > 1:  # the others have the room that there is
                batch.wait("no memory for one that is longer")
                make_room()
            else:
                self._make_less_room(make_room, error)
        if self._runtime.room != room and self._still_hold(wherever=True):
            self._condition = self._stack.condition()
        if len(self._batches) == 1:
            self._runtime.share_dense()
        return True

    def _make_less_room(self, make_room: Callable[[], None], error: VRAMBudgetError) -> None:
        while self._most > 1:
            logger.info("poros: %d micro-batches do not fit together: %s", self._most, error)
            self._most = self._runtime.num_grouped = -(-self._most // 2)
            try:
                make_room()
                if self._most == 1:
                    self.reason = "no memory for two of them"
                return
            except VRAMBudgetError as again:
                error = again
        raise error

    def enter(self, holder: nn.Module, given: Sequence[Any]) -> None:
        """The code of the module that holds the layers begins."""
        if self._running is not None and torch.is_grad_enabled() and not any(watchers()):
            self._values.enter(holder)

    def call(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the forward of a layer."""
        batch = self._running
        if batch is None or not batch.code.is_running:
            return layer.forward_now(args, kwargs)
        if not batch.num_called:
            self._values.__exit__()
        return batch.call(layer, args, kwargs)

    def _end_at_failure(self) -> None:
        """The one of which a layer has raised is the last; its code gets that in its turn."""
        failed = next((each for each in self._batches if each.failure is not None), None)
        if failed is None:
            return
        number = self._batches.index(failed)
        stopped = [*self._batches[number + 1 :], *filter(None, [self.behind])]
        for each in stopped:
            each.code.stop()
        self._has_stopped = bool(stopped)
        self._batches, self.behind = self._batches[:number], failed

    def _require_planned(self) -> None:
        """Raise if one has drawn otherwise than planned, and those behind have drawn since."""
        for batch, following in pairwise(self._batches):
            if batch.planned is not None and not batch.planned.equals(batch.bounds[-1]):
                self._table.forget(batch.key)
                following.begin_at(following.start._replace(pytorch=batch.bounds[-1]))

    def _require_unedited(self) -> None:
        """Raise if code edits what the model is made of, or trains other parameters."""
        if not self._is_unedited():
            raise UnsupportedModelError(
                "expected a loss that leaves the parameters of the model alone, found one that "
                f"edits, freezes or thaws them. Do so between steps. {ADVICE}"
            )

    def _require_outside(self) -> None:
        """Have the modules outside the layers as they were for those that have begun."""
        if not self._outside.still_holds() and not self._outside.put_back():
            raise UnsupportedModelError(
                "expected a model whose code leaves buffers and frozen parameters alone, found one "
                f"that edits some in place. {ADVICE}"
            )

    # --------------------------------------------------------------------------------- tails

    def finish_next(self, is_last: bool) -> Any:
        """Have the next micro-batch compute its loss and call its backward; what its code returns.

        ``is_last``: whether it is the last before the optimizer's step.
        """
        batch = self._batches[self.num_done]
        if self._ranks.is_synced and not is_last:
            raise UnsupportedModelError(
                "expected gradients to be exchanged with the last micro-batch of a step alone, "
                f"found that they are to be with each. Use no_sync. {ADVICE}"
            )
        batch.begin_at(Start.capture(self._device))
        self._turn = self._tail = batch
        self._last = batch if is_last else None
        batch.before_arrival(self._arrives)
        names, parts = self._names.now(), [1, 2] if self._head is None else [2]
        if (name := self._names.changed(self._between, names, [1, 2])) is not None:
            raise batch.refuse(f"{name}, which it reads before its layers, changes behind them")
        try:
            with self._in_place(), self._names.again(parts[0]):
                self._running = batch
                batch.finish()
            if batch.error is not None:
                raise batch.error
            batch.code.reraise()
            if self._ranks.is_synced and batch.is_awaited and not batch.has_arrived:
                # DDP waits for gradients in vain.
                raise UnsupportedModelError(
                    "expected a loss whose gradients reach the layers, found one that does not, "
                    f"with gradients that are to be exchanged. {ADVICE}"
                )
            if self._tail is not None:
                self._count(batch)
        finally:
            self._running = self._turn = self._tail = None
        self._note_drawn(batch)
        self._require_whole(batch, names, parts)
        if batch.code.has_changed_settings or not self._outside.still_holds():
            raise UnsupportedModelError(
                "expected a loss that leaves settings of PyTorch and modules outside the layers as "
                "they were, found one that changes some for those behind it, whose code has begun. "
                f"{ADVICE}"
            )
        return batch.code.result

    def finish_behind(self) -> Any:
        """Have the one ``behind`` run to its end; what its code returns. The others are over."""
        batch, self.behind = self.behind, None
        if batch is None:
            raise LookupError("expected one that runs alone behind the group, found none")
        self._behind_outside.put_back()
        if batch.code.error is None:
            batch.begin_at(Start.capture(self._device))
        if batch.code.is_over:
            batch.state.restore()
        else:
            batch.resume()
        if self._has_stopped and batch.code.error is None:
            raise batch.refuse("an error of a layer that its code catches")
        batch.code.reraise()
        return batch.code.result

    def _note_drawn(self, batch: MicroBatch) -> None:
        drawn = Drawn.of([*batch.bounds, RngStash.capture(self._device)])
        if drawn is not None:
            self._table.note(batch.key, drawn)

    def _count(self, batch: MicroBatch) -> None:
        """The backward of its loss has come to the last layer."""
        if has_hooks(self._trained):
            raise UnsupportedModelError(
                "expected parameters without hooks, found hooks that the loss has registered. Its "
                f"gradients are wrong. {ADVICE}"
            )
        self.num_done += 1
        self._tail = None

    def _arrives(self) -> None:
        """The backward of the one whose turn it is comes to the last layer."""
        batch = self._turn
        if batch is not None and self._seen_back is not batch:
            raise batch.refuse(UNKNOWN)

    def _asked(self) -> None:
        # Code of the user gets those of one after the other.
        running, is_within = self._running, torch._C._current_graph_task_id() != -1
        if running is not None:
            if is_within:
                raise running.refuse("gradients are used within a backward")
            if running is not self._turn and not running.num_called:
                return running.wait("gradients are used before the model has run")
            if running is not self._turn or (self._tail is not None and not running.has_arrived):
                raise running.refuse("gradients are used while a loss is computed")
            if self._tail is not None:
                self._count(running)
        context = self._layers[0].context
        in_place, context.in_place = context.in_place, None
        self._watch.end()
        try:
            self._backward()
        finally:
            self._watch.begin()
            context.in_place = in_place

    def _goes_back(self, roots: list[Any], wanted: list[Any]) -> None:
        # A parameter of a layer, or before the layers, has its gradient from there alone. If the
        # loss uses it too, one after the other sums both before they are added to what is there.
        running = self._seen_back = self._running
        if running is None:
            if self._why_apart(roots, wanted, set(map(id, self._trained))) is not None:
                self._asked()  # by code between two micro-batches: the earlier ones come first
            return
        is_turn = running is self._turn
        inside = self._in_layers.union(map(id, running.leaves_below()))
        apart = inside if is_turn else set(map(id, self._trained))
        why = self._why_apart(roots, wanted, apart)
        if why is not None and not is_turn and not running.num_called:
            running.wait(why)
        elif why is not None:
            raise running.refuse(why)

    # ------------------------------------------------------------------------------ backward

    def backward(self) -> None:
        """Take the gradients of all layers, of the micro-batches that are done.

        Raises:
            RematerializationError: If hooks draw random numbers as gradients pass.
        """
        self._watch.end()
        self._backward()

    def _backward(self) -> None:
        self._require_unedited()
        done, self._num_back = self._batches[self._num_back : self.num_done], self.num_done
        state = Start.capture(self._device)
        for index in reversed(range(len(self._layers))) if done else ():
            sums = GradientSums()
            with self._layers[index].in_a_row():
                if not MicroBatch.backward_together(done, index, sums):
                    for batch in done:
                        batch.backward(index, self._is_by_hand(batch), sums)
        for batch in done:
            batch.backward_below(self._is_by_hand(batch))
        if not Start.capture(self._device).equals(state):
            raise RematerializationError(
                "expected backwards that draw no random numbers, found some that do (a hook that "
                "adds noise to gradients?): micro-batches one after the other would have drawn "
                f"them in another order. {ADVICE}"
            )

    def _is_by_hand(self, batch: MicroBatch) -> bool:
        """Whether DDP is not to see its gradients: it exchanges what autograd accumulates."""
        return self._ranks.is_ddp and batch is not self._last

    def close(self) -> None:
        """Have the code of those that have not ended go on no more."""
        self._watch.end()
        for batch in (*self._batches[self.num_done :], *filter(None, [self.behind])):
            batch.code.stop()
        self._batches, self.behind, self._head = [], None, None
        # They hold the group, and it holds slots that a change of room is to free.
        self._last = self._seen_back = None
