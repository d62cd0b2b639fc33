"""What DoRA makes of a linear module's result: base and LoRA scaled by the row, in one pass.

For a result y (bias b included), what LoRA gives, a scaling s and a scale g of each row (Liu et al.
2024, DoRA, equation 5)

    y + (g - 1) * base + g * (s * lora)        base: y - b, unless it was computed apart

g is close to 1, so that its distance from 1 has to be formed before anything is rounded ("High-Rank
Adaptation via Factored Norms and Fused Kernels", arXiv:2603.22276, section 3.1). Kernels run
wherever they can: on an H100 they were faster than PyTorch's operators from the smallest shape
measured on (512 tokens of 512 rows: 0.004 beside 0.022 ms).
"""

from math import prod

import torch

from poros.utils.devices import runs_triton


def compose(
    result: torch.Tensor,
    base: torch.Tensor | None,
    lora: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    wants_inner: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``result`` and what DoRA adds to it. No autograd.

    Args:
        result: Of shape (..., rows).
        base: Of the same shape and dtype; None if it is ``result`` without ``bias``.
        lora: Of the same shape, in a dtype of its own; not yet scaled.
        g: Of shape (rows,), float32, or float64 if ``result`` is.
        scaling: Of ``lora``.
        bias: Of shape (rows,), what ``result`` has of it; or None. Not looked at beside ``base``.
        wants_inner: Whether the second tensor is wanted.

    Returns:
        The sum, and ``base + scaling * lora``, by which a gradient is multiplied to give that of
        ``g``; or None. Both of the shape and dtype of ``result``.

    Streams:
        Queued on the current stream. A kernel makes both tensors in one pass.

    Exactness:
        The bits of ``compose_ref``.
    """
    if result.is_meta:
        made = [_empty(result, result.dtype) for _ in range(1 + wants_inner)]
        return made[0], made[1] if wants_inner else None
    tensors = [each for each in (result, base, lora, g, bias) if each is not None]
    if _runs_kernel(tensors, _computed_in(*tensors)):
        from poros.kernels import compose_gpu

        return compose_gpu.compose(result, base, lora, g, scaling, bias, wants_inner)
    return compose_ref(result, base, lora, g, scaling, bias, wants_inner)


def compose_ref(
    result: torch.Tensor,
    base: torch.Tensor | None,
    lora: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    wants_inner: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``compose`` in plain PyTorch: every step is rounded, to float32 or more."""
    dtype = _computed_in(result, base, lora, g, bias)
    values, g = result.to(dtype), g.to(dtype)
    if base is not None:
        base = base.to(dtype)
    else:
        base = values if bias is None else values - bias.to(dtype)
    term = lora.to(dtype) * scaling
    inner = (base + term).to(result.dtype) if wants_inner else None
    delta = ((g - 1) * base).add_(term.mul_(g))
    return delta.add_(values).to(result.dtype), inner


def compose_backward(
    gradient: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    inner: torch.Tensor | None,
    *,
    has_base: bool,
    result_dtype: torch.dtype,
    lora_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of ``compose``, from that of its sum.

    Args:
        gradient: Of shape (..., rows).
        inner: What ``compose`` gave as such; None if the gradient of ``g`` is not wanted.
        has_base: Whether ``base`` was given. Without it, the first gradient is that of ``result``;
            with it, that of ``base``, and ``result`` has ``gradient`` itself.
        result_dtype: Of ``result`` and ``base``.
        lora_dtype: Of ``lora``.

    Returns:
        Those of base or result, of lora, and of ``g``. The last in float32, or float64 if any
        tensor is; None if it is not wanted.

    Streams:
        Queued on the current stream. A kernel makes all three in one pass; the sums over tokens
        are left in parts, one for a fixed number of tokens, and a second one adds these up.

    Exactness:
        The first two have the bits of ``compose_backward_ref``. The third is a float32 sum in an
        order that depends on shape alone.
    """
    if gradient.is_meta:
        dtype = _computed_in(gradient, g, inner, result_dtype, lora_dtype)
        of_g = None if inner is None else g.new_empty(g.shape, dtype=dtype)
        return _empty(gradient, result_dtype), _empty(gradient, lora_dtype), of_g
    if gradient.dtype != torch.float64:
        # Its strides are autograd's choice, and are to choose no kernel.
        gradient = gradient.contiguous()
    tensors = [each for each in (gradient, g, inner) if each is not None]
    exact = _computed_in(*tensors, result_dtype, lora_dtype)
    if _runs_kernel(tensors, exact):
        from poros.kernels import compose_gpu

        return compose_gpu.backward(gradient, g, scaling, inner, has_base, result_dtype, lora_dtype)
    return compose_backward_ref(
        gradient,
        *(g, scaling, inner),
        has_base=has_base,
        result_dtype=result_dtype,
        lora_dtype=lora_dtype,
    )


def compose_backward_ref(
    gradient: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    inner: torch.Tensor | None,
    *,
    has_base: bool,
    result_dtype: torch.dtype,
    lora_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``compose_backward`` in plain PyTorch."""
    dtype = _computed_in(gradient, g, inner, result_dtype, lora_dtype)
    values, g = gradient.to(dtype), g.to(dtype)
    of_lora = (values * scaling).mul_(g).to(lora_dtype)
    of_base = (g - 1) * values
    if not has_base:
        of_base.add_(values)
    of_base, of_g = of_base.to(result_dtype), None
    if inner is not None:
        of_g = (inner.to(dtype) * values).reshape(prod(inner.shape[:-1]), len(g)).sum(0)
    return of_base, of_lora, of_g


def _runs_kernel(tensors: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether a kernel is to compute in ``dtype`` with these ``tensors``, at least one."""
    is_possible = dtype != torch.float64 and runs_triton(tensors[0].device)
    return is_possible and tensors[0].numel() > 0 and all(map(torch.Tensor.is_contiguous, tensors))


def _computed_in(*given: torch.Tensor | torch.dtype | None) -> torch.dtype:
    dtypes = [each.dtype if isinstance(each, torch.Tensor) else each for each in given]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)
