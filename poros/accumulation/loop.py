"""Gradient accumulation for a training loop of one's own."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from poros.accumulation.distributed import Ranks
from poros.accumulation.group import DrawTable, Group
from poros.accumulation.head import SharedHead
from poros.accumulation.reasons import NotGrouped
from poros.accumulation.unchanged import Modules
from poros.errors import VRAMBudgetError
from poros.model.runtime import Runtime, find_runtime

logger = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], torch.Tensor]
_LARGE_NUM_BYTES = 2**26


def accumulate(
    model: nn.Module, batches: Iterable[Any], *, loss: Loss | None = None
) -> list[torch.Tensor]:
    """Add up the gradients of several micro-batches, each block being loaded once for all of them.

    In place of ``loss(model, batch).backward()`` for each of them. Clipping and the optimizer's
    step come afterwards, as ever::

        for batches in groups_of_eight:
            poros.accumulate(model, batches)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: Prepared, perhaps within ``DistributedDataParallel``; its gradients are exchanged
            with those of the last micro-batch. A model that is not prepared runs them one after the
            other.
        batches: What ``loss`` takes.
        loss: Called with the model and one of ``batches``, returns what to call ``backward`` of;
            by default the model's own loss for ``model(**batch)``, over the number of batches. It
            is called twice for each of them, or three times where the head is in host memory, and
            stopped on its way but for the last: it must call the model once with gradients, in the
            same way each time. Before the last call, what the others have done is put back: random
            states of PyTorch, Python and NumPy; the batch, of which they get a copy; attributes of
            ``loss`` and of the object it is a method of, variables around it, global variables
            that it uses, and these of the functions that it calls in its own file: numbers, texts,
            bools, None, tuples of them, and what is in lists, dicts, sets and deques of up to 1000
            elements. Without ``autocast`` around all; a region within it is fine.

    Returns:
        The losses, detached, in order: what ``loss`` has returned.

    Note: How many go together
        As many go through the layers together as fit, all of them, half of them, and so on. Where
        room is measured and chosen for the run (see ``StreamingPolicy.vram_budget``) and lets most
        layers keep their graph, they go one after the other: nothing has to be loaded then, and
        each has a recomputation less.

    Exactness:
        Gradients, random states and losses are bit for bit those of one micro-batch after the
        other. Where that cannot be had together, they run one after the other, said in a line of
        log and in ``poros.runtime(model).stats()``: so with a loss that reads or writes gradients
        of parameters, or takes some by ``torch.autograd.grad``. Not seen are edits that PyTorch
        does not count (through ``.data`` or NumPy) between micro-batches, gradients that were read
        before and kept, and what ``loss`` changes elsewhere: in objects that it holds, in files,
        in iterators. If that decides what the model is called with, it is an error; if it decides
        the loss alone, ``loss`` finds it changed twice or three times.

    Raises:
        UnsupportedModelError: If ``loss`` turns out not to suit when there are gradients already.
        RematerializationError: As any backward of a prepared model; and if the model was called
            with other values the second time. Gradients are wrong then.
    """
    todo = list(batches)
    compute = loss or partial(_own_loss, num_batches=len(todo))
    found: list[torch.Tensor] = []
    ranks = Ranks(model)
    runtime = find_runtime(model)

    def step(batch: Any) -> torch.Tensor:
        value = compute(model, batch)
        value.backward()
        return value.detach()

    is_alone = runtime is None
    while runtime is not None and not is_alone and len(todo) > 1:
        group = begin_group(runtime, ranks, compute, todo, [loss])
        if group is None:
            break
        losses, is_alone = _tails(group, runtime, ranks, step, todo)
        found += losses
        todo = todo[len(losses) :]
    for number, batch in enumerate(todo):
        with nullcontext() if number == len(todo) - 1 else ranks.no_sync():
            found.append(step(batch))
    return found


def _tails(
    group: Group,
    runtime: Runtime,
    ranks: Ranks,
    step: Callable[[Any], torch.Tensor],
    batches: list[Any],
) -> tuple[list[torch.Tensor], bool]:
    """The losses of a group, which are the first of ``batches``; whether all others run alone.

    A batch whose loss has begun, and has to begin anew, is put back as it was.
    """
    found: list[torch.Tensor] = []
    is_alone = False
    try:
        while not group.is_over:
            number = len(found)
            spare, is_last = batches[number], number == len(batches) - 1
            spare = copy_of(spare)  # which may fail, and then it is there as it is
            with nullcontext() if is_last else ranks.no_sync(), group.tail(is_last):
                value = step(batches[number])
            found.append(value)
    except NotGrouped as reason:
        note_alone(runtime, str(reason), for_good=not reason.may_pass)
        batches[number], is_alone = spare, True
    except BaseException:
        # Those before it have their gradients, as one after the other: after Ctrl-C too.
        group.backward()
        raise
    group.backward()
    return found, is_alone


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


def begin_group(
    runtime: Runtime, ranks: Ranks, compute: Loss, batches: Sequence[Any], code: Sequence[Any]
) -> Group | None:
    """A group whose layers have run; None if these micro-batches have to run one after the other.

    Args:
        runtime: Of the model.
        ranks: It is trained on.
        compute: Computes a loss of the model that is prepared, without what wraps it.
        batches: Of each micro-batch; ``compute`` is called with copies.
        code: Of the user, that ``compute`` runs; see ``of_code``.
    """
    history = _history(runtime)
    if history.is_alone_for is not None:
        note_alone(runtime, history.is_alone_for)
        return None
    if runtime.sizer.is_quicker_alone:
        runtime.share_dense()  # with nobody, any more
        return None
    try:
        ranks.require_together()
        modules = history.modules(ranks.inner)
        group = Group(
            modules,
            list(runtime.streamed_layers()),
            history.table,
            ranks,
            code,
            history.head(runtime),
            is_known=history.num_groups > 0,
            make_room=runtime.share_dense,
        )
        runs = [partial(_on_copy, compute, ranks.inner, each) for each in batches]
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
