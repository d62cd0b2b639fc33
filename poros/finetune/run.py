"""Trains the adapter of a checked recipe."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import is_offline_mode
from trl import pack_dataset

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.errors import PorosError, RecipeError, UnsupportedModelError, quoted
from poros.finetune import summary
from poros.finetune.adapters import adapter_config, require_targets
from poros.finetune.checkpoints import best_of, has_stopped_early, numbered
from poros.finetune.data import Rows
from poros.finetune.images import image_dataset, load_processor, require_images
from poros.finetune.liger import choose_liger, use_liger
from poros.finetune.packing import choose_attention, keeps_apart, require_attention
from poros.finetune.resuming import (
    HELD_OUT,
    TOKENS,
    RunFolder,
    finished,
    inspect_run_dir,
    lock_run_dir,
    machine,
    require_base,
)
from poros.finetune.summary import Size
from poros.finetune.tokens import Tokens, image_collator, load_tokenizer, tokenize
from poros.finetune.trainers import (
    Stopping,
    few_updates,
    make_arguments,
    make_trainer,
    num_steps,
    require_metric,
)
from poros.io.writing import partial_folder, put_in_place, writing
from poros.kernels import packed_attention
from poros.kernels.nf4 import DTYPES
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.settings import (
    CLASSIFIER,
    configuration,
    model_class_of,
    refuse_classifier,
    stored_quantization,
)
from poros.loaders.source import find_config
from poros.loaders.store import is_store, open_store
from poros.loaders.tokenizer import require_known_tokens, tokenizer_errors
from poros.model.inspect import find_layers
from poros.planning.meta_model import meta_model
from poros.recipes.passing import refusals
from poros.recipes.recipe import Recipe
from poros.reporting.telemetry import log_streaming
from poros.utils.devices import default_device, usable_device

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from rich.console import Console
    from transformers import PreTrainedConfig, Trainer

    from poros.planning.planner import Planner


class Interrupted(PorosError, InterruptedError):
    """A signal ended the run; the same command resumes it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def finetune(
    recipe: Recipe,
    train: Rows,
    validation: Rows | None,
    console: "Console",
    *,
    is_dry: bool = False,
    num_shown: int = 0,
) -> Path | None:
    """Train an adapter by a checked recipe on checked rows, or resume an interrupted run.

    Args:
        is_dry: Stop before the base is loaded; nothing is written.
        num_shown: Rows to print with what is learnt marked; then stop, unless ``is_dry``.

    Returns:
        The folder of the adapter, or None for a dry run.

    Exactness:
        Losses and adapter are bit for bit those of the same recipe with ``memory.resident``, and
        of a run that was never interrupted; on the same machine, software and number of threads.

    Raises:
        CheckpointFormatError, UnsupportedModelError: If the model or its tokenizer cannot be used.
        RecipeError: If the model does not have what settings name, or a library refuses them.
        DataFormatError: If rows cannot be rendered by the chat template, or nothing can be learnt.
        VRAMBudgetError: If a step does not fit.
        RunFolderError: If another process trains in the folder, or the run in it cannot be gone on
            with: it was begun with something else, or what it has written is damaged.
        StoreWriteError: If a checkpoint or the adapter cannot be written; those before it are left.
        Interrupted: If SIGINT or SIGTERM came; a checkpoint was written.
    """
    device = _device(recipe)
    given = recipe
    config, adapter, notes = _configuration(recipe)
    has_images = train.has_images or bool(validation and validation.has_images)
    if has_images:
        require_images(recipe, config)
    recipe, fitted, vocab_size = _fit_to_model(recipe, config, has_images=has_images)
    recipe, kernels = choose_liger(recipe, config, device)
    processor = load_processor(recipe) if has_images else None
    tokenizer = load_tokenizer(recipe, train.form, processor)
    images = None if processor is None else image_collator(processor, recipe)
    source = Path(recipe.model.source).expanduser()
    if source.exists() or is_offline_mode():  # else it is fetched from the hub when it is loaded
        with open_store(source) if is_store(source) else Checkpoint.open(source):
            pass  # all files are there, and their headers right, before rows become tokens
    rows = {
        name: each.settled(has_template=bool(tokenizer.chat_template))
        for name, each in {TOKENS: train, HELD_OUT: validation}.items()
        if each is not None
    }
    with tokenizer_errors(recipe.model.source):
        every = {name: tokenize(each, tokenizer, recipe, images) for name, each in rows.items()}
    if HELD_OUT in every:
        require_metric(recipe, every[HELD_OUT])
    largest = max(each.largest for each in every.values())
    require_known_tokens(largest, vocab_size, recipe.model.source)
    tokens = every[TOKENS]
    if num_shown:
        summary.show_rows(console, num_shown, rows[TOKENS], tokens, tokenizer)
        if not is_dry:
            return None
    row_length = _row_length(recipe, tokens)
    digests = {name: each.digest() for name, each in every.items()}
    computed_on = machine(device, has_liger=recipe.training.use_liger_kernel is True)
    run = inspect_run_dir(given, digests, computed_on, trains=not is_dry)
    datasets = {
        name: _dataset(recipe, each, row_length, rows[name] if has_images else None)
        for name, each in every.items()
    }
    dataset, evaluated = datasets[TOKENS], datasets.get(HELD_OUT)
    num_documents = 0
    if recipe.is_packed:
        every_row = (row for each in datasets.values() for row in each["seq_lengths"])
        num_documents = max(map(len, every_row))
        recipe = choose_attention(recipe, config, device, num_documents, row_length)
    size = Size(
        row_length=row_length,
        num_rows=len(dataset),
        num_steps=num_steps(len(dataset), recipe),
        num_validation=len(every[HELD_OUT].lengths) if HELD_OUT in every else 0,
    )
    if (recipe.output.trace_step or 0) > size.num_steps:
        raise RecipeError(
            f"output.trace_step (--trace-step): expected one of the run's {size.num_steps} steps, "
            f"found {recipe.output.trace_step}; lower it, or train for longer"
        )
    arguments = make_arguments(
        recipe,
        run.path,
        device,
        size.num_steps,
        has_validation=evaluated is not None,
        has_bar=console.is_terminal,
    )
    notes += [*fitted, *few_updates(recipe, size.num_steps), *run.notes]
    if train.unused:
        notes.append(f"keys that nothing reads: {', '.join(train.unused)}")
    if run.checkpoint is not None:
        what = "finished" if finished(given) else "going on"
        if has_stopped_early(run.checkpoint):
            what = "ended by early stopping"
        notes.append(f"{what} after step {run.step} of {size.num_steps}")
    planner = summary.planner_of(recipe, config, adapter)
    plan = summary.planned(recipe, size, planner, device)
    summary.show(console, recipe, plan, size, rows[TOKENS], tokens, kernels, notes)
    if is_dry:
        return None
    with lock_run_dir(given, digests, computed_on) as run:
        model = _model(recipe, adapter, device, run, planner)
        trainer = make_trainer(
            *(recipe, arguments, model, processor or tokenizer, dataset, evaluated),
            row_length=row_length,
            num_documents=num_documents,
            images=images,
        )
        return _train(recipe, run, trainer, size.num_steps)


def _device(recipe: Recipe) -> torch.device:
    chosen = recipe.memory.device
    device = default_device() if chosen is None else usable_device(chosen)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where the Trainer trains
    return device


def _configuration(recipe: Recipe) -> "tuple[PreTrainedConfig, PeftConfig, list[str]]":
    """Read the model's configuration, and check that the model has what the recipe names.

    Returns:
        The configuration, of the model that is trained; that of the adapter; and notes.
    """
    chosen, model_class = recipe.model, None
    options: dict[str, Any] = {}
    packed_attention.register()
    if chosen.attention is not None:
        require_attention(chosen.attention)
        options["attn_implementation"] = chosen.attention
    is_reward = recipe.training.method == "reward"
    if is_reward:
        options["num_labels"] = 1
    path, texts = find_config(Path(chosen.source).expanduser())
    config = configuration(path, texts, options)
    stored_quantization(path, config)  # raises if Poros cannot read it
    if is_reward:
        model_class, config = model_class_of(config, CLASSIFIER)
        config.architectures = [model_class.__name__]
    else:
        try:
            refuse_classifier(config, path)
        except UnsupportedModelError as error:
            raise RecipeError(f"model.source: {error}") from error
    try:
        base = meta_model(config, None, DTYPES[chosen.dtype], model_class=model_class)
    except UnsupportedModelError as error:
        named = "" if chosen.attention is None else "model.attention (--attention): "
        raise RecipeError(f"{named}{error}") from error
    find_layers(base)  # raises if there are none that can be streamed
    adapter = adapter_config(recipe, base)
    return config, adapter, require_targets(recipe, base, adapter)


def _fit_to_model(
    recipe: Recipe, config: "PreTrainedConfig", *, has_images: bool
) -> tuple[Recipe, list[str], int | None]:
    """Fit the recipe to the model: its positions, and whether rows can be packed.

    Returns:
        The recipe, notes, and the number of tokens that the model knows.
    """
    training, notes = recipe.training, []
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < training.max_length:
        notes.append(f"rows are cut at the model's {most} positions")
        multiple = training.pad_to_multiple_of
        training = replace(training, max_length=max(most - most % multiple, min(most, multiple)))
    why = "TRL packs none with images" if has_images else ""
    if not keeps_apart(config, recipe.model.attention):
        why = (
            f"a {config.model_type} with this attention is none of the models that are known to "
            "keep the documents of a row apart"
        )
    if recipe.is_packed and why:
        notes.append(f"rows are not packed: {why}")
        training = replace(training, packing=False)
    recipe = replace(recipe, training=training)
    if recipe.model.attention == packed_attention.NAME and not recipe.is_packed:
        raise RecipeError(
            "model.attention: expected rows that are packed, of a model whose layers "
            f"{packed_attention.NAME!r} fits, found {'; '.join(notes) or training.method}; for the "
            "default leave it out (--attention)"
        )
    return recipe, notes, getattr(text, "vocab_size", None)


def _row_length(recipe: Recipe, tokens: Tokens) -> int:
    """Return the length of the longest padded row: a multiple, so that shapes recur."""
    packed = min(recipe.training.max_length, sum(tokens.lengths))
    longest = packed if recipe.is_packed else max(tokens.lengths)
    multiple = recipe.training.pad_to_multiple_of
    return -(-longest // multiple) * multiple


def _dataset(
    recipe: Recipe, tokens: Tokens, row_length: int, with_images: Rows | None = None
) -> "Dataset":
    if with_images is not None:
        return image_dataset(with_images.chosen(tokens.numbers).rows)
    if recipe.is_packed:
        return pack_dataset(tokens.dataset(), row_length, "bfd")  # whole documents, by best fit
    return tokens.dataset(has_lengths=True)


def _train(recipe: Recipe, run: RunFolder, trainer: "Trainer", total: int) -> Path:
    log_streaming(trainer, events=run.events, trace_step=recipe.output.trace_step)
    if run.checkpoint is not None and (run.step >= total or has_stopped_early(run.checkpoint)):
        _load_finished(trainer, best_of(trainer.args, run.checkpoint))
        return _save(recipe, trainer, run)
    stopping = Stopping()
    trainer.add_callback(stopping)
    gc.collect()
    gc.freeze()  # to look through the model and the libraries takes 0.3 s, every twenty steps or so
    try:
        with stopping.listening():
            trainer.train(resume_from_checkpoint=run.checkpoint and str(run.checkpoint))
    finally:
        gc.unfreeze()
    is_finished = trainer.state.global_step >= trainer.state.max_steps
    if stopping.signal is not None and not (
        is_finished or has_stopped_early(numbered(run.path)[0][1])
    ):
        raise Interrupted(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; a "
            f"checkpoint is in {quoted(str(run.path), is_bare=True)}, and the same command goes on "
            "from there",
            stopping.signal,
        )
    return _save(recipe, trainer, run)


def _model(
    recipe: Recipe,
    adapter: "PeftConfig",
    device: torch.device,
    run: RunFolder,
    planner: "Planner",
) -> Any:
    """Load the base and attach a new adapter, prepared or resident."""
    from peft import get_peft_model
    from transformers import set_seed

    chosen, memory = recipe.model, recipe.memory
    store = chosen.store and str(Path(chosen.store).expanduser())
    options: dict[str, Any] = {"store": store, "host_budget": chosen.host_budget}
    options["vision"] = chosen.vision
    if recipe.training.method == "reward":
        options |= {"auto_class": CLASSIFIER, "num_labels": 1}
        set_seed(recipe.training.seed)  # of its new head
    if chosen.attention is not None:
        options["attn_implementation"] = chosen.attention
    if chosen.quantization != "nf4":
        options["quantization"] = None if chosen.quantization == "none" else chosen.quantization
    if chosen.dtype != "bfloat16":
        options["dtype"] = DTYPES[chosen.dtype]
    base = poros.load(str(Path(chosen.source).expanduser()), device=device, **options)
    require_base(run, base, chosen.source)
    for config in (base.config, base.config.get_text_config(decoder=True)):
        config.use_cache = False
    if recipe.training.use_liger_kernel is True:
        use_liger(base)
    set_seed(recipe.training.seed)  # of the adapter's first weights
    with refusals("adapter", "PEFT"):
        model = get_peft_model(base, adapter)
    room: dict[str, Any] = {"vram_budget": memory.vram, "slots": memory.slots}
    if memory.resident:
        # With all blocks and matrices on the device nothing moves, and nothing is recomputed.
        number = base.config.get_text_config(decoder=True).num_hidden_layers
        room = {"slots": max(2, number), "keep_last": number}
        room |= {"stream_embedding": False, "stream_head": False}
    kernels = recipe.adapter_kernels(device.type)
    policy = StreamingPolicy().override(**room, adapter_kernels=kernels, device=device)
    return prepare_with(model, policy, planner=planner)


def _load_finished(trainer: "Trainer", checkpoint: Path) -> None:
    """Load the weights of a run that has ended; the Trainer would train one more step."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = load_file(checkpoint / "adapter_model.safetensors")
    set_peft_model_state_dict(trainer.accelerator.unwrap_model(trainer.model), weights)


def _save(recipe: Recipe, trainer: "Trainer", run: RunFolder) -> Path:
    """Write the adapter beside its place, then move it there as a whole."""
    processing: Any = trainer.processing_class
    with writing(run.adapter, Exception), partial_folder(run.adapter) as part:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(part)
        processing.save_pretrained(part)
        (part / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
        put_in_place(part, run.adapter)
    return run.adapter
