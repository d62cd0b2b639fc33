"""A model on paper: all modules, shapes and dtypes, no memory, its 4-bit weights in packed form.

Plans read shapes and sizes off it and run its layers on the meta device, where operators compute
shapes only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.frozen import is_4bit, packed_like
from poros.loaders.build import model_class_of
from poros.loaders.quantize import quantized_form

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

_META = torch.device("meta")


def skeleton(
    config: "PreTrainedConfig", quantization: "BitsAndBytesConfig | None", dtype: torch.dtype
) -> "PreTrainedModel":
    """The model of ``config`` on the meta device.

    Args:
        config: Of a causal language model.
        quantization: Of its linear layers; None leaves them dense.
        dtype: Of everything that is not quantized.

    Raises:
        UnsupportedModelError: If it has no causal language model.
    """
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model_class, config = model_class_of(config)
    with _META:
        model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        if quantization is not None:
            quantizer = Bnb4BitHfQuantizer(quantization, pre_quantized=False)
            before = set(model.modules())
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
            for module in set(model.modules()) - before:
                if module._parameters.get("bias") is not None:
                    module.bias.data = module.bias.data.to(dtype)
            quantize_on_paper(model)
            quantizer.postprocess_model(model)
    model.tie_weights()
    return model.requires_grad_(False)


def with_adapters(model: "PreTrainedModel", adapters: Mapping[str, "PeftConfig"]) -> nn.Module:
    """``model`` with PEFT adapters, as ``get_peft_model`` and ``add_adapter`` give them."""
    from peft import get_peft_model

    # PEFT looks for the means to fill in what an adapter is initialised from.
    with _META:
        (first, config), *others = adapters.items()
        adapted = get_peft_model(model, config, adapter_name=first)
        for name, config in others:
            adapted.add_adapter(name, config)
    return adapted


def quantize_on_paper(model: nn.Module) -> None:
    """Give 4-bit modules whose weights have no memory the weights that quantizing would give."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if not isinstance(module, Linear4bit) or is_4bit(weight):
            continue
        form = quantized_form(
            weight.shape,
            blocksize=weight.blocksize,
            double_quant=weight.compress_statistics,
            quant_storage=weight.quant_storage,
        )
        nested = None
        if form.nested_absmax is not None:
            nested = QuantState(
                absmax=form.nested_absmax,
                code=torch.empty(256, device=_META),
                blocksize=256,
                dtype=torch.float32,
            )
        module.quant_state = QuantState(
            absmax=form.absmax,
            shape=weight.shape,
            code=torch.empty(16, device=_META),
            blocksize=weight.blocksize,
            quant_type=weight.quant_type,
            dtype=module.compute_dtype or weight.dtype,
            offset=None if nested is None else torch.empty((), device=_META),
            state2=nested,
        )
        module._parameters["weight"] = packed_like(weight, form.packed, module.quant_state, module)
