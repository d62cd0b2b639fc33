"""Tells 4-bit weights of bitsandbytes from other tensors."""

from typing import Any

import torch
from torch import nn


def is_params4bit(tensor: object) -> bool:
    """Whether ``tensor`` is a 4-bit parameter of bitsandbytes, quantized yet or not."""
    return type(tensor).__name__ == "Params4bit"


def is_4bit(tensor: object) -> bool:
    """Whether ``tensor`` is a quantized bitsandbytes 4-bit parameter."""
    return is_params4bit(tensor) and state_of(tensor) is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of no other library, and not what a pickle leaves of a 4-bit weight."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and not hasattr(tensor, "quant_state")


def state_of(tensor: object) -> Any:
    """The ``QuantState`` of a tensor, or None. A plain pickle leaves it, and takes the type."""
    return getattr(tensor, "quant_state", None)
