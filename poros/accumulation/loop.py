"""Gradient accumulation: the micro-batches of a step, taken in turn, and as a call of one's own."""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.accumulation.calls import ADVICE
from poros.accumulation.distributed import Ranks
from poros.accumulation.draws import DrawTable
from poros.accumulation.foreign import ForeignCode
from poros.accumulation.gradients import are_watchable, has_hooks
from poros.accumulation.group import Group
from poros.accumulation.modules import Modules
from poros.accumulation.names import Names
from poros.accumulation.observed import Observer
from poros.errors import UnsupportedModelError
from poros.model.runtime import Runtime, find_runtime
from poros.stream.args import PLAIN
from poros.stream.boundary import StreamedLayer
from poros.stream.marks import version_of
from poros.stream.namespaces import is_like
from poros.stream.stack import LayerStack

logger = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], torch.Tensor]


def accumulate(
    model: nn.Module, batches: Iterable[Any], *, loss: Loss | None = None
) -> list[torch.Tensor]:
    """Add up the gradients of several micro-batches that share each load of a block.

    Call it instead of ``loss(model, batch).backward()`` for each micro-batch. Clip and step the
    optimizer afterwards, as usual::

        for batches in groups_of_eight:
            poros.accumulate(model, batches)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: Prepared, and possibly wrapped in ``DistributedDataParallel``, which then exchanges
            gradients with the last micro-batch. A model that is not prepared runs the micro-batches
            one after the other.
        batches: Arguments for ``loss``, one for each micro-batch.
        loss: Function of the model and one of ``batches`` that returns the tensor to call
            ``backward`` on; by default the model's own loss for ``model(**batch)``, divided by the
            number of batches. It is called once for each batch, and must call the model exactly
            once with gradients. It is interrupted as it calls the last of the model's layers, and
            before a head in host memory, while the others come to the same place. What code
            between layers is handed has no values, so it can only pass it on.

    Returns:
        The losses that ``loss`` returned, detached, in order.

    Note: How many go together
        The first micro-batch of a kind (a loss, and batches of its form) runs alone and is watched.
        Of the others as many go through the layers together as fit: all of them, or half of them,
        and so on. If Poros measures and chooses the memory (see ``StreamingPolicy.vram_budget``),
        most layers can keep their activations and micro-batches are long (from 200 to 700 tokens
        on, by the GPU), they run one after the other: there is then little to load, and each saves
        a recomputation, which takes longer than making 4-bit weights dense for each.

    Exactness:
        Gradients, random states and losses are bit for bit those of one micro-batch after the
        other. Where grouping cannot give them, micro-batches run one after the other, which a log
        line and ``poros.runtime(model).stats()`` report: for example with a loss that uses
        parameters of layers itself, and with layers that run code of no known library. That is
        found out at the first micro-batch; what only a later one does raises an error. Between the
        parts of ``loss`` before the layers, behind them and behind the head, those of other batches
        run: values that pass from one part to another in attributes of its object or its class, in
        variables around it, or in objects of classes of the same file, are found out likewise.
        Poros does not see what passes elsewhere (within other objects, in context variables, in
        files, in iterators), layers that begin to leave values in their modules at a later
        micro-batch, edits that PyTorch does not count (through ``.data`` or NumPy) between
        micro-batches, nor gradients that were read before and kept.

    Raises:
        TypeError: If ``loss`` is None, and a batch is no dictionary or gives the model's loss no
            labels.
        UnsupportedModelError: If ``loss`` does for a later micro-batch what cannot be grouped, and
            did not for the first one. Gradients are incomplete then.
        RematerializationError: As in any backward of a prepared model; and if a micro-batch has
            drawn other random numbers than those of its kind before.
    """
    todo = list(batches)
    for each in todo if loss is None else ():
        if not isinstance(each, Mapping):
            raise TypeError(
                "batches: expected a list of dictionaries with the model's arguments, found a "
                f"{type(each).__name__} in it; pass [{{'input_ids': ..., 'labels': ...}}], "
                "or a loss"
            )
    compute = loss or partial(_own_loss, num_batches=len(todo))

    def run(batch: Any) -> torch.Tensor:
        value = compute(model, batch)
        value.backward()
        return value.detach()

    ranks = Ranks(model)
    samples, step = Samples(todo), Step(lambda: find_runtime(model), ranks, run, [loss])
    found: list[torch.Tensor] = []
    try:
        for number in range(1, len(todo) + 1):
            is_last = number == len(todo)
            with nullcontext() if is_last else ranks.no_sync():
                found.append(samples.take(step, is_last))
    except BaseException:
        samples.finish()
        raise
    return found


class Step(NamedTuple):
    """How micro-batches of a model are computed."""

    find: Callable[[], Runtime | None]
    """Gives the runtime of the model; None if they run one after the other."""
    ranks: Ranks
    """It is trained on."""
    run: Callable[[Any], torch.Tensor]
    """Computes the loss of a micro-batch and calls its backward."""
    code: Sequence[Any]
    """Of the user, that ``run`` runs: functions, methods, or objects that are called."""
    given: tuple[Any, ...] = ()
    """To ``run``, beside the micro-batch."""


class Samples:
    """The micro-batches of one optimizer step, on their way.

    Whoever takes them calls ``finish`` if not all are taken, after an error or Ctrl-C too: those
    before have their gradients then, as one after the other, unless Ctrl-C came as a group began.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self._todo = list(samples)
        self._group: Group | None = None
        self._observed: tuple[Hashable, Observer] | None = None
        self._leaves = {id(each): _leaves_in(each) for each in self._todo}
        """Of each batch, by its id, at first; of one in a group as that had begun."""
        self._given: tuple[Any, ...] | None = None

    def is_next(self, batch: Any) -> bool:
        """Whether this is the micro-batch that comes now."""
        return bool(self._todo) and self._todo[0] is batch

    def take(self, step: Step, is_last: bool) -> torch.Tensor:
        """The loss of the next micro-batch; its gradients with those of its group.

        Args:
            step: How it is computed; the same for all.
            is_last: Whether the optimizer's step comes behind it.
        """
        batch, group = self._todo.pop(0), self._group
        why = self._why_apart(step, batch)
        if group is None:
            runtime = step.find()
            if runtime is None:
                return step.run(batch)
            history = _history(runtime)
            if self._observed is not None:
                (kind, observer), self._observed = self._observed, None
                observer.look_between()
                history.know(kind, observer, runtime)
            kind = kind_of(step.code, batch)
            if why is not None:
                history.known[kind] = Kind(why, False, [])
            if not self._todo or not history.may_go_together(runtime, step, kind, is_last):
                return step.run(batch)
            if kind not in history.known:
                code = [*step.code, *history.around]
                modules = history.modules(step.ranks.inner)
                observer = Observer(runtime, modules, history.stack(runtime), code)
                self._observed = kind, observer
                with observer.watching():
                    return step.run(batch)
            group = self._begin_group(history, runtime, step, [batch, *self._todo])
        elif why is not None:
            raise UnsupportedModelError(
                "expected a micro-batch to be given what it was when it began with others, found "
                f"{why}. {ADVICE}"
            )
        return self._go_on(group, is_last)

    def _why_apart(self, step: Step, batch: Any) -> str | None:
        """Why this micro-batch is not the one that would go, or has gone, with others."""
        before, self._given = self._given, step.given
        if before is not None and not is_like(before, step.given):
            return "other arguments than those of the micro-batch before"
        if not is_like(self._leaves[id(batch)], _leaves_in(batch)):
            return "a batch that was changed before its turn"
        return None

    def _begin_group(
        self, history: "History", runtime: Runtime, step: Step, batches: Sequence[Any]
    ) -> Group:
        known = [history.known.get(kind_of(step.code, each)) for each in batches]
        kinds = list(takewhile(lambda kind: kind is not None and kind.reason is None, known))
        shares_head = all(kind is not None and kind.reads_head for kind in kinds)
        modules = history.modules(step.ranks.inner)
        read = [kind.read for kind in kinds if kind is not None]
        parts = [set[str]().union(*part) for part in zip_longest(*read, fillvalue=set[str]())]
        names = Names([*step.code, *history.around], modules.now(), parts)
        group = Group(
            *(runtime, modules, history.stack(runtime), history.table, step.ranks, names),
            shares_head,
        )
        runs = [partial(step.run, each) for each in batches[: len(kinds)]]
        history.group = weakref.ref(group)
        group.start(runs, has_last=len(kinds) == len(batches))
        self._group = group
        self._leaves = {id(each): _leaves_in(each) for each in batches}
        history.num_groups += group.num_together > 1
        if group.reason is not None:
            note_alone(runtime, group.reason)
        return group

    def _go_on(self, group: Group, is_last: bool) -> torch.Tensor:
        """The next one of the group, or the one that has begun with it and runs alone behind it."""
        loss: torch.Tensor
        if group.is_over:
            loss = group.finish_behind()
        else:
            loss = group.finish_next(is_last)
            is_end = group.is_over or is_last
            if is_end:
                group.backward()
            if not is_end or group.behind is not None:
                return loss
        self.finish()
        return loss

    def finish(self) -> None:
        """No more micro-batches of the group come: have the gradients of those that have."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            group.backward()
        finally:
            group.close()


def _leaves_in(value: Any) -> Any:
    """Not ``is_like`` what it was if another value stands in a batch, or a tensor was edited."""
    if isinstance(value, torch.Tensor):
        return value, version_of(value)
    if isinstance(value, Mapping):
        return [(key, _leaves_in(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        is_plain = bool(value) and isinstance(value[0], PLAIN)  # there may be thousands
        return list(value) if is_plain else list(map(_leaves_in, value))
    return value


def kind_of(code: Sequence[Any], batch: Any) -> Hashable:
    """Equal for micro-batches of which it is assumed that their code goes the same way.

    Args:
        code: Of the user; see ``Step``.
        batch: What it is handed.
    """
    return tuple(map(_code_of, code)), _form_of(batch)


def _code_of(code: Any) -> Hashable:
    code = getattr(code, "func", code)  # of functools.partial
    function = getattr(code, "__func__", code)
    return getattr(function, "__code__", type(code)), type(getattr(code, "__self__", None))


def _form_of(value: Any) -> Hashable:
    """Its type, and those of what is in it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return type(value), tuple((key, _form_of(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(dict.fromkeys(map(_form_of, value)))
    return (type(value),)


class Kind(NamedTuple):
    """What is known of micro-batches of a kind."""

    reason: str | None
    """Why they run one after the other; None if they need not."""
    reads_head: bool
    """Whether the loss comes to a head that is not trained, once."""
    read: Sequence[set[str]]
    """Names that each part of its code reads: see ``poros.accumulation.names``."""


class History:
    """What is known of a model's micro-batches.

    Attributes:
        num_groups: Groups of micro-batches that went together.
        known: Kinds of them; see ``kind_of``.
        alone: Why others did not, and how often.
        table: What they draw.
        group: Gives the latest group, if it is still there.
    """

    def __init__(self) -> None:
        self.num_groups = 0
        self.known: dict[Hashable, Kind] = {}
        self.alone: Counter[str] = Counter()
        self.table = DrawTable()
        self.group: Callable[[], Group | None] = lambda: None
        self._passing = set[Hashable]()
        self._modules: Modules | None = None
        self._stack: LayerStack[StreamedLayer] | None = None
        self._foreign = ForeignCode()

    def know(self, kind: Hashable, observer: Observer, runtime: Runtime) -> None:
        """What was seen at one of them."""
        if observer.reason is not None:
            # What passes at once, as a note that a model takes in its first forward, is not said.
            if kind in self._passing or not observer.may_pass:
                note_alone(runtime, observer.reason)
            if observer.may_pass:
                self._passing.add(kind)
                return
        self.known[kind] = Kind(observer.reason, observer.reads_head, observer.names.read)
        if observer.drawn is not None:
            self.table.note(observer.key, observer.drawn)

    def may_go_together(
        self, runtime: Runtime, step: "Step", kind: Hashable, is_last: bool
    ) -> bool:
        """Whether this one may, as far as can be told before its code runs."""
        if runtime.sizer.is_quicker_alone:
            runtime.share_dense()  # with nobody, any more
            return False
        reason = self._reason_against(runtime, step, kind, is_last)
        if reason is not None:
            note_alone(runtime, reason)
        return reason is None

    def _reason_against(
        self, runtime: Runtime, step: "Step", kind: Hashable, is_last: bool
    ) -> str | None:
        if not torch.is_grad_enabled():
            return "gradients are disabled around all micro-batches"
        group, in_place = self.group(), runtime.context.in_place
        if (group and group.is_on_its_way) or (in_place and in_place() is not None):
            return "micro-batches within micro-batches"
        if step.ranks.reason is not None:
            return step.ranks.reason
        if step.ranks.is_synced and not is_last:
            return "gradients are exchanged for each micro-batch"
        modules = self.modules(step.ranks.inner)
        trained = modules.trained()
        if modules.have_shared(trained):  # it has one sum for all its places, for each micro-batch
            return "a trained parameter with several places in the model"
        if has_hooks(trained.parameters):
            return "hooks on parameters"
        if not are_watchable(trained.parameters):
            return "a trained parameter of a class of its own"
        if kind in self.known and self.known[kind].reason is not None:
            return self.known[kind].reason
        foreign = self._foreign.find(list(runtime.streamed_layers()), modules.now())
        return foreign and f"layers run {foreign}, code of no library that is known"

    @property
    def around(self) -> Sequence[Any]:
        """Code of others that the model runs outside its layers."""
        return self._foreign.around

    def modules(self, model: nn.Module) -> Modules:
        """Of the model, as they are now."""
        if self._modules is None or not self._modules.are_of(model):
            self._modules = Modules(model)
        self._modules.now()
        return self._modules

    def stack(self, runtime: Runtime) -> LayerStack[StreamedLayer]:
        """The layers of the model, as they are now."""
        layers = list(runtime.streamed_layers())
        if self._stack is None or self._stack.layers != layers or not self._stack.is_current():
            self._stack = LayerStack(layers)
        return self._stack


def note_alone(runtime: Runtime, reason: str) -> None:
    """Micro-batches run one after the other: say so once for each reason, and count it."""
    alone = _history(runtime).alone
    if not alone[reason]:
        logger.warning(
            "poros: micro-batches run one after the other (%s): each of them loads all blocks. "
            "The result is the same",
            reason,
        )
    alone[reason] += 1


def _history(runtime: Runtime) -> History:
    if runtime.accumulation is None:
        runtime.accumulation = History()
    found: History = runtime.accumulation
    return found


def _own_loss(model: nn.Module, batch: Mapping[str, Any], num_batches: int) -> torch.Tensor:
    found: torch.Tensor | None = model(**batch).loss
    if found is None:
        raise TypeError(
            f"batches: expected a loss of the model, found none for {', '.join(batch)}; add labels "
            "to each batch, or pass a loss"
        )
    return found / num_batches
