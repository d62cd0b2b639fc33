"""A fault of the base that every gate has to see."""

from typing import Any

PACKED = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"


def flip_nibble(model: Any, **_: Any) -> Any:
    """Change one 4-bit code in the middle of one layer's packed weights."""
    dict(model.named_parameters())[PACKED].data[1000] ^= 0x0F
    return model
