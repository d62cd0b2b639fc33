"""The kernels of ``poros.kernels.compose``, in Triton: each goes over its tensors once."""

from math import prod

import torch
import triton
import triton.language as tl

from poros.kernels.launching import ceil_div, start_kernel

# What a program works on: tokens in all, tokens at once in registers (g is read once for them), and
# elements of each, of which 32 of bfloat16 are a whole sector of memory. Loads of a thread have 16
# bytes. On an H100, of a dozen others at 8192 tokens, the best was at most 0.5 % faster in forward;
# in backward, 64 tokens, 8 at once and 256 elements took 3 % less time at 3584 rows.
_FORWARD_TOKENS = 4
_BACKWARD_TOKENS, _BACKWARD_AT_ONCE = 32, 2
"""With the width they are the order of the sum: they are not tuned."""
_WIDTH = 512


@triton.jit
def _compose(
    result,
    base,
    lora,
    g,
    bias,
    sum_,
    inner,
    scaling,
    num_tokens,
    rows,
    HAS_BASE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WANTS_INNER: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    num_blocks = tl.cdiv(rows, WIDTH)
    column = (tl.program_id(0) % num_blocks) * WIDTH + tl.arange(0, WIDTH)[None, :]
    first = (tl.program_id(0) // num_blocks).to(tl.int64) * TOKENS
    of_row = column < rows
    factor = tl.load(g + column, mask=of_row, other=1.0)
    distance = factor - 1.0
    if HAS_BIAS:
        own_bias = tl.load(bias + column, mask=of_row, other=0.0).to(tl.float32)
    # Where a program starts may be far; from there on 32 bits are enough.
    before = first * rows
    left = num_tokens - first
    for start in range(0, TOKENS, AT_ONCE):
        token = start + tl.arange(0, AT_ONCE)[:, None]
        inside = (token < left) & of_row
        at = token * rows + column
        values = tl.load(result + before + at, mask=inside).to(tl.float32)
        term = tl.load(lora + before + at, mask=inside).to(tl.float32) * scaling
        if HAS_BASE:
            own = tl.load(base + before + at, mask=inside).to(tl.float32)
        else:
            own = values
            if HAS_BIAS:
                own = values - own_bias
        # Products and sums, each rounded: fusion is switched off at the launch.
        total = values + (distance * own + factor * term)
        tl.store(sum_ + before + at, total.to(sum_.dtype.element_ty), mask=inside)
        if WANTS_INNER:
            made = (own + term).to(inner.dtype.element_ty)
            tl.store(inner + before + at, made, mask=inside)


@triton.jit
def _backward(
    gradient,
    g,
    inner,
    of_base,
    of_lora,
    parts,
    scaling,
    num_tokens,
    rows,
    HAS_BASE: tl.constexpr,
    HAS_INNER: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    num_blocks = tl.cdiv(rows, WIDTH)
    start = (tl.program_id(0) % num_blocks) * WIDTH
    block = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = start + tl.arange(0, WIDTH)[None, :]
    of_row = column < rows
    factor = tl.load(g + column, mask=of_row, other=1.0)
    distance = factor - 1.0
    sums = tl.zeros((AT_ONCE, WIDTH), tl.float32)
    before = block * TOKENS * rows
    left = num_tokens - block * TOKENS
    for later in range(0, TOKENS, AT_ONCE):
        token = later + tl.arange(0, AT_ONCE)[:, None]
        inside = (token < left) & of_row
        at = token * rows + column
        values = tl.load(gradient + before + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_INNER:
            sums += values * tl.load(inner + before + at, mask=inside, other=0.0).to(tl.float32)
        through = distance * values
        if not HAS_BASE:
            through = values + through
        tl.store(of_base + before + at, through.to(of_base.dtype.element_ty), mask=inside)
        own = factor * (scaling * values)
        tl.store(of_lora + before + at, own.to(of_lora.dtype.element_ty), mask=inside)
    if HAS_INNER:
        place = start + tl.arange(0, WIDTH)
        tl.store(parts + block * rows + place, tl.sum(sums, axis=0), mask=place < rows)


def compose(
    result: torch.Tensor,
    base: torch.Tensor | None,
    lora: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None,
    wants_inner: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``compose.compose`` on a GPU."""
    sum_ = torch.empty_like(result)
    inner = torch.empty_like(result) if wants_inner else None
    if sum_.numel() == 0:
        return sum_, inner
    num_tokens, rows = prod(result.shape[:-1]), result.shape[-1]
    start_kernel(
        _compose,
        ceil_div(rows, _WIDTH) * ceil_div(num_tokens, _FORWARD_TOKENS),
        result,
        # What is not there is not looked at.
        result if base is None else base,
        lora,
        g,
        g if bias is None else bias,
        sum_,
        sum_ if inner is None else inner,
        scaling,
        num_tokens,
        rows,
        HAS_BASE=base is not None,
        HAS_BIAS=bias is not None,
        WANTS_INNER=wants_inner,
        TOKENS=_FORWARD_TOKENS,
        AT_ONCE=_FORWARD_TOKENS,
        WIDTH=_WIDTH,
    )
    return sum_, inner


def backward(
    gradient: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    inner: torch.Tensor | None,
    has_base: bool,
    result_dtype: torch.dtype,
    lora_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``compose.compose_backward`` on a GPU."""
    of_base = torch.empty_like(gradient, dtype=result_dtype)
    of_lora = torch.empty_like(gradient, dtype=lora_dtype)
    num_tokens, rows = prod(gradient.shape[:-1]), gradient.shape[-1]
    num_parts = ceil_div(num_tokens, _BACKWARD_TOKENS)
    parts = None if inner is None else g.new_empty(num_parts, rows)
    if gradient.numel() > 0:
        start_kernel(
            _backward,
            ceil_div(rows, _WIDTH) * num_parts,
            gradient,
            g,
            gradient if inner is None else inner,
            of_base,
            of_lora,
            g if parts is None else parts,
            scaling,
            num_tokens,
            rows,
            HAS_BASE=has_base,
            HAS_INNER=inner is not None,
            TOKENS=_BACKWARD_TOKENS,
            AT_ONCE=_BACKWARD_AT_ONCE,
            WIDTH=_WIDTH,
        )
    if parts is None:
        return of_base, of_lora, None
    # PyTorch's sum has one order for a shape.
    return of_base, of_lora, parts[0] if num_parts == 1 else parts.sum(0)
