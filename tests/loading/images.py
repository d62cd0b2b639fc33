"""Images for the small models with a vision tower: what their processors give for one in each row.

Pixels are drawn; each image becomes four tokens, whatever the family cuts it into.
"""

from typing import Any

import torch

IMAGE_TOKEN = 505
"""As in ``poros.gates.multimodal``."""
NUM_TOKENS = 4
Batch = dict[str, torch.Tensor]


def pixels(family: str, num_images: int, generator: torch.Generator) -> Batch:
    """The images of a batch, by the names and in the shapes of the family's processor.

    Args:
        family: A name of ``FAMILIES`` in test_multimodal.py.
        num_images: Of all rows together.
        generator: Draws them.
    """

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
