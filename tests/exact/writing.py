"""What is done to models whose adapted modules' results are written to in place."""

from collections.abc import Callable
from typing import Any

import torch

from tests.loops import Model, behind, nothing

BF16, FP32 = torch.bfloat16, torch.float32


def scale(module: Any, given: Any, result: torch.Tensor) -> None:
    result.mul_(1.5)


def steer(module: Any, given: Any, result: torch.Tensor) -> None:
    """As steering vectors and patches of activations are added."""
    # Made on the device: a copy from the host cannot be recorded.
    result[:, -1] += torch.linspace(-1, 1, result.shape[-1], device=result.device).to(result.dtype)


def within(write: Callable[..., None]) -> Callable[[Model], None]:
    """Written by the layer's own code, to its last sum: values that a recomputation leaves out."""

    def change(model: Model) -> None:
        for layer in model.base_model.model.model.layers:
            kind = type(layer)

            class Writing(kind):  # type: ignore[misc, valid-type]
                def forward(self, *args: Any, **kwargs: Any) -> Any:
                    result = super().forward(*args, **kwargs)
                    write(self, args, result)
                    return result

            Writing.__name__ = kind.__name__
            layer.__class__ = Writing

    return change


ALL = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Which model, its adapters, what is done to it before it is trained, and whether its visits can be
# recorded then.
PROGRAMS: dict[str, tuple[str, dict[str, Any], Callable[[Model], None], bool]] = {
    "falcon": ("falcon", {}, nothing, True),
    "steered": ("qwen2", {}, behind(steer, *ALL), False),
    "with a bias": ("qwen2", {"lora_bias": True}, behind(steer, *ALL), False),
    "with DoRA": ("qwen2", {"use_dora": True}, behind(steer, *ALL), False),
    # 4-bit modules of bitsandbytes with a bias give views themselves.
    "not adapted": ("qwen2", {"target_modules": ["k_proj"]}, behind(steer, *ALL[2:]), False),
    "feed-forward": ("qwen2", {}, behind(scale, "mlp"), False),
    "fused projections": ("phi3", {}, behind(steer, "qkv_proj", "gate_up_proj"), False),
    "layers": ("qwen2", {}, behind(steer, "layers.0", "layers.1"), True),
    "all of what is left out": ("qwen2", {}, within(scale), True),
    "a part of what is left out": ("qwen2", {}, within(steer), True),
}
DTYPES = [(BF16, BF16), (BF16, FP32), (FP32, FP32)]
