"""Models with adapters that gradients arrive at in unusual ways."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.snapshots import build


def lora(**options: Any) -> Callable[[], Any]:
    """Makes a dense model with LoRA of these options on three projections."""

    def make() -> Any:
        base = build(quantize=False).unload()
        torch.manual_seed(2)
        config = LoraConfig(
            r=4,
            target_modules=["q_proj", "k_proj", "down_proj"],
            lora_dropout=0.05,
            init_lora_weights=False,
            **options,
        )
        return get_peft_model(base, config)

    return make


class Twice(nn.Module):
    """Goes through one module two times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x.flip(0))  # type: ignore[no-any-return]
