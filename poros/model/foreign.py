"""Refuses bases that another library quantized, by configuration or by the dtype of weights.

Kernels of other libraries hold raw pointers to packed weights, or scales in objects of their own,
that do not follow when a tensor moves to a slot. A record of the model type does not
cover them. What streams is plain tensors and bitsandbytes' 4-bit weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from poros.errors import UnsupportedModelError
from poros.kernels.quantized import is_plain

_PACKED = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


def refuse_foreign_quantization(
    base: PreTrainedModel, layers_name: str, layers: Sequence[nn.Module]
) -> None:
    """Raise ``UnsupportedModelError`` unless frozen weights are plain or 4-bit of bitsandbytes."""
    method = _foreign_method(base)
    if method is not None:
        raise _error(f"a model quantized by {method}", "its quantization_config")
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=f"{layers_name}.{index}"):
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None and _is_packed(tensor):
                        raise _error(f"packed weights of {tensor.dtype}", f"{name}.{key}")


def _foreign_method(base: PreTrainedModel) -> str | None:
    """The method in the model's configuration, if it is another than bitsandbytes in 4 bit."""
    config: Any = getattr(base.config, "quantization_config", None)
    if config is None:
        return None
    settings = config if isinstance(config, dict) else vars(config)
    method = settings.get("quant_method", getattr(base, "quantization_method", None))
    method = str(getattr(method, "value", method))
    if settings.get("dequantize"):
        return None
    if method.startswith("bitsandbytes") or method == "None":
        keys = ("load_in_8bit", "_load_in_8bit")
        return "bitsandbytes in 8 bit" if any(settings.get(key) for key in keys) else None
    return method


def _is_packed(tensor: torch.Tensor) -> bool:
    # A tensor subclass is refused by its type, with its name.
    return is_plain(tensor) and tensor.dim() > 1 and tensor.dtype in _PACKED


def _error(what: str, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"expected frozen weights that are plain tensors or 4-bit weights of bitsandbytes, found "
        f"{what} ({where}). Its kernels keep pointers and scales of their own, which would not "
        "follow into a slot. Load the unquantized model with poros.load(..., quantization='nf4') "
        "or BitsAndBytesConfig(load_in_4bit=True)"
    )
