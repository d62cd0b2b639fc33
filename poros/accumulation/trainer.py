"""Trainers whose gradient accumulation loads each block once for all micro-batches of a step.

``transformers.Trainer`` fetches all micro-batches of a step before the first of them, and then
calls ``training_step`` for each. The mixin begins the training steps of all at the first of these
calls and takes them through the layers together. Each call then has its own step end, by the
trainer's own code, so what is logged, scaled and noted down is the trainer's; the layers' backwards
come with the last of them, since a trainer exchanges gradients between ranks in that one alone.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from poros.accumulation.distributed import Ranks
from poros.accumulation.loop import Samples, Step, note_alone
from poros.model.runtime import Runtime, find_runtime

logger = logging.getLogger(__name__)


class BlockMajorMixin:
    """Groups the micro-batches of a trainer; put it before the trainer class.

    ::

        class MyTrainer(poros.BlockMajorMixin, trl.SFTTrainer): ...

    Exactness:
        Logged losses, gradients, weights, optimizer states and random states are bit for bit those
        of the same trainer without the mixin. Where grouping cannot give them, micro-batches run
        one after the other, which a log line and ``poros.runtime(model).stats()`` report. A
        ``training_step`` of another class, or a callback, that uses gradients between micro-batches
        gets those of sequential micro-batches: each such use completes the backwards of the
        micro-batches before it, which then load their blocks for themselves. A ``training_step``
        runs once for each micro-batch, and is interrupted in between: see
        ``poros.accumulate`` for the requirements on it, and for what Poros does not see.
    """

    _samples: Samples | None = None
    _num_parameters: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, TrainingArguments) and each.n_gpu > 1:
                logger.warning(
                    "poros: this process trains on one of the %d GPUs that it sees; to use all, "
                    "start one process for each: torchrun --nproc-per-node %d SCRIPT",
                    each.n_gpu,
                    each.n_gpu,
                )
                on_one_gpu(each)
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; notes the micro-batches of the step that begins."""
        self._end_samples()
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._samples = Samples(found[0])
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
            code = own, self.compute_loss_func  # type: ignore[attr-defined]
            given = model, num_items_in_batch
            step = Step(partial(_prepared, model), Ranks(model), partial(plain, model), code, given)
            accelerator: Any = self.accelerator  # type: ignore[attr-defined]
            return samples.take(step, is_last=bool(accelerator.sync_gradients))
        except BaseException:
            self._end_samples()
            raise

    def floating_point_ops(self, inputs: Any) -> int:
        """As the trainer's own, with parameters counted once for each ``train``.

        The trainer's own goes through all modules of the model for each micro-batch.
        """
        own: Any = super().floating_point_ops  # type: ignore[misc]
        model: Any = self.model  # type: ignore[attr-defined]
        named = inputs if isinstance(inputs, Mapping) else {}
        tokens = named.get(getattr(model, "main_input_name", "input_ids"))
        is_usual = own.__func__ is Trainer.floating_point_ops and hasattr(model, "num_parameters")
        if tokens is None or not is_usual:
            return int(own(inputs))
        if self._num_parameters is None:
            self._num_parameters = int(model.num_parameters(exclude_embeddings=True))
        return 6 * int(tokens.numel()) * self._num_parameters

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own."""
        self._samples = self._num_parameters = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._end_samples()

    def _end_samples(self) -> None:
        """If a step was left before its last micro-batch, have the gradients that belong to it."""
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.finish()


class PorosTrainer(BlockMajorMixin, Trainer):
    """``transformers.Trainer`` with ``BlockMajorMixin``: the same arguments, the same result.

    With ``gradient_accumulation_steps=G``, all G micro-batches share each load of a block of a
    prepared model.
    """


def on_one_gpu(arguments: TrainingArguments) -> TrainingArguments:
    """``arguments`` for a Trainer that leaves other GPUs of the machine alone.

    Where several are visible, the Trainer of a process that no launcher has started would wrap the
    model in ``nn.DataParallel``, which copies modules, and its arguments have no field against it.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def _prepared(model: nn.Module) -> Runtime | None:
    """The runtime of ``model``; None if it is within something that has backwards of its own."""
    runtime = find_runtime(model)
    if runtime is None or runtime.context.is_model(Ranks(model).inner):
        return runtime
    note_alone(runtime, f"a model within a {type(model).__name__}")
    return None
