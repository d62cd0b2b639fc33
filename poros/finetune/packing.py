"""Decides which models and attention implementations keep packed documents apart.

A packed row has no attention mask, but positions that start again with each document. From these
transformers makes the mask that keeps documents apart, for models that use its masks; attention
implementations that need no mask get the documents' ends (cu_seqlens). In other models tokens see
other documents: those with recurrent states (Mamba), positions of their own (ALiBi), or masks of
their own.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from poros.errors import RecipeError, quoted
from poros.kernels.nf4 import DTYPES
from poros.kernels.packed_attention import NAME as PACKED
from poros.kernels.packed_attention import has_flash_kernel, takes_cu_seqlens
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text", "gemma4_text", "mixtral"),
    *("qwen3_moe", "gemma3", "gemma4", "qwen3_vl", "mistral3", "llama4"),
)
"""Model types that were tried: `tests/finetune/test_packing.py` edits one document and looks at the
others."""
_OF_PACKED = ("qwen2", "qwen3", "llama", "mistral", "phi3", "mixtral", "qwen3_moe")
"""Of these, those whose layers give packed attention all that it needs, and have no towers."""
_LEAST_LENGTH = 32
"""Packed attention is chosen where rows have at most one document in so many tokens. Its backward
holds a float32 query of 128 tokens more for each document."""
_OF_A_MASK = (None, "eager", "sdpa", "flex_attention")
"""Attention that reads the mask which transformers makes from the positions."""


def require_attention(name: str) -> None:
    """Refuse an attention that transformers does not have, and a kernel of the hub."""
    from transformers import AttentionInterface

    # Those with a bar are for generation alone.
    known = ["eager", *(each for each in AttentionInterface().valid_keys() if "|" not in each)]
    if name not in known:
        raise RecipeError(
            f"model.attention: expected one of {', '.join(sorted(known))}, found {quoted(name)}; "
            "for the default leave it out (--attention)"
        )


def keeps_apart(config: "PreTrainedConfig", attention: str | None = None) -> bool:
    """Whether no document of a packed row has an influence on another."""
    reads_documents = attention in _OF_A_MASK or takes_cu_seqlens(attention)
    families = _OF_PACKED if attention == PACKED else _FAMILIES
    return reads_documents and config.model_type in families


def choose_attention(
    recipe: Recipe,
    config: "PreTrainedConfig",
    device: torch.device,
    num_documents: int,
    row_length: int,
) -> Recipe:
    """Let a run over packed rows take packed attention, where it is faster than a mask.

    That is on a GPU, for families and heads that its kernels take, without a shorter window. The
    fullest row has so many documents and tokens.
    """
    window = getattr(config, "sliding_window", None)
    if (
        recipe.model.attention is not None
        or config.model_type not in _OF_PACKED
        or num_documents * _LEAST_LENGTH > row_length
        or (window is not None and window < row_length)
    ):
        return recipe
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = torch.empty(channels, dtype=DTYPES[recipe.model.dtype], device="meta")
    if not has_flash_kernel(query, device):
        return recipe
    return replace(recipe, model=replace(recipe.model, attention=PACKED))
