"""Trainers with block-major accumulation, on rows that are tokens already.

Note: What is never learnt
    Padding gets labels of -100 in the collators, by where it is and not by which token it is made
    of, so a model whose padding token is its end of text still learns to end. So does the first
    token of each document in a packed row, which nothing but another document comes before.

Note: Packed rows
    See ``poros.finetune.packing``. Padding at their end has position 0 throughout: each token of it
    is a document of its own, which no other sees.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import get_available_reporting_integrations
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from poros.accumulation.trainer import BlockMajorMixin, PorosTrainer, on_one_gpu
from poros.errors import RecipeError
from poros.finetune import hub
from poros.finetune.checkpoints import StagedCheckpoints, note_best
from poros.finetune.images import ImageCollator
from poros.finetune.tokens import Tokens
from poros.kernels import packed_attention
from poros.kernels.packed_attention import attention_of
from poros.recipes.passing import config_of, refusals
from poros.recipes.recipe import Recipe
from poros.utils.formatting import counted

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_OURS = ("method", "lora_plus", "early_stopping_patience", "adapter_kernels")
"""Settings of ``training`` that TRL does not know."""
_FEW_UPDATES = 50
"""A run with fewer optimizer steps gets a note before it begins."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Own(StagedCheckpoints):
    """The base of all trainers."""

    recipe: Recipe

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's own, but a loss that is not finite does not enter later averages."""
        total = getattr(self, "_tr_loss", None)
        if "loss" in logs and isinstance(total, torch.Tensor):
            total.zero_()  # the trainer subtracts it from itself
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; with LoRA+, through PEFT, with two learning rates."""
        ratio = self.recipe.training.lora_plus
        if ratio is not None and self.optimizer is None:  # type: ignore[has-type]
            from peft.optimizers import create_loraplus_optimizer

            trainer: Any = self
            kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
            options["loraplus_weight_decay"] = trainer.args.weight_decay
            self.optimizer = create_loraplus_optimizer(
                trainer.model, kind, loraplus_lr_ratio=ratio, **options
            )
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the trainer's own, but the next rate is the schedule's, not the one that was saved.

        A run that has become longer would train a step at the rate with which the shorter one had
        ended, 0 as a rule.
        """
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        schedule = getattr(self, "lr_scheduler", None)
        if checkpoint is not None and isinstance(schedule, LambdaLR):
            schedule.last_epoch -= 1
            schedule.step()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card: PEFT writes one beside the adapter, and checkpoints need none."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # these are tokens already


class Sft(_Own, PorosTrainer):
    """The trainer of examples: transformers', with the loss of the model itself.

    TRL's reads the head for each micro-batch, and the host waits for its entropy and accuracy. The
    model's is computed in slices of the head, which come once for all micro-batches.
    """

    _num_tokens: torch.Tensor | int = 0

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; counts the tokens, without waiting for the device."""
        mask = inputs.get("attention_mask")
        self._num_tokens += inputs["input_ids"].numel() if mask is None else mask.sum()
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's own, with ``num_tokens`` since the start, as TRL's loss has it."""
        if "loss" in logs:
            logs["num_tokens"] = float(self._num_tokens)
        super().log(logs, *args, **kwargs)


class Dpo(_Own, BlockMajorMixin, DPOTrainer):
    """TRL's trainer of preferences; the reference is the model without its adapter."""


class Kto(_Own, BlockMajorMixin, KTOTrainer):
    """TRL's trainer of answers that are good or bad; its reference is that of ``Dpo``."""

    def _prepare_dataset(self, dataset: Any, tokenizer: Any, args: Any, name: str) -> Any:
        """As TRL's own for rows of tokens: add the answer of the KL term to each row."""

        def finish(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            rows["label"] = [bool(label) for (label,) in rows["label"]]
            if self.calculate_KL:
                answers = rows["completion_ids"]
                rows["KL_completion_ids"] = answers[-1:] + answers[:-1]
            return rows

        return dataset.map(finish, batched=True, batch_size=args.per_device_train_batch_size)


class Reward(_Own, BlockMajorMixin, RewardTrainer):
    """TRL's trainer of reward models."""


class Stopping(TrainerCallback):
    """Ends a run at the next step, with a checkpoint, when a signal comes."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for the body; a second one acts as it always does."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = {each: signal.signal(each, self._came) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint of a run that goes on, wherever its folder is now."""
        note_best(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.signal is not None:
            control.should_save = control.should_training_stop = True
        return control

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        print(
            "\nporos: the run stops behind this step, with a checkpoint; a second signal stops it "
            "now, and loses the steps since the last one",
            file=sys.stderr,
        )


@dataclass
class _PackedRows:
    """Collates packed rows: documents side by side, all rows of one length.

    Attributes:
        attention: The implementation that the model trains with.
        num_documents: Those of a batch, at most. Packed attention gets as many boundaries for each
            batch, so that shapes do not differ from batch to batch; padding is one document more.
    """

    collate: DataCollatorForLanguageModeling
    attention: str | None
    num_documents: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = self.collate(rows)
        is_packed = self.attention == packed_attention.NAME
        if not is_packed and packed_attention.takes_cu_seqlens(self.attention):
            return found
        # The shapes of the others differ from batch to batch, and attention does not read them.
        found = {name: found[name] for name in ("input_ids", "labels", "position_ids")}
        if is_packed:
            length = found["input_ids"].shape[1]
            ends = torch.full((self.num_documents + 2,), length, dtype=torch.int32)
            lengths = torch.tensor([0, *(each for row in rows for each in row["seq_lengths"])])
            ends[: len(lengths)] = lengths.cumsum(0)
            found |= {"cu_seq_lens_q": ends, "max_length_q": length}
        return found


def make_trainer(
    recipe: Recipe,
    arguments: TrainingArguments,
    model: Any,
    tokenizer: "PreTrainedTokenizerBase | ProcessorMixin",
    train: "Dataset",
    validation: "Dataset | None",
    *,
    row_length: int,
    num_documents: int = 0,
    images: ImageCollator | None = None,
) -> Trainer:
    """Build the trainer of a recipe.

    Args:
        model: The model with its adapter, prepared or resident.
        tokenizer: The processor, for rows with images.
        train: Rows of tokens, packed if the recipe says so.
        row_length: Tokens of a packed row.
        num_documents: Those of a packed row, at most.

    Raises:
        RecipeError: If TRL refuses settings for this model.
    """
    training = recipe.training
    options: dict[str, Any] = {
        "args": arguments,
        "train_dataset": train,
        "eval_dataset": validation,
        "processing_class": tokenizer,
    }
    with _own_dtypes(model, recipe.adapter.dtype), refusals("training", "TRL"):
        if training.method == "sft" and images is not None:
            trainer: Any = Sft(model, data_collator=images.padded, **options)
        elif training.method == "sft":
            pad = tokenizer.pad_token_id
            collator = _collator(recipe, model, pad, row_length, num_documents)
            trainer = Sft(model, data_collator=collator, **options)
        elif training.method == "reward":
            trainer = Reward(model, **options)
        else:
            # Without a reference TRL copies the adapter, as if it had been trained before.
            nothing: Any = nn.Identity()
            nothing.config = model.config
            trainer = {"dpo": Dpo, "kto": Kto}[training.method](model, nothing, **options)
            trainer.ref_model = None
    trainer.recipe = recipe
    if training.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(training.early_stopping_patience))
    return trainer


def _collator(recipe: Recipe, model: Any, pad: int, row_length: int, num_documents: int = 0) -> Any:
    if not recipe.is_packed:
        return DataCollatorForLanguageModeling(
            pad, pad_to_multiple_of=recipe.training.pad_to_multiple_of
        )
    # All rows of a micro-batch become one.
    length = row_length * recipe.training.per_device_train_batch_size
    collate = DataCollatorForLanguageModeling(pad, padding_free=True, pad_to_multiple_of=length)
    number = num_documents * recipe.training.per_device_train_batch_size
    return _PackedRows(collate, attention_of(model), number)


def logging_steps(steps: int) -> int:
    """From one log to the next, if a recipe says nothing: 20 logs of a run at least, if it can be.

    To log a loss the host waits for the step, and the device for the next one to begin.
    """
    return max(1, min(10, steps // 20))


def make_arguments(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    steps: int,
    *,
    has_validation: bool,
    has_bar: bool = False,
) -> TrainingArguments:
    """Build TRL's configuration of a recipe's method, for so many optimizer steps.

    Raises:
        RecipeError: If TRL or transformers refuse settings, or an optimizer or a place for reports
            needs a package that is not there.
    """
    training = recipe.training
    is_cpu = device.type == "cpu"
    fields: dict[str, Any] = {
        "per_device_eval_batch_size": training.per_device_train_batch_size,
        "eval_strategy": "no",
        "logging_steps": logging_steps(steps),
        "logging_first_step": True,
        "report_to": [],
        "disable_tqdm": not has_bar,
        "dataloader_pin_memory": not is_cpu,
        # By the lengths of rows batches may be made; collators take what they know.
        "remove_unused_columns": False,
        # The host would wait for all that was queued before the copy.
        "accelerator_config": {"non_blocking": not is_cpu},
    }
    if has_validation:
        fields["eval_strategy"] = "epoch" if training.eval_steps is None else "steps"
    fields |= recipe.as_dict()["training"]
    # TRL would replace the loss, and code of transformers for the whole process.
    for own in (*_OURS, *hub.SETTINGS, "use_liger_kernel"):
        fields.pop(own, None)
    is_stopped_early = training.early_stopping_patience is not None
    if is_stopped_early:
        fields["load_best_model_at_end"] = True  # the last steps have made nothing better
    with refusals("training", "TRL"):
        arguments: TrainingArguments = config_of(training.method)(
            **fields
            | {
                "output_dir": str(folder),
                "warmup_steps": num_warmup_steps(recipe, steps),
                "bf16": recipe.is_autocast(device.type),
                "fp16": False,
                "use_cpu": is_cpu,
                # A loss that is no number is logged as it is, also of an evaluation. To replace it,
                # the host would have to wait for each micro-batch.
                "logging_nan_inf_filter": False,
                # Early stopping has counted the validations before an interruption.
                "restore_callback_states_from_checkpoint": is_stopped_early,
                # A streamed layer is recomputed as it is.
                "gradient_checkpointing": False,
            }
        )
        _try_parts(arguments, steps)
    arguments = on_one_gpu(arguments)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # they have made the first GPU the current one
    return arguments


def _try_parts(arguments: TrainingArguments, steps: int) -> None:
    """Build what the Trainer builds once the base is there, so that it is refused before that."""
    missing = {*arguments.report_to} - {*get_available_reporting_integrations()}
    if missing:
        raise ImportError(f"report_to: the package of {', '.join(sorted(missing))} is not there")
    Trainer.get_optimizer_cls_and_kwargs(arguments)
    get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate),
        num_warmup_steps=int(arguments.warmup_steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


def require_metric(recipe: Recipe, held_out: Tokens) -> None:
    """Refuse a metric of KTO that no batch of the rows to validate on gives.

    TRL has those of good and of bad answers from batches that hold such, margins from batches with
    both.

    Raises:
        RecipeError: With the answers that there have to be.
    """
    training = recipe.training
    metric = training.more.get("metric_for_best_model") or ""
    wanted = {"chosen": {1}, "rejected": {0}, "margins": {0, 1}}.get(metric.rpartition("/")[2])
    if training.method != "kto" or wanted is None:
        return
    size = training.more.get("per_device_eval_batch_size", training.per_device_train_batch_size)
    labels = [label for (label,) in held_out.columns["label"]]
    batches = ({*labels[first : first + size]} for first in range(0, len(labels), size))
    if not any(wanted <= each for each in batches):
        answers = " and ".join(("bad", "good")[each] for each in sorted(wanted))
        raise RecipeError(
            "training.metric_for_best_model: expected a metric that the rows to validate on give, "
            f"found {metric}, for which a batch of {size} has to hold {answers} answers; add such "
            "rows to data.validation, or choose another metric, such as loss"
        )


@contextmanager
def _own_dtypes(model: nn.Module, dtype: str) -> Iterator[None]:
    """Keep adapters in the dtype of the recipe, against the trainer's casts.

    TRL casts those of a 4-bit base to bfloat16, in which small updates of a weight are lost.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    if dtype == "bfloat16":
        for parameter in trained:
            parameter.data = parameter.data.to(torch.bfloat16)
    before = [parameter.data for parameter in trained]
    yield
    for parameter, data in zip(trained, before, strict=True):
        parameter.data = data


def num_steps(num_rows: int, recipe: Recipe) -> int:
    """Count the optimizer steps of a run over so many rows, packed or not, as the Trainer does."""
    training = recipe.training
    if training.max_steps is not None:
        return training.max_steps
    is_cut = training.more.get("dataloader_drop_last", False)
    size = training.per_device_train_batch_size
    micro_batches = num_rows // size if is_cut else -(-num_rows // size)
    per_epoch = -(-micro_batches // training.gradient_accumulation_steps)
    return math.ceil(training.num_train_epochs * max(1, per_epoch))


def few_updates(recipe: Recipe, steps: int) -> list[str]:
    """Return notes for a run of few optimizer steps."""
    training, notes = recipe.training, []
    together = training.gradient_accumulation_steps
    if steps < _FEW_UPDATES and training.max_steps is None and together > 1:
        few = f"few updates of the adapter: {steps} in all"
        notes.append(f"{few}; a smaller --accumulation or more --epochs give more")
    warmup = num_warmup_steps(recipe, steps)
    if warmup >= steps:
        within = f"{counted(steps, 'step')} in all, within the warm-up of {warmup}"
        notes.append(f"{within}: the learning rate does not reach its peak (--warmup)")
    return notes


def num_warmup_steps(recipe: Recipe, steps: int) -> int:
    """Count the steps of the warm-up. The rate of the first of them is 0."""
    given = recipe.training.warmup_steps
    share = given * steps if given < 1 else given
    return math.ceil(share) if share >= 1 else 0  # a run of few steps has none to lose
