"""Checks attention implementations of transformers: which exist, and which take cu_seqlens."""

import inspect

from poros.errors import RecipeError, quoted


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

    Flash attention is, and so is a registered function with a parameter ``cu_seq_lens_q``. Others
    read the mask that transformers makes from the position ids.
    """
    from transformers import AttentionInterface

    function = AttentionInterface().get(name)
    return "flash" in str(name) or (
        function is not None and "cu_seq_lens_q" in inspect.signature(function).parameters
    )
