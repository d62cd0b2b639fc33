"""Models of real shapes made on the spot from random bytes: no download, no bf16 copy of the base.

Speed and memory depend on shapes, dtypes and devices, not on what the weights are. Scales are such
that activations stay finite.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from poros.kernels.nf4 import Format, double_quantization, own

_TILE_NUM_ELEMENTS = 1 << 24
_QWEN = {"vocab_size": 152064, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# From the published config.json of each model, but for "tiny", on which the code is tried out.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2.5-14b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen2.5-32b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen2.5-72b": {
        **_QWEN,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def config_of(name: str, num_layers: int | None = None) -> Any:
    """The configuration of one of ``SHAPES``, with fewer layers if wanted."""
    from transformers import Qwen2Config

    sizes = dict(SHAPES[name])
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    return Qwen2Config(**sizes, use_cache=False, attention_dropout=0.0)


def random_model(config: Any, quantization: str = "nf4") -> Any:
    """A causal LM of ``config``, as ``random_nf4`` or ``random_dense`` (``"none"``) makes it."""
    makers = {"nf4": random_nf4, "none": random_dense}
    if quantization not in makers:
        raise ValueError(f"expected one of {', '.join(makers)}, found {quantization!r}")
    return makers[quantization](config)


def random_nf4(config: Any) -> Any:
    """A causal LM of ``config`` on the CPU: bf16, linear layers of its blocks in NF4, nested."""
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model = _on_meta(config)
    quantizer = Bnb4BitHfQuantizer(double_quantization(torch.bfloat16), pre_quantized=False)
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=torch.bfloat16, device_map=None)
    nibbles = torch.randint(
        0, 256, (_tile_size(config),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    for number, module in enumerate(model.modules()):
        if isinstance(module, Linear4bit):
            module._parameters["weight"] = _random_4bit(module, nibbles, number)
            if module.bias is not None:  # of a checkpoint in bf16, not of the module's making
                bias = module.bias.to(torch.bfloat16)
                module._parameters["bias"] = torch.nn.Parameter(bias, requires_grad=False)
    _fill(model)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantizer.quantization_config
    return model


def random_dense(config: Any) -> Any:
    """A causal LM of ``config`` on the CPU, all in bf16."""
    model = _on_meta(config)
    _fill(model)
    return model


def _on_meta(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _tile_size(config: Any) -> int:
    return min(_TILE_NUM_ELEMENTS, int(config.vocab_size * config.hidden_size))


def _fill(model: Any) -> None:
    """Give everything that has no memory yet random bytes, and the model its tables."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_tile_size(model.config), generator=generator).mul_(0.02).bfloat16()
    for number, module in enumerate(model.modules()):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    made = _random_dense(tensor, noise, number)
                    table[key] = nn.Parameter(made, False) if key in module._parameters else made
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config)
    model.tie_weights()


def with_lora(
    model: Any,
    rank: int = 16,
    dropout: float = 0.0,
    targets: Sequence[str] = TARGETS,
    use_dora: bool = False,
) -> Any:
    """LoRA in fp32 on the seven projections, or on ``targets``, with both factors random.

    With DoRA the base has to be where its norms are quickly computed.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=rank,
            lora_dropout=dropout,
            target_modules=list(targets),
            task_type="CAUSAL_LM",
            use_dora=use_dora,
        ),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 1e-3)
    return adapted


def _random_4bit(module: Any, nibbles: torch.Tensor, number: int) -> Any:
    import bitsandbytes.functional as F

    shape = torch.Size((module.out_features, module.in_features))
    format = Format("nf4", double_quant=True, quant_storage=torch.uint8)
    form = format.form(shape)
    parts = {
        "packed": _tiled(nibbles, form["packed"].numel(), number).view(-1, 1),
        "absmax": _tiled(nibbles, form["absmax"].numel(), number + 1),
        "nested_absmax": torch.full(form["nested_absmax"].shape, 0.02),
        "code": F.get_4bit_type("nf4", device="cpu"),
        "offset": torch.tensor(0.06),
        "nested_code": F.create_dynamic_map(),
    }
    weight = format.weight(parts["packed"], format.state(parts, shape, torch.bfloat16), module)
    own(module, weight)
    return weight


def _random_dense(like: torch.Tensor, noise: torch.Tensor, number: int) -> torch.Tensor:
    if like.dim() < 2:
        return torch.ones(like.shape, dtype=like.dtype)
    return _tiled(noise, like.numel(), number).to(like.dtype).view(like.shape)


def _tiled(tile: torch.Tensor, num_elements: int, number: int) -> torch.Tensor:
    """``num_elements`` of ``tile`` over and over, from a place that depends on ``number``."""
    shifted = tile.roll(number * 4099)
    out = torch.empty(num_elements, dtype=tile.dtype)
    for start in range(0, num_elements, tile.numel()):
        piece = out[start : start + tile.numel()]
        piece.copy_(shifted[: piece.numel()])
    return out
