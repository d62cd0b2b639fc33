"""A run, from its recipe to its adapter."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import poros
from poros.finetune.folder import RunFolder
from poros.finetune.panel import Panel, duration
from poros.finetune.screen import forecast
from poros.finetune.stopping import StopAtStep
from poros.finetune.tokens import tokenizer_of
from poros.finetune.trainers import adapter_config, make_trainer, require_packages
from poros.recipes.recipe import Recipe
from poros.recipes.sources import Data
from poros.telemetry import log_streaming


def folder_of(recipe: Recipe) -> Path:
    """Where the run goes: ``out``, or ``runs`` and the names of model and data."""
    if recipe.out is not None:
        return Path(recipe.out).expanduser()
    names = (Path(recipe.model).name, Path(recipe.data).stem)
    return Path("runs") / "-".join(names)


def finetune(
    recipe: Recipe,
    data: Data,
    show: Callable[[str], None],
    *,
    trace_step: int | None = None,
) -> Path | None:
    """Train, from the beginning or from where the folder's run has come to.

    Args:
        recipe: Right in itself.
        data: Its rows.
        show: Takes each line that is to be read.
        trace_step: Is recorded: see ``poros.log_streaming``.

    Returns:
        The folder of the adapter; None if the run was asked to stop, and can go on.

    Raises:
        RecipeError: If model, template and rows do not fit.
        RunFolderError: If the run's folder is another run's, or has a result.
        MissingPackageError: If TRL or another library is not installed.
        VRAMBudgetError: If it does not fit.

        And what ``poros.load`` and ``poros.prepare`` raise. Nothing is written before training
        begins, but for the recipe.
    """
    require_packages(recipe)
    folder = RunFolder(folder_of(recipe), recipe)
    folder.require_usable()
    tokenizer = tokenizer_of(recipe, data.rows.is_conversational)
    rows, validation = _split(recipe, data)
    num_steps = _num_steps(recipe, len(rows))
    for line in forecast(recipe, num_steps, len(rows)):
        show(line)
    checkpoint = folder.begin()
    if checkpoint is not None:
        show(f"going on from {checkpoint.name}")

    from transformers import set_seed

    set_seed(recipe.training.seed)
    model = _model(recipe, show)
    trainer = make_trainer(recipe, model, tokenizer, rows, validation, folder.path, num_steps)
    log_streaming(trainer, folder.events, trace_step=trace_step)
    panel = Panel(show, lambda: trainer.data_collator.num_tokens)
    stop = StopAtStep()
    trainer.add_callback(panel)
    trainer.add_callback(stop)
    try:
        with stop.listening():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        panel.close()
    if stop.was_asked and trainer.state.global_step < trainer.state.max_steps:
        show(f"stopped at step {trainer.state.global_step}; the same command goes on from there")
        return None
    folder.finish(lambda part: _save(model, tokenizer, part))
    _show_end(recipe, folder, panel, show)
    return folder.adapter


def _model(recipe: Recipe, show: Callable[[str], None]) -> Any:
    """The base with its adapter, streamed or on the device as a whole."""
    from peft import get_peft_model

    quantization = None if recipe.quantization == "none" else recipe.quantization
    options: dict[str, Any] = {}
    if recipe.host_memory is not None:
        options["host_budget"] = recipe.host_memory
    path = Path(recipe.model)
    source = str(path.resolve()) if path.exists() else recipe.model
    model = get_peft_model(
        poros.load(source, quantization=quantization, **options), adapter_config(recipe)
    )
    policy: dict[str, Any] = {"vram_budget": recipe.vram}
    if recipe.placement == "resident":
        # With every layer and every matrix on the device nothing moves, and nothing is recomputed.
        number = model.config.get_text_config().num_hidden_layers
        policy = {"slots": max(2, number), "keep_last": number, "stream_embedding": False}
        policy["stream_head"] = False
    return poros.prepare(model, **policy, allow_unvalidated=recipe.allow_untested)


def _split(recipe: Recipe, data: Data) -> tuple[Any, Any]:
    """Rows to train on, and to validate with, or None."""
    from datasets import Dataset

    rows = Dataset.from_list(data.rows.rows)
    if data.validation is not None:
        return rows, Dataset.from_list(data.validation.rows)
    if recipe.validation is None:
        return rows, None
    number = min(max(1, round(float(recipe.validation) * len(rows))), len(rows) - 1)
    parts = rows.train_test_split(test_size=number, seed=recipe.training.seed)
    return parts["train"], parts["test"]


def _num_steps(recipe: Recipe, num_rows: int) -> int:
    """Optimizer steps; with packing at most."""
    if recipe.training.steps is not None:
        return recipe.training.steps
    batches = math.ceil(num_rows / recipe.training.batch_size)
    return math.ceil(math.ceil(batches / recipe.training.accumulation) * recipe.training.epochs)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _show_end(recipe: Recipe, folder: RunFolder, panel: Panel, show: Callable[[str], None]) -> None:
    lines: Sequence[str] = (
        f"done: {panel.num_steps} steps in {duration(panel.seconds)}",
        f"adapter: {folder.adapter}",
        "use it:",
        "    from peft import AutoPeftModelForCausalLM",
        f"    model = AutoPeftModelForCausalLM.from_pretrained({str(folder.adapter)!r})",
    )
    for line in lines:
        show(line)
