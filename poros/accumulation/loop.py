"""Gradient accumulation: the micro-batches of a step, taken in turn, and as a call of one's own."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from poros.accumulation.calls import NotGrouped
from poros.accumulation.distributed import Ranks
from poros.accumulation.draws import DrawTable
from poros.accumulation.group import Group
from poros.accumulation.head import SharedHead
from poros.accumulation.unchanged import Modules
from poros.errors import VRAMBudgetError
from poros.model.runtime import Runtime, find_runtime

logger = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], torch.Tensor]
_LARGE_NUM_BYTES = 2**26


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
            number of batches. Poros calls it twice for each batch, or three times if the head is in
            host memory, and stops all calls but the last one half-way. It must therefore call the
            model exactly once with gradients, in the same way each time. Before the last call,
            Poros restores what the earlier calls changed: random states of PyTorch, Python and
            NumPy; the batch, of which they get a copy; attributes of ``loss`` and of the object it
            is a method of, variables around it, global variables that it uses, and these of the
            functions that it calls in its own file. This covers numbers, texts, bools, None, tuples
            of them, and the elements of lists, dicts, sets and deques of up to 1000 elements.

    Returns:
        The losses that ``loss`` returned, detached, in order.

    Note: How many go together
        As many micro-batches go through the layers together as fit: all of them, or half of them,
        and so on. If Poros measures and chooses the memory (see ``StreamingPolicy.vram_budget``)
        and most layers can keep their activations, micro-batches run one after the other: there is
        then little to load, and each saves a recomputation.

    Exactness:
        Gradients, random states and losses are bit for bit those of one micro-batch after the
        other. Where grouping cannot give them, micro-batches run one after the other, which a log
        line and ``poros.runtime(model).stats()`` report: for example with a loss that reads or
        writes gradients of parameters, or takes some by ``torch.autograd.grad``. Poros does not see
        edits that PyTorch does not count (through ``.data`` or NumPy) between micro-batches,
        gradients that were read before and kept, and what ``loss`` changes elsewhere: in objects
        that it holds, in files, in iterators. If that decides the arguments of the model, it raises
        an error; if it decides the loss alone, ``loss`` finds it changed twice or three times.

    Raises:
        UnsupportedModelError: If ``loss`` turns out to be unsuitable when there are already
            gradients.
        RematerializationError: As in any backward of a prepared model; and if the model was called
            with other values the second time. The gradients are then wrong.
    """
    todo = list(batches)
    compute = loss or partial(_own_loss, num_batches=len(todo))

    def run(batch: Any) -> torch.Tensor:
        value = compute(model, batch)
        value.backward()
        return value.detach()

    ranks = Ranks(model)
    samples, step = Samples(todo), Step(lambda: find_runtime(model), ranks, compute, run, [loss])
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
    compute: Loss
    """Computes a loss of the model that is prepared, without what wraps it."""
    run: Callable[[Any], torch.Tensor]
    """Computes the loss of a micro-batch and calls its backward."""
    code: Sequence[Any]
    """Of the user, that ``compute`` runs; see ``of_code``."""


class Samples:
    """The micro-batches of one optimizer step, on their way.

    Whoever takes them calls ``finish`` if not all are taken, after an error or Ctrl-C too: those
    before have their gradients then, as one after the other.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self._todo = list(samples)
        self._group: Group | None = None
        self._runtime: Runtime | None = None
        self._is_alone = False

    def is_next(self, batch: Any) -> bool:
        """Whether this is the micro-batch that comes now."""
        return bool(self._todo) and self._todo[0] is batch

    def take(self, step: Step, is_last: bool) -> torch.Tensor:
        """The loss of the next micro-batch; its gradients with those of its group.

        Args:
            step: How it is computed; the same for all.
            is_last: Whether the optimizer's step comes behind it.
        """
        if self._group is None and not self._is_alone and len(self._todo) > 1 and not is_last:
            self._runtime = step.find()
            if self._runtime is not None:
                self._group = begin_group(self._runtime, step, self._todo)
            self._is_alone = self._group is None
        spare = batch = self._todo.pop(0)
        group = self._group
        if group is None:
            return step.run(batch)
        try:
            spare = copy_of(batch)  # which may fail, and then it is there as it is
            with group.tail(is_last):
                loss = step.run(batch)
        except NotGrouped as reason:
            self._is_alone = True
            note_alone(self._runtime, str(reason), for_good=not reason.may_pass)
            self.finish()
            # What the loss has edited, or taken out, is there again.
            return step.run(spare)
        if group.is_over or is_last:
            self.finish()
        return loss

    def finish(self) -> None:
        """No more micro-batches of the group come: have the gradients of those that have."""
        group, self._group = self._group, None
        if group is not None:
            group.backward()


def _on_copy(compute: Loss, model: nn.Module, batch: Any) -> torch.Tensor:
    """The code of a loss may edit its batch, and will run again."""
    return compute(model, copy_of(batch))


def copy_of(batch: Any) -> Any:
    """A batch like it, which may be edited and taken apart: all of it is copied.

    Raises:
        NotGrouped: If it holds something that cannot be copied, as a generator.
    """
    try:
        with _Clones():
            return deepcopy(batch)
    except Exception as error:
        raise NotGrouped(f"a batch that cannot be copied: {error}") from error


class _Clones(TorchFunctionMode):
    """Of a tensor that is a small part of its storage, deepcopy copies that part alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if not tensor.is_leaf or tensor.untyped_storage().nbytes() > _LARGE_NUM_BYTES:
                return memo.setdefault(id(tensor), tensor.clone())
        return func(*args, **(kwargs or {}))


def begin_group(runtime: Runtime, step: Step, batches: Sequence[Any]) -> Group | None:
    """A group whose layers have run; None if these micro-batches have to run one after the other.

    ``step.compute`` is called with copies of ``batches``.
    """
    history = _history(runtime)
    if history.is_alone_for is not None:
        note_alone(runtime, history.is_alone_for)
        return None
    if runtime.sizer.is_quicker_alone:
        runtime.share_dense()  # with nobody, any more
        return None
    ranks = step.ranks
    try:
        ranks.require_together()
        modules = history.modules(ranks.inner)
        group = Group(
            modules,
            list(runtime.streamed_layers()),
            history.table,
            ranks,
            step.code,
            history.head(runtime),
            is_known=history.num_groups > 0,
            make_room=runtime.share_dense,
        )
        runs = [partial(_on_copy, step.compute, ranks.inner, each) for each in batches]
        _forward(runtime, group, runs)
    except NotGrouped as reason:
        note_alone(runtime, str(reason))
        return None
    history.num_groups += 1
    return group


def _forward(runtime: Runtime, group: Group, runs: Sequence[Callable[[], Any]]) -> None:
    """Take as many micro-batches through the layers as there is memory for: all, half of them."""
    number = len(runs)
    while number > 1:
        runtime.num_grouped = number
        try:
            group.forward(runs[:number])
            return
        except VRAMBudgetError as error:
            logger.info("poros: %d micro-batches do not fit together: %s", number, error)
        finally:
            runtime.num_grouped = 1
        number = -(-number // 2)
    raise NotGrouped("no memory for two of them")


def note_alone(runtime: Runtime | None, reason: str, *, for_good: bool = False) -> None:
    """Micro-batches run one after the other: say so once for each reason, and count it.

    ``for_good``: found out when a loss had been computed; so from now on it is not tried again.
    """
    if runtime is None:
        return
    history = _history(runtime)
    if for_good:
        history.is_alone_for = reason
    alone = history.alone
    if not alone[reason]:
        logger.warning(
            "poros: micro-batches run one after the other (%s): each of them loads all blocks. "
            "The result is the same",
            reason,
        )
    alone[reason] += 1


class History:
    """What is known of a model's micro-batches.

    Attributes:
        table: What its layers draw.
        num_groups: Groups of micro-batches that went together.
        alone: Why others did not, and how often.
        is_alone_for: Why none will any more.
    """

    def __init__(self) -> None:
        self.table = DrawTable()
        self.num_groups = 0
        self.alone: Counter[str] = Counter()
        self.is_alone_for: str | None = None
        self._latest: SharedHead | None = None
        self._modules: Modules | None = None

    def modules(self, model: nn.Module) -> Modules:
        """Of the model, as they are now.

        Raises:
            NotGrouped: If a trained parameter has several places: then it has one sum for all of
                them, for each micro-batch.
        """
        if self._modules is None or not self._modules.are_of(model):
            self._modules = Modules(model)
        self._modules.now()
        if self._modules.have_shared():
            raise NotGrouped("a trained parameter with several places in the model")
        return self._modules

    def head(self, runtime: Runtime) -> SharedHead | None:
        """For the next group; None if the head is not read in slices."""
        reader = runtime.head.slices
        if reader is None:
            return None
        calls = [] if self._latest is None else self._latest.num_calls
        self._latest = SharedHead(reader, is_ahead=bool(calls) and set(calls) == {1})
        return self._latest


def _history(runtime: Runtime) -> History:
    if runtime.accumulation is None:
        runtime.accumulation = History()
    found: History = runtime.accumulation
    return found


def _own_loss(model: nn.Module, batch: Mapping[str, Any], num_batches: int) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found / num_batches
