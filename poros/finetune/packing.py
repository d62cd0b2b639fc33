"""Decides which models and attention implementations keep packed documents apart.

A packed row has no attention mask, but positions that start again with each document. From these
transformers makes the mask that keeps documents apart, for models that use its masks; attention
implementations that need no mask get the documents' ends (cu_seqlens). In other models tokens see
other documents: those with recurrent states (Mamba), positions of their own (ALiBi), or masks of
their own.
"""

import inspect
from typing import TYPE_CHECKING

from poros.errors import RecipeError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text", "gemma4_text", "mixtral"),
    *("qwen3_moe", "gemma3", "gemma4", "qwen3_vl", "mistral3", "llama4"),
)
"""Model types that were tried: `tests/finetune/test_packing.py` edits one document and looks at the
others."""
_OF_A_MASK = (None, "eager", "sdpa", "flex_attention")
"""Attention that reads the mask which transformers makes from the positions."""


def require_attention(name: str) -> None:
    """Refuse an attention implementation that transformers does not have.

    A name of a kernel on the hub, whose code would be fetched and run, is refused too.

    Raises:
        RecipeError: If it is none of those that are registered.
    """
    from transformers import AttentionInterface

    # Those with a bar are for generation alone.
    known = ["eager", *(each for each in AttentionInterface().valid_keys() if "|" not in each)]
    if name not in known:
        raise RecipeError(
            f"model.attention: expected one of {', '.join(sorted(known))}, found {quoted(name)}; "
            "for the default leave it out (--attention)"
        )


def takes_cu_seqlens(name: str | None) -> bool:
    """Whether an attention implementation takes the bounds of a packed row's documents.

    Flash attention does, and so does a registered function with a parameter ``cu_seq_lens_q``.
    Others read the mask that transformers makes from the position ids.
    """
    from transformers import AttentionInterface

    function = AttentionInterface().get(name)
    return "flash" in str(name) or (
        function is not None and "cu_seq_lens_q" in inspect.signature(function).parameters
    )


def keeps_apart(config: "PreTrainedConfig", attention: str | None = None) -> bool:
    """Whether no document of a packed row has an influence on another.

    Args:
        attention: The implementation that the model trains with; None is transformers' choice.
    """
    reads_documents = attention in _OF_A_MASK or takes_cu_seqlens(attention)
    return reads_documents and config.model_type in _FAMILIES
