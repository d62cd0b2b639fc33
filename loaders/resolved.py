"""Resolves a checkpoint's settings and the options of a call."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.limits import Limits
from poros.loaders.options import LoadOptions
from poros.loaders.settings import (
    configuration,
    generation_settings,
    model_class_of,
    stored_quantization,
)
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
        UnsupportedModelError: If it is no causal language model, or quantized otherwise.
    """
    path, texts = checkpoint.path, checkpoint.texts
    config = configuration(path, texts, options.fields, given=options.config, limits=limits)
    stored = stored_quantization(path, config)
    model_class, config = model_class_of(config)
    require_language_model(model_class.__name__, config)
    if options.dtype == "auto":
        options = options.of_dtype(getattr(config, "dtype", None) or checkpoint.float_dtype())
    if stored is not None:
        options.require_format(stored, quoted(os.fspath(checkpoint.path)))
    dtype = options.chosen_dtype
    quantization = stored or options.wanted(dtype)
    generation = generation_settings(path, texts)
    return ResolvedLoad(config, model_class, generation, stored is not None, quantization, dtype)


def set_generation(
    model: "PreTrainedModel", generation: "GenerationConfig", options: LoadOptions
) -> None:
    """Set the generation settings, unless the call has given some."""
    if model.can_generate() and "generation_config" not in options.handed_on:
        model.generation_config = generation
