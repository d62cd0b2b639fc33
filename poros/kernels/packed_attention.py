"""Attention over packed rows: each document of a row attends to itself alone.

A mask that keeps documents apart excludes fused attention's fastest kernels, and has them compute
what it hides. FlashAttention-2 (Dao, arXiv 2307.08691) takes the documents' boundaries instead, as
PyTorch offers it in ``torch.nn.attention.varlen``. It is registered with transformers under
``NAME``.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

NAME = "packed"
"""As an attention implementation of transformers."""
_MOST_CHANNELS, _MOST_ON_OTHERS = 256, 192
"""Per head, in FlashAttention-2's kernels: on GPUs of ``_LARGE`` and on others, where PyTorch
refuses some wider heads in backward (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
A multiple of 8."""
_LARGE = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities."""


def register() -> None:
    """Register the attention with transformers: it then makes no masks for models that use it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend_packed)


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


def attention_of(model: nn.Module | None) -> str | None:
    """Return the attention implementation of a transformers model; None if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def attend_packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document of one packed row.

    Args:
        module: The attention layer of transformers.
        query: ``(1, heads, tokens, channels)``.
        key: ``(1, key heads, tokens, channels)``; query heads share key heads in groups.
        value: Like ``key``.
        attention_mask: None; transformers makes none for this attention.
        cu_seq_lens_q: int32 ``(documents + 1,)``: 0, then where each document ends. Documents may
            be empty, so that the shape can be the same for all rows.
        max_length_q: A bound of the documents' lengths; by default the row's.
        scaling: Factor of the scores; by default ``channels ** -0.5``.
        sliding_window: Tokens that a token attends to, itself included; by default all before it.
        dropout: Of attention's weights.

    Returns:
        ``(1, tokens, heads, channels)`` in the dtype of autocast, else of ``query``; no weights.

    Exactness:
        On a GPU in 16 bits FlashAttention-2 computes it, whose backward repeats itself only while
        PyTorch's deterministic flag is on; else, and with dropout or a window that is shorter than
        documents may be, PyTorch's fused attention under a mask.

    Raises:
        ValueError: If boundaries are not given, there is more than one row, or the module attends
            to later tokens.
    """
    is_causal = getattr(module, "is_causal", True)
    if cu_seq_lens_q is None or attention_mask is not None or len(query) != 1 or not is_causal:
        ends = "no cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_q"
        causal = "causal" if is_causal else "bidirectional"
        raise ValueError(
            "attention 'packed': expected causal attention over one row of packed documents with "
            f"cu_seq_lens_q and no mask, found {causal} attention over {len(query)} rows with "
            f"{ends}; for others load the model with attn_implementation='sdpa'"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    longest = query.shape[2] if max_length_q is None else max_length_q
    has_window = sliding_window is not None and sliding_window < longest
    if has_flash_kernel(query, query.device) and not dropout and not has_window:
        # Not each[0], whose backward would fill and copy a tensor.
        queries, keys, values = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
        found = flash_attention(queries, keys, values, cu_seq_lens_q, longest, scaling)
        return found[None], None
    # PyTorch's kernels take no mask where key heads are shared.
    groups = query.shape[1] // key.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=packed_mask(cu_seq_lens_q, query.shape[2], sliding_window),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None


def has_flash_kernel(query: torch.Tensor, device: torch.device) -> bool:
    """Whether FlashAttention-2's kernels take tensors like ``query`` on a device."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    most = _MOST_CHANNELS if capability in _LARGE else _MOST_ON_OTHERS
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= most
        and capability >= (8, 0)
    )


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Compute causal attention within documents by FlashAttention-2.

    A mode of torch functions sees it as one function. Its arguments are those of ``attend_packed``,
    tokens first and without the row's dimension, in 16 bits, on a GPU.
    """
    given = (query, key, value)
    if has_torch_function(given):
        found: torch.Tensor = handle_torch_function(
            flash_attention, given, *given, ends, longest, scale
        )
        return found
    from torch.nn.attention.varlen import varlen_attn

    shares_heads = query.shape[1] != key.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if shares_heads and _asks_for_groups() else {}
    output: Any = varlen_attn(
        *(query, key, value, ends, ends, longest, longest),
        scale=scale,
        window_size=(-1, 0),  # all tokens before it
        **grouped,
    )
    attended: torch.Tensor = output
    return attended


@cache
def _asks_for_groups() -> bool:
    """Whether PyTorch has to be asked for shared key heads; 2.11 takes them as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def packed_mask(ends: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Build the mask of a packed row: bool ``(length, length)``, true where a query may look."""
    places = torch.arange(length, device=ends.device)
    documents = torch.bucketize(places, ends[1:], right=True)
    behind = places[:, None] - places[None]
    mask = (documents[:, None] == documents[None]) & (behind >= 0)
    return mask if window is None else mask & (behind < window)
