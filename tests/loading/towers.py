"""The families with a vision tower, and small checkpoints of them as the hub has them."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from poros.gates import tiny


@dataclass(frozen=True)
class Family:
    """What the hub's checkpoints of a family look like."""

    architecture: str
    layers: str
    """The names of the decoder layers, there."""
    tower: tuple[str, ...]
    """How the names of the tower and its projector begin, there."""
    own_layers: str = "model.language_model.layers"
    types: dict[str, str] = field(default_factory=dict)
    """What its processor gives for text besides."""
    goes_together: bool = True
    images_go_together: bool = False


TEXT, INNER = "model.language_model.layers", "language_model.model.layers"
PROJECTOR, TYPES = "multi_modal_projector.", {"mm_token_type_ids": "input_ids"}
FAMILIES = {
    "gemma3": Family(
        "gemma3_multimodal",
        INNER,
        ("vision_tower.vision_model.", PROJECTOR),
        types={"token_type_ids": "input_ids"},
        images_go_together=True,
    ),
    "gemma4": Family(
        "gemma4_multimodal",
        TEXT,
        ("model.vision_tower.", "model.embed_vision."),
        types=TYPES,
        goes_together=False,  # its layers share a mapping of keys and values
    ),
    "qwen2_5_vl": Family("qwen2_5_vl", "model.layers", ("visual.",), types=TYPES),
    "qwen3_vl": Family("qwen3_vl", TEXT, ("model.visual.",), types=TYPES),
    "mistral3": Family("mistral3", INNER, ("vision_tower.", PROJECTOR), images_go_together=True),
    "llama4": Family(
        *("llama4", INNER, ("vision_model.", PROJECTOR)),
        own_layers=INNER,
        images_go_together=True,
    ),
    "qwen3_5": Family("qwen3_5", TEXT, ("model.visual.",), types=TYPES),
}


def num_layers(name: str) -> int:
    """One more than two slots; of gemma4's, those that share states need two of each kind."""
    return 4 if name == "gemma4" else 3


def write(name: str, folder: Path) -> Path:
    """Write a small random checkpoint of a family, in bfloat16."""
    config = tiny.small_config(FAMILIES[name].architecture, num_layers=num_layers(name))
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    if name == "gemma3":  # transformers writes it without the name of the inner model
        prefix = ("vision_tower.", "vision_tower.vision_model.")
        renamed = {key.replace(*prefix): value for key, value in load_file(file).items()}
        save_file(renamed, file, {"format": "pt"})
    return folder
