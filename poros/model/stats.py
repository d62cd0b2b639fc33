"""What is counted of a prepared model: calls of adapters, and bytes on its device."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from poros.head.host_matrix import HostMatrix
from poros.kernels.adapters import KernelStats
from poros.kernels.paths import LoraShape
from poros.stream.frozen import SmallTensors

_GRAD: Any = torch._C.TensorBase.grad


def adapter_counts(tally: KernelStats | None) -> dict[str, Any]:
    """Count which way adapted modules ran, as in ``Runtime.stats``.

    ``lora_paths`` has ``chosen`` (calls of each order, such as ``f2:b5``), ``shapes`` (the order of
    each) and ``as_peft`` (calls that PEFT's order alone is defined for, by reason).
    """
    tally = KernelStats() if tally is None else tally
    shapes = {what: order for what, order in tally.orders if isinstance(what, LoraShape)}
    chosen: Counter[str] = Counter()
    for shape, order in shapes.items():
        chosen[order] += tally.orders[shape, order]
    reasons = {
        what: tally.orders[what, order] for what, order in tally.orders if what not in shapes
    }
    return {
        "num_fused_adapters": tally.num_fused,
        "num_grouped_adapters": tally.num_grouped,
        "num_unfused_adapters": sum(tally.unfused.values()),
        "num_left_out_adapters": tally.num_left_out,
        "lora_paths": {
            "chosen": dict(chosen),
            "shapes": {str(shape): order for shape, order in shapes.items()},
            "as_peft": reasons,
        },
    }


def attention_of(model: nn.Module | None) -> str | None:
    """Return the attention implementation of a transformers model; None if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def held_num_bytes(model: nn.Module, device: torch.device, small: SmallTensors) -> int:
    """Count the device bytes of a model's tensors and gradients, except those in ``small``."""
    tensors = [*model.parameters(), *model.buffers()]
    # Read past the property, which code may watch.
    gradients = map(_GRAD.__get__, model.parameters())
    tensors += [gradient for gradient in gradients if gradient is not None]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device == device
        and not isinstance(tensor, HostMatrix)
        and not small.holds(tensor)
    }
    return sum(storages.values())


def nothing_checked() -> dict[str, Any]:
    """``Runtime.self_check`` for a runtime without a self-check."""
    return {
        "mode": "off",
        "status": "off",
        "message": None,
        "proved_with_deterministic_attention": [],
        "not_provable": [],
        "kernels": None,
    }
