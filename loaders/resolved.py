"""Resolves a checkpoint's settings and the options of a call."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import UnsupportedModelError, quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import shown
from poros.loaders.limits import Limits
from poros.loaders.options import LoadOptions
from poros.loaders.settings import (
    configuration,
    generation_settings,
    model_class_of,
    stored_quantization,
)
from poros.loaders.source import CONFIG
from poros.model.inspect import require_language_model

if TYPE_CHECKING:
    from transformers import (
        BitsAndBytesConfig,
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
    )


@dataclass(frozen=True)
class ResolvedLoad:
    """How a checkpoint is loaded, decided before a weight is read."""

    config: "PreTrainedConfig"
    model_class: Any
    generation: "GenerationConfig"
    is_quantized: bool
    """Whether the weights are 4-bit already."""
    quantization: "BitsAndBytesConfig | None"
    """That of the weights as they will be; None leaves them dense."""
    dtype: torch.dtype


def resolve(checkpoint: Checkpoint, options: LoadOptions, limits: Limits) -> ResolvedLoad:
    """Resolve settings and options.

    Raises:
        CheckpointFormatError: If transformers cannot make anything of the settings.
        PolicyError: If an option is no field of the configuration, or the checkpoint is quantized
            in another way than was asked for.
        UnsupportedModelError: If it is no causal language model, or a classifier that was not asked
            for, or quantized otherwise.
    """
    path, texts = checkpoint.path, checkpoint.texts
    config = configuration(path, texts, options.fields, given=options.config, limits=limits)
    stored = stored_quantization(path, config)
    _refuse_classifier(config, options, path)
    model_class, config = model_class_of(config, options.about_class)
    require_language_model(model_class.__name__, config)
    if options.dtype == "auto":
        options = options.of_dtype(getattr(config, "dtype", None) or checkpoint.float_dtype())
    if stored is not None:
        options.require_format(stored, quoted(os.fspath(checkpoint.path)))
    dtype = options.chosen_dtype
    quantization = stored or options.wanted(dtype)
    generation = generation_settings(path, texts)
    return ResolvedLoad(config, model_class, generation, stored is not None, quantization, dtype)


def _refuse_classifier(config: "PreTrainedConfig", options: LoadOptions, path: Path) -> None:
    """Refuse to drop the head of a classifier without a word."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if options.about_class is None and known and known.__name__ in (config.architectures or ()):
        raise UnsupportedModelError(
            f"{shown(path / CONFIG)}: expected a language model, found architectures of "
            f"{known.__name__}; pass auto_class=AutoModelForSequenceClassification"
        )


def set_generation(
    model: "PreTrainedModel", generation: "GenerationConfig", options: LoadOptions
) -> None:
    """Set the generation settings, unless the call has given some."""
    if model.can_generate() and "generation_config" not in options.handed_on:
        model.generation_config = generation
