"""Models a GPU's kernels of attention, dropout and experts on shapes alone."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class FusedKernels(TorchFunctionMode):
    """Replaces attention and dropout by operators with the memory of a GPU's kernels.

    Attributes:
        attention_flop: Floating-point operations of attention so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_flop = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            # Scores and their product with the values; a causal kernel leaves half of both out.
            num_scores = query.shape[:-1].numel() * key.shape[-2]
            flop = 2 * num_scores * (query.shape[-1] + value.shape[-1])
            self.attention_flop += flop // 2 if (kwargs or {}).get("is_causal") else flop
            return _Attention.apply(query, key, value)
        is_grouped = func is nn.functional.grouped_mm and args[1].dim() == 3
        if is_grouped and args[0].dtype != torch.bfloat16:
            # A GPU takes other dtypes too, the meta device does not.
            return _Grouped.apply(args[0], args[1])
        if func is nn.functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    return _Dropout.apply(input) if p and training else input


class _Grouped(torch.autograd.Function):
    """Products of the rows of each expert with its matrix."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        of_rows, of_matrices = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_matrices else None, matrices if of_rows else None)
        ctx.forms = rows.shape, matrices.shape
        return rows.new_empty((len(rows), matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            gradients[0].new_empty(form) if is_needed else None
            for form, is_needed in zip(ctx.forms, ctx.needs_input_grad, strict=True)
        )


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(hidden, dtype=torch.bool))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradients[0])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        *batch, heads, length, _ = query.shape
        # Kernels lay the heads of a token side by side, as the projection behind them wants it.
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, rows = ctx.saved_tensors
        torch.empty_like(rows)  # the row sums of gradient times output
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
