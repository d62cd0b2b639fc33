"""TRL's trainers for a recipe, with accumulation that goes through the blocks together."""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

from poros.accumulation.trainer import BlockMajorMixin
from poros.errors import MissingPackageError, RecipeError, quoted
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from pathlib import Path

_PAD_TO = 64
"""Tokens. Lengths that recur can be replayed."""
_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lora_plus": "adamw_torch_fused",
    "schedule_free": "schedule_free_adamw",
}
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What attention of sequences of several lengths takes, and no other."""


def require_packages(recipe: Recipe) -> None:
    """Raise ``MissingPackageError`` if something that a recipe needs is not installed."""
    from importlib.util import find_spec

    wanted = ["trl", "datasets"]
    if recipe.training.optimizer == "schedule_free":
        wanted.append("schedulefree")
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"expected the package {', '.join(missing)}, found none. "
            "Run: pip install 'poros-runtime[finetune]'"
        )


def adapter_config(recipe: Recipe) -> Any:
    """PEFT's configuration of a recipe's adapter."""
    from peft import LoraConfig

    adapter = recipe.adapter
    modules = adapter.target_modules
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha if adapter.alpha is not None else 2 * adapter.rank,
        lora_dropout=adapter.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        use_rslora=adapter.kind == "rslora",
        use_dora=adapter.kind == "dora",
        task_type="CAUSAL_LM",
    )


@cache
def trainer_class(task: str) -> Any:
    """TRL's trainer for a task, with micro-batches that go through the blocks together."""
    import trl

    if task == "dpo":
        return type("DPOTrainer", (BlockMajorMixin, trl.DPOTrainer), {})

    class SFTTrainer(BlockMajorMixin, trl.SFTTrainer):
        """TRL's own loss also measures entropy and accuracy, for which the host waits each time."""

        def compute_loss(
            self,
            model: Any,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            """The loss of the model itself, which is computed in slices of the vocabulary."""
            inputs["use_cache"] = False
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    return SFTTrainer


def make_trainer(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    rows: Any,
    validation: Any,
    out: "Path",
    num_steps: int | None,
) -> Any:
    """The trainer of a recipe.

    Args:
        recipe: Of the run.
        model: With adapters, prepared or on the device as a whole.
        tokenizer: With its chat template.
        rows: A ``datasets.Dataset`` of rows of one format.
        validation: Likewise, or None.
        out: Where checkpoints go.
        num_steps: Of the run, if it is known: for how often checkpoints are saved.

    Raises:
        RecipeError: If TRL cannot train on these rows with this template.
    """
    is_cpu = model.device.type == "cpu"
    try:
        trainer = trainer_class(recipe.task)(
            model=model,
            args=_arguments(recipe, rows, out, is_cpu, num_steps, has_validation=bool(validation)),
            train_dataset=rows,
            eval_dataset=validation,
            processing_class=tokenizer,
            optimizers=(_optimizer(recipe, model), None),
        )
    except (ValueError, RuntimeError) as error:
        if "chat template" not in str(error) and "assistant" not in str(error):
            raise
        reason = str(error).split("\n")[0]
        raise RecipeError(
            "loss_on: expected a chat template that marks what the assistant says, found one that "
            f"does not ({quoted(reason, is_bare=True)}); write chat_template: chatml, or loss_on: "
            "everything"
        ) from error
    if len(trainer.train_dataset) == 0:
        raise RecipeError(
            f"data: expected rows with an answer within {recipe.max_length} tokens, found none; "
            "raise max_length, or shorten the prompts"
        )
    _restore_dtype(recipe, model)
    trainer.remove_callback(PrinterCallback)
    trainer.data_collator = Collator(trainer.data_collator, _takes_lengths(model))
    return trainer


def _restore_dtype(recipe: Recipe, model: Any) -> None:
    """TRL casts what trains over a 4-bit base to bfloat16, where small updates are lost."""
    dtype = torch.float32 if recipe.adapter.dtype == "float32" else torch.bfloat16
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _optimizer(recipe: Recipe, model: Any) -> Any:
    """The optimizer, where it is not one that TrainingArguments know by name."""
    if recipe.training.optimizer != "lora_plus":
        return None
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=recipe.learning_rate,
        loraplus_lr_ratio=recipe.training.loraplus_ratio,
        weight_decay=recipe.training.weight_decay,
    )


def _arguments(
    recipe: Recipe,
    rows: Any,
    out: "Path",
    is_cpu: bool,
    num_steps: int | None,
    *,
    has_validation: bool,
) -> TrainingArguments:
    import trl

    training = recipe.training
    save_every = training.save_every or max(1, math.ceil((num_steps or 100) / 10))
    is_free = training.optimizer == "schedule_free"
    common: dict[str, Any] = {
        "output_dir": str(out),
        "num_train_epochs": training.epochs,
        "max_steps": training.steps or -1,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.accumulation,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "constant" if is_free else training.schedule,
        "warmup_steps": 0 if is_free else training.warmup,
        "optim": _OPTIMIZERS[training.optimizer],
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        "logging_steps": training.log_every,
        "save_steps": save_every,
        "save_total_limit": 2,
        "eval_strategy": "steps" if has_validation else "no",
        "eval_steps": save_every,
        "max_length": recipe.max_length,
        "pad_to_multiple_of": _PAD_TO,
        # The base is in 16 bit as it is, and layers are recomputed anyway.
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": is_cpu,
        "dataloader_pin_memory": not is_cpu,
    }
    if recipe.task == "dpo":
        return trl.DPOConfig(**common, beta=recipe.beta)
    is_messages = "messages" in rows.column_names
    answers = recipe.loss_on == "answers"
    return trl.SFTConfig(
        **common,
        packing=recipe.packs,
        eval_packing=False,
        assistant_only_loss=answers and is_messages,
        completion_only_loss=answers and "completion" in rows.column_names,
    )


def _takes_lengths(model: Any) -> bool:
    """Whether the model's attention takes the lengths of packed rows as such."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))


class Collator:
    """TRL's own, which counts tokens, and leaves out what attention with a mask does not take.

    For packed rows transformers makes the mask from the positions, in which each row begins at 0: a
    row sees itself alone. Their lengths, new values in each batch, would go to every layer.

    Attributes:
        num_tokens: Of all batches so far.
    """

    def __init__(self, own: Any, takes_lengths: bool) -> None:
        self._own = own
        self._left_out = () if takes_lengths else _VARLEN
        self.num_tokens = 0

    def __call__(self, rows: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._own(rows)
        self.num_tokens += found["input_ids"].numel()
        return {key: value for key, value in found.items() if key not in self._left_out}
