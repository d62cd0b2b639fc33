"""The families with a vision tower, small checkpoints of them as the hub has them, and images.

Images are what processors give for one in each row: pixels are drawn, and each becomes four tokens,
whatever the family cuts it into.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        *("llama4", INNER, ("vision_model.", PROJECTOR)), own_layers=INNER, images_go_together=True
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


# Images.

IMAGE_TOKEN = 505
"""As in ``poros.gates.tiny``."""
NUM_TOKENS = 4
Batch = dict[str, torch.Tensor]


def pixels(family: str, num_images: int, generator: torch.Generator) -> Batch:
    """The images of a batch, by the names and in the shapes of the family's processor."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if family.startswith("qwen"):  # patches of all images, twice for the axis of time
        grid = torch.tensor([[1, 4, 4]] * num_images)
        return {"pixel_values": drawn(num_images * 16, 3 * 2 * 14 * 14), "image_grid_thw": grid}
    if family == "gemma4":
        axes = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy")
        places = torch.stack(axes, dim=-1).reshape(1, 36, 2).repeat(num_images, 1, 1)
        values = drawn(num_images, 36, 3 * 14 * 14).sigmoid()
        return {"pixel_values": values, "image_position_ids": places}
    if family == "mistral3":
        sizes = torch.tensor([[56, 56]] * num_images)
        return {"pixel_values": drawn(num_images, 3, 56, 56), "image_sizes": sizes}
    if family == "llama4":  # whose tower casts nothing
        return {"pixel_values": drawn(num_images, 3, 56, 56).bfloat16()}
    return {"pixel_values": drawn(num_images, 3, 28, 28)}


def with_images(family: str, types: Any, batch: Batch, seed: int = 0) -> Batch:
    """A batch of text with an image near the end of each row, which no label asks for.

    Args:
        family: As in ``pixels``.
        types: Names that the family's processor has for the kind of each token.
        batch: Of ``input_ids`` and ``labels``.
        seed: Of the pixels, besides the tokens.
    """
    tokens, labels = (batch[name].clone() for name in ("input_ids", "labels"))
    place = slice(-NUM_TOKENS - 1, -1)
    tokens[:, place], labels[:, place] = IMAGE_TOKEN, -100
    generator = torch.Generator().manual_seed(seed + int(tokens.sum()))
    kinds = (tokens == IMAGE_TOKEN).long()
    return {
        **batch,
        **{"input_ids": tokens, "labels": labels},
        **pixels(family, len(tokens), generator),
        **dict.fromkeys(types, kinds),
    }
