"""TRL's trainers with block-major accumulation, on rows that are tokens already.

Note: What is never learnt
    Padding gets labels of -100 in the collators, by where it is and not by which token it is made
    of, so a model whose padding token is its end of text still learns to end. So does the first
    token of each document in a packed row, which nothing but another document comes before.

Note: Packed rows
    See ``poros.finetune.packing``. Padding at their end has position 0 throughout: each token of it
    is a document of its own, which no other sees.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LabelSmoother
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from poros.accumulation.trainer import BlockMajorMixin
from poros.finetune.attention import takes_cu_seqlens
from poros.finetune.checkpoints import StagedCheckpoints
from poros.head.regularized import RegularizedLoss
from poros.model.stats import attention_of
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "schedule_free_adamw": "schedule_free_adamw",
    "sgd": "sgd",
}
"""Names of recipes, as ``TrainingArguments.optim`` has them."""
_Arguments = TypeVar("_Arguments", bound=TrainingArguments)
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class _Own(StagedCheckpoints):
    """The base of both trainers."""

    recipe: Recipe

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's own. A loss that is no number is no part of those after it."""
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

    def _set_signature_columns_if_needed(self) -> None:
        """As the trainer's own; with the lengths of rows, by which batches may be made."""
        trainer: Any = self
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if trainer.args.length_column_name not in trainer._signature_columns:
            trainer._signature_columns.append(trainer.args.length_column_name)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card: PEFT writes one beside the adapter, and checkpoints need none."""


class Sft(_Own, BlockMajorMixin, SFTTrainer):
    """TRL's trainer of examples, with the loss of the model itself.

    TRL's own reads the head for each micro-batch, and the host waits for its entropy and accuracy.
    The model's is computed in slices of the head, which come once for all micro-batches.
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

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As ``transformers.Trainer`` does."""
        inputs["use_cache"] = False
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


class Dpo(_Own, BlockMajorMixin, DPOTrainer):
    """TRL's trainer of preferences; the reference is the model without its adapter."""

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # these are tokens already


class _NoModel(nn.Module):
    """A placeholder for the reference model while ``DPOTrainer`` is built.

    Without one it copies the adapter of the model into a second, as if it had been trained before.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self) -> None:
        raise RuntimeError("expected the model without its adapter to be the reference")


@dataclass
class _PackedRows:
    """Collates packed rows: documents side by side, all rows of one length."""

    collate: DataCollatorForLanguageModeling
    has_cu_seqlens: bool

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = self.collate(rows)
        if not self.has_cu_seqlens:
            # Their shapes differ from batch to batch, and this attention does not read them.
            for name in _VARLEN:
                found.pop(name, None)
        return found


def make_trainer(
    recipe: Recipe,
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    train: "Dataset",
    validation: "Dataset | None",
    folder: Path,
    *,
    row_length: int,
    device: torch.device,
) -> Trainer:
    """Build the trainer of a recipe.

    Args:
        recipe: How it trains.
        model: With its adapter; prepared, or resident.
        tokenizer: Saved with each checkpoint; its padding token fills rows.
        train: Rows of tokens, packed if the recipe says so.
        validation: The same, or None.
        folder: Of the run.
        row_length: Tokens of a packed row.
        device: Where the model trains.
    """
    is_dpo = recipe.training.method == "dpo"
    arguments = _arguments(
        recipe, folder, device, num_steps(len(train), recipe), has_validation=validation is not None
    )
    options: dict[str, Any] = {
        "args": arguments,
        "train_dataset": train,
        "eval_dataset": validation,
        "processing_class": tokenizer,
    }
    pad = tokenizer.pad_token_id
    with _own_dtypes(model, recipe.adapter.dtype):
        if is_dpo:
            trainer: Any = Dpo(
                model,
                _NoModel(model.config),
                data_collator=DataCollatorForPreference(
                    pad, pad_to_multiple_of=recipe.data.pad_to, max_length=recipe.data.max_length
                ),
                **options,
            )
            trainer.ref_model = None
        else:
            trainer = Sft(model, data_collator=_collator(recipe, model, pad, row_length), **options)
            smoothing, z_loss = recipe.training.label_smoothing, recipe.training.z_loss
            if smoothing or z_loss:
                own = LabelSmoother(epsilon=smoothing) if smoothing else None
                trainer.label_smoother = RegularizedLoss(own, z_loss or 0.0)
    trainer.recipe = recipe
    trainer.remove_callback(PrinterCallback)
    return trainer


def _collator(recipe: Recipe, model: Any, pad: int, row_length: int) -> Any:
    if not recipe.is_packed:
        return DataCollatorForLanguageModeling(pad, pad_to_multiple_of=recipe.data.pad_to)
    # All rows of a micro-batch become one.
    length = row_length * recipe.training.batch_size
    collate = DataCollatorForLanguageModeling(pad, padding_free=True, pad_to_multiple_of=length)
    return _PackedRows(collate, has_cu_seqlens=takes_cu_seqlens(attention_of(model)))


def _arguments(
    recipe: Recipe, folder: Path, device: torch.device, steps: int, *, has_validation: bool
) -> SFTConfig | DPOConfig:
    training, output = recipe.training, recipe.output
    is_free = training.optimizer.startswith("schedule_free")
    evaluate: dict[str, Any] = {"eval_strategy": "no"}
    if has_validation:
        evaluate["eval_strategy"] = "epoch" if output.evaluate_every is None else "steps"
        evaluate["eval_steps"] = output.evaluate_every
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": training.epochs,
        "max_steps": training.steps or -1,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.accumulation,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "constant" if is_free else training.schedule,
        # Schedule-free optimizers have a warmup of their own, and take a number of steps only.
        "warmup_steps": math.ceil(training.warmup * steps) if is_free else training.warmup,
        "optim": OPTIMIZERS[training.optimizer],
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        "save_strategy": "steps",
        "save_steps": output.save_every,
        "save_total_limit": output.keep,
        "logging_steps": 1,
        "logging_first_step": True,
        # A loss that is no number is logged as it is, also of an evaluation. To replace it, the
        # host would have to wait for each micro-batch.
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type != "cpu",
        "bf16": recipe.is_autocast(device.type),
        "fp16": False,
        # A streamed layer is recomputed as it is.
        "gradient_checkpointing": False,
        **evaluate,
    }
    arguments: SFTConfig | DPOConfig
    if training.method == "dpo":
        arguments = DPOConfig(beta=training.beta, max_length=recipe.data.max_length, **common)
    else:
        arguments = SFTConfig(
            max_length=None,
            packing=False,  # done
            dataset_kwargs={"skip_prepare_dataset": True},
            **common,
        )
    return on_one_gpu(arguments)


def on_one_gpu(arguments: _Arguments) -> _Arguments:
    """``arguments`` for a Trainer that leaves other GPUs of the machine alone.

    Where several are visible, the Trainer of a process that no launcher has started would wrap the
    model in ``nn.DataParallel``, and its arguments have no field against it.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


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
    """Count the optimizer steps of a run, as the Trainer does."""
    training = recipe.training
    if training.steps is not None:
        return training.steps
    micro_batches = -(-num_rows // training.batch_size)
    per_epoch = -(-micro_batches // training.accumulation)
    total = training.epochs * per_epoch
    return int(total) + (total > int(total))
