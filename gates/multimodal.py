"""Small configurations of language models with a vision tower, as checkpoints on the hub have them.

The tower's layers are checkpointable like those of the decoder, and there are fewer of them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Multimodal:
    """A family, and how it is made small."""

    model_type: str
    language_model: str
    """The architecture of its language model."""
    tower: dict[str, Any]
    """Sizes of its vision tower."""
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields."""


_VIT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 28, "patch_size": 14},
}
_QWEN: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14},
}
_QWEN3 = {**_QWEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_QWEN_TOKENS = {"image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 507}

MULTIMODAL = {
    "gemma3_multimodal": Multimodal(
        *("gemma3", "gemma3", {**_VIT, "model_type": "siglip_vision_model"}),
        {"mm_tokens_per_image": 4, "image_token_index": 505},
    ),
    "gemma4_multimodal": Multimodal(
        *("gemma4", "gemma4_shared_kv"),
        {**_VIT, "head_dim": 16, "num_key_value_heads": 4, "position_embedding_size": 64},
        {"audio_config": None, "image_token_id": 505, "video_token_id": 506, "audio_token_id": 507},
    ),
    "qwen2_5_vl": Multimodal(
        *("qwen2_5_vl", "qwen2_5_vl_text"),
        {**_QWEN, "fullatt_block_indexes": [1], "window_size": 56},
        _QWEN_TOKENS,
    ),
    "qwen3_vl": Multimodal("qwen3_vl", "qwen3_vl_text", _QWEN3, _QWEN_TOKENS),
    "mistral3": Multimodal(
        *("mistral3", "mistral", {**_VIT, "model_type": "pixtral", "head_dim": 16}),
        {"image_token_index": 505, "tie_word_embeddings": False},
    ),
    "llama4": Multimodal(
        *("llama4", "llama4_text"),
        {
            **{**_VIT, "image_size": 56, "vision_output_dim": 64, "projector_input_dim": 64},
            # Four patches side by side are the input of the projector.
            **{"projector_output_dim": 64, "pixel_shuffle_ratio": 0.5, "intermediate_size": 256},
        },
        {"image_token_index": 505},
    ),
    "qwen3_5": Multimodal("qwen3_5", "qwen3_5_text", _QWEN3, _QWEN_TOKENS),
    "qwen3_5_moe": Multimodal("qwen3_5_moe", "qwen3_5_moe_text", _QWEN3, _QWEN_TOKENS),
}
"""Families by the name that a user types."""


def with_tower(name: str, text: "PreTrainedConfig") -> "PreTrainedConfig":
    """A family of ``MULTIMODAL`` around a small configuration of its language model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    row = MULTIMODAL[name]
    fields, tower = text.to_dict(), dict(row.tower)
    if "depth" in tower:  # of Qwen: positions have three axes, the projector is in the tower
        tower["out_hidden_size"] = text.hidden_size
        rope, half = fields["rope_parameters"], text.hidden_size // 8
        half = int(half * rope.get("partial_rotary_factor", 1))
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    config_class = CONFIG_MAPPING[row.model_type]
    config: PreTrainedConfig = config_class(text_config=fields, vision_config=tower, **row.others)
    # As a checkpoint has it; it chooses the class.
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class].__name__]
    return config
