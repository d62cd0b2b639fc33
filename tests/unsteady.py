"""Attention whose gradients do not repeat themselves, as fused kernels on a GPU have them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function

from poros.stream import attention

Noise = Callable[[int], bool]
"""Whether the backward of this number differs from the others."""


def always(_: int) -> bool:
    return True


def make_unsteady(patch: pytest.MonkeyPatch, noise: Noise = always, obeys: bool = True) -> None:
    """Let the gradients of attention differ from call to call, as ``noise`` says."""
    calls: list[None] = []

    class ScaledDotProductUnsteady(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            strict = torch.are_deterministic_algorithms_enabled() and not (
                torch.is_deterministic_algorithms_warn_only_enabled()
            )
            number = len(calls)
            calls.append(None)
            if noise(number) and not (strict and obeys):
                return gradients[0] * (1 + 2.0**-6 * (1 + number % 101))
            return gradients[0]

    genuine = torch.nn.functional.scaled_dot_product_attention

    def unsteady(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((query,)):
            return handle_torch_function(unsteady, (query,), query, *args, **kwargs)
        return ScaledDotProductUnsteady.apply(genuine(query, *args, **kwargs))

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", unsteady)
    patch.setattr(attention, "varies", lambda *_, **__: True)
    patch.setattr(attention, "_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION)
