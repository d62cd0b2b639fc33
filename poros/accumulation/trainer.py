"""Trainers whose gradient accumulation loads each block once for all micro-batches of a step.

``transformers.Trainer`` fetches all micro-batches of a step before the first of them, and then
calls ``training_step`` for each. The mixin takes them through the layers together at the first of
these calls. Each call then computes its own loss, by the trainer's own code, so what is logged,
scaled and noted down is the trainer's; the layers' backwards come with the last of them, since a
trainer exchanges gradients between ranks in that one alone.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from poros.accumulation.distributed import Ranks
from poros.accumulation.loop import begin_group, copy_of, note_alone
from poros.accumulation.reasons import NotGrouped
from poros.head.regularized import RegularizedLoss
from poros.model.runtime import Runtime, find_runtime

if TYPE_CHECKING:
    from poros.accumulation.group import Group

Step = Callable[[nn.Module, Any], torch.Tensor]


class BlockMajorMixin:
    """Placed before a trainer class: its accumulation goes through the blocks together.

    ::

        class MyTrainer(poros.BlockMajorMixin, trl.SFTTrainer): ...

    Exactness:
        Logged losses, gradients, weights, optimizer states and random states are bit for bit those
        of the same trainer without the mixin. Where that cannot be had together, micro-batches run
        one after the other, which a line of log and ``poros.runtime(model).stats()`` say. A
        ``training_step`` of a class before or behind this, or a callback, that uses gradients
        between micro-batches gets those of one after the other: each such use ends the backwards
        of the micro-batches before it, which load their blocks for themselves. See
        ``poros.accumulate`` for what the code of a loss must be like, and for what is not seen.
    """

    _samples: "_Samples | None" = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; notes the micro-batches of the step that begins."""
        self._end_samples()
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._samples = _Samples(found[0])
        return found

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """As the trainer's own; see the class."""
        own = super().training_step  # type: ignore[misc]

        def plain(model: nn.Module, inputs: Any) -> torch.Tensor:
            found: torch.Tensor = own(model, inputs, num_items_in_batch)
            return found

        samples = self._samples
        if samples is None or not samples.is_next(inputs):
            self._end_samples()
            return plain(model, inputs)
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # first of all, as in a step of the trainer's: some edit weights
        try:
            code = own, self.compute_loss, self.compute_loss_func  # type: ignore[attr-defined]
            return samples.step(model, plain, code, self._is_synced())
        except BaseException:
            self._samples = None
            raise

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own."""
        self._samples = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._end_samples()

    def _is_synced(self) -> bool:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        return bool(accelerator.sync_gradients)

    def _end_samples(self) -> None:
        """A step was left before its last micro-batch: have the gradients that belong to it."""
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.end()


class PorosTrainer(BlockMajorMixin, Trainer):
    """``transformers.Trainer`` with ``BlockMajorMixin``: the same arguments, the same result.

    With ``gradient_accumulation_steps=G``, each block of a prepared model is loaded once for all G
    micro-batches. ``label_smoothing_factor`` is computed in slices of the vocabulary where the
    model's loss is, so not with the bits of the plain Trainer, which makes whole logits for it.

    Args:
        z_loss: The weight of the squared logarithm of the softmax's denominator, which keeps
            logits small (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5: 1e-4). It is
            part of the loss that is logged, in evaluations too.

    Raises:
        PolicyError: If ``z_loss`` is negative.
    """

    def __init__(self, *args: Any, z_loss: float = 0.0, **kwargs: Any) -> None:
        RegularizedLoss(z_loss=z_loss)  # refused before anything is set up
        super().__init__(*args, **kwargs)
        smoother: Any = self.label_smoother
        if smoother is not None or z_loss:
            self.label_smoother: Any = RegularizedLoss(smoother, z_loss)


class _Samples:
    """The micro-batches of one optimizer step, on their way."""

    def __init__(self, samples: list[Any]) -> None:
        self._todo = list(samples)
        self._group: Group | None = None
        self._runtime: Runtime | None = None
        self._is_alone = False

    def is_next(self, inputs: Any) -> bool:
        return bool(self._todo) and self._todo[0] is inputs

    def step(
        self, model: nn.Module, plain: Step, code: Sequence[Any], is_synced: bool
    ) -> torch.Tensor:
        """The loss of the next micro-batch; its gradients with those of its group.

        Args:
            model: As the trainer calls it.
            plain: The trainer's own step.
            code: What that runs; see ``of_code``.
            is_synced: Whether the optimizer's step comes behind it.
        """
        if self._group is None and not self._is_alone and len(self._todo) > 1 and not is_synced:
            self._begin(model, plain, code)
        spare = inputs = self._todo.pop(0)
        group = self._group
        if group is None:
            return plain(model, inputs)
        try:
            spare = copy_of(inputs)
            with group.tail(is_synced):
                loss = plain(model, inputs)
        except NotGrouped as reason:
            self._is_alone = True
            note_alone(self._runtime, str(reason), for_good=not reason.may_pass)
            self._finish()
            # What the loss has edited, or taken out, is there again.
            return plain(model, spare)
        except BaseException:
            self._finish()
            raise
        if group.is_over or is_synced:
            self._finish()
        return loss

    def end(self) -> None:
        """No more micro-batches come, though some were expected."""
        self._finish()

    def _begin(self, model: nn.Module, plain: Step, code: Sequence[Any]) -> None:
        self._runtime = runtime = find_runtime(model)
        self._is_alone = True
        if runtime is None or not _is_prepared(model, runtime):
            return
        self._group = begin_group(runtime, Ranks(model), plain, self._todo, code)
        self._is_alone = self._group is None

    def _finish(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.backward()


def _is_prepared(model: nn.Module, runtime: Runtime) -> bool:
    """Whether ``model`` is the prepared one, in nothing that has backwards of its own."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if runtime.context.is_model(inner):
        return True
    note_alone(runtime, f"a model within a {type(model).__name__}")
    return False
