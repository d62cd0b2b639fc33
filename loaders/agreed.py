"""What the settings of a checkpoint and the options of a call come to, before a weight is read."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import PolicyError, quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.limits import Limits
from poros.loaders.options import LoadOptions, device_name
from poros.loaders.settings import (
    configuration,
    generation_settings,
    model_class_of,
    stored_quantization,
)

if TYPE_CHECKING:
    from transformers import (
        BitsAndBytesConfig,
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
    )


@dataclass(frozen=True)
class Settled:
    """How a checkpoint is going to be loaded."""

    config: "PreTrainedConfig"
    model_class: Any
    generation: "GenerationConfig"
    found: "BitsAndBytesConfig | None"
    """How the weights are quantized already."""
    wanted: "BitsAndBytesConfig | None"
    """How they will be."""
    dtype: torch.dtype


def settle(checkpoint: Checkpoint, asked: LoadOptions, limits: Limits) -> Settled:
    """Bring settings and options together.

    Raises:
        CheckpointFormatError: If transformers cannot make anything of the settings.
        PolicyError: If an option is no field of the configuration, or the checkpoint is quantized
            in another way than was asked for.
        UnsupportedModelError: If it is no causal language model, or quantized otherwise.
    """
    path, texts = checkpoint.path, checkpoint.texts
    config = configuration(path, texts, asked.fields, given=asked.config, limits=limits)
    found = stored_quantization(path, config)
    model_class, config = model_class_of(config)
    if asked.dtype == "auto":
        asked = asked.of_dtype(getattr(config, "dtype", None) or checkpoint.float_dtype())
    if found is not None:
        asked.require_format(found, quoted(os.fspath(checkpoint.path)))
    wanted = found or asked.wanted(asked.chosen_dtype)
    generation = generation_settings(path, texts)
    return Settled(config, model_class, generation, found, wanted, asked.chosen_dtype)


def set_generation(
    model: "PreTrainedModel", generation: "GenerationConfig", asked: LoadOptions
) -> None:
    """As ``from_pretrained`` sets it, unless one was given, which it has set already."""
    if model.can_generate() and "generation_config" not in asked.handed_on:
        model.generation_config = generation


def limits_of(limits: object) -> Limits:
    """The bounds that were given, or the defaults.

    Raises:
        PolicyError: If it is something else.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise PolicyError(f"limits: expected poros.Limits, found {quoted(limits)}")
    return limits or Limits()


def maker_of(device: torch.device) -> dict[str, Any]:
    """Who makes a store: bytes may depend on each of these."""
    import bitsandbytes
    import transformers

    from poros import __version__

    return {
        "versions": {
            "poros": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "bitsandbytes": bitsandbytes.__version__,
        },
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
    }
