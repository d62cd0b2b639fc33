"""Small random causal LMs for the gates: real checkpoints on disk, loaded the way a user loads.

Nothing here is special to Poros. A configuration of the architecture is shrunk, random weights are
saved as safetensors, loaded with transformers and bitsandbytes, and given LoRA adapters by PEFT.
Three choices make a comparison worth its time: LoRA's B is not zero, so every gradient is non-zero;
norm weights and biases differ from layer to layer, so a tensor of the wrong layer is seen; and
windows are shorter than the sequences, so a wrong mask is seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import UnsupportedModelError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

# The architectures that the gates promise, by the name a user types, with their model_type.
ARCHITECTURES = {
    "qwen2": "qwen2",
    "llama": "llama",
    "mistral": "mistral",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_shared_kv": "gemma4_text",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
}

# Sizes that only one family has, and what makes a variant of it.
_SPECIAL: dict[str, dict[str, Any]] = {
    "gemma4": {
        "global_head_dim": 48,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_shared_kv": {
        "global_head_dim": 48,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
    },
    "mixtral": {"output_router_logits": True},
    "qwen3_moe": {"output_router_logits": True},
}

VOCAB_SIZE = 512

# Attributes under which configurations keep a dropout probability inside the decoder.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout")


def small_config(
    architecture: str, *, num_layers: int = 6, hidden_size: int = 128, dropout: float = 0.0
) -> "PreTrainedConfig":
    """Build a small configuration of an architecture.

    Args:
        architecture: A name of ``ARCHITECTURES``, or any ``model_type`` that transformers knows; a
            model type outside ``ARCHITECTURES`` is shrunk as far as its attribute names are the
            usual ones.
        num_layers: Decoder layers. When the architecture has several kinds of layers (sliding and
            full attention), they take turns.
        hidden_size: Width; a multiple of 8, since there are four heads and two key-value heads.
        dropout: Dropout probability of attention and residual paths, where the architecture has it.

    Raises:
        UnsupportedModelError: If transformers has no such model type, or it cannot be shrunk.
    """
    from transformers import CONFIG_MAPPING

    model_type = ARCHITECTURES.get(architecture, architecture)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"expected an architecture that the gates can build, found {architecture!r}; the "
            f"validated names are {', '.join(ARCHITECTURES)}, and any other model_type that this "
            "transformers release knows can be tried"
        )
    head_dim = hidden_size // 4
    wanted: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 256,
        "sliding_window": 8,
        # Wide enough that attention is far from uniform: a wrong mask then moves many bits.
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(_DROPOUTS, dropout),
    }
    config_class = CONFIG_MAPPING[model_type]
    try:
        default = config_class()
        # Not hasattr: sizes that vary by layer refuse to be read for the whole model.
        known = default.to_dict()
        kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
        if kinds:
            wanted["layer_types"] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
        usual = {key: wanted[key] for key in wanted if key in known}
        return config_class(**usual, **_SPECIAL.get(architecture, {}))
    except Exception as error:
        raise UnsupportedModelError(
            f"expected a {architecture!r} configuration that takes small sizes, found "
            f"{type(error).__name__}: {error}; check a small checkpoint of it with "
            "`poros check MODEL_DIR` instead"
        ) from error


def write_checkpoint(
    config: "PreTrainedConfig", directory: Path, *, dtype: torch.dtype, seed: int = 0
) -> None:
    """Save a random model of ``config`` to ``directory`` as safetensors.

    Equal arguments write equal bytes. The caller's random state is left as it was.

    Raises:
        UnsupportedModelError: If transformers has no causal language model for the configuration.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), _no_progress_bars():
        torch.default_generator.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:
            raise UnsupportedModelError(
                f"expected a causal language model of type {config.model_type!r}, found "
                f"{type(error).__name__}: {error}"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
        model.save_pretrained(directory)


def load_base(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    quantize: bool = True,
    attn_implementation: str | None = None,
) -> "PreTrainedModel":
    """Load a checkpoint with transformers, as NF4 with double quantization or as it is.

    Args:
        directory: A folder that ``from_pretrained`` accepts; nothing is looked up on a network.
        dtype: Dtype of everything that is not quantized, and the 4-bit compute dtype.
        device: Device of the whole model.
        quantize: False loads dense weights.
        attn_implementation: As in ``from_pretrained``; None is its default.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    if quantize:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)
    if torch.device(device).type == "cpu":
        # In eval mode bitsandbytes repacks 4-bit weights for AVX512-bf16 in place and rounds their
        # scales: the bytes, and with them every later result, would change under the comparison.
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = False
    return model


def attach_lora(
    base: "PreTrainedModel", *, rank: int = 8, dropout: float = 0.0, seed: int = 0
) -> "PeftModel":
    """Attach LoRA to every linear layer of the decoder blocks, with seeded and non-zero A and B.

    For most families these are the seven projections (q, k, v, o, gate, up, down). The values are
    drawn on the CPU, so they are the same for every device.
    """
    from peft import LoraConfig, get_peft_model

    linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    # Blocks are numbered; the head and other single layers are not.
    in_blocks = {name.split(".")[-1] for name in linears if any(map(str.isdigit, name.split(".")))}
    if not in_blocks:
        raise UnsupportedModelError(
            f"expected linear layers in numbered decoder blocks, found {linears or 'no linear'} in "
            f"{type(base).__name__}"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=sorted(in_blocks),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = parameter.shape[-1] ** -0.5 if "lora_A" in name else 0.02
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def make_model(
    architecture: str,
    *,
    num_layers: int = 6,
    hidden_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    dropout: float = 0.0,
    seed: int = 0,
    rank: int = 8,
    **loading: Any,
) -> "PeftModel":
    """Build a small random model with adapters, through a checkpoint on disk.

    Args:
        architecture: As in ``small_config``.
        num_layers: Decoder layers.
        hidden_size: Width, a multiple of 8.
        dtype: Of everything that is not NF4.
        dropout: Of LoRA and of the architecture's own dropouts.
        seed: Of the base weights and of the adapters.
        rank: Of LoRA.
        **loading: ``quantize``, ``device`` and ``attn_implementation`` of ``load_base``.

    Exactness:
        Two calls with equal arguments give models with equal bytes.

    Raises:
        UnsupportedModelError: If the architecture is unknown or cannot be built small.
    """
    config = small_config(
        architecture, num_layers=num_layers, hidden_size=hidden_size, dropout=dropout
    )
    with TemporaryDirectory(prefix="poros-tiny-") as directory:
        write_checkpoint(config, Path(directory), dtype=dtype, seed=seed)
        base = load_base(directory, dtype=dtype, **loading)
    # The folder is gone and had a random name, which would end up in every saved adapter.
    base.name_or_path = base.config.name_or_path = ""
    return attach_lora(base, rank=rank, dropout=dropout, seed=seed + 1)


def make_batches(
    num_batches: int,
    *,
    batch_size: int = 2,
    num_tokens: int = 24,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    padded: bool = True,
) -> list[dict[str, torch.Tensor]]:
    """Draw token batches on the CPU: ``input_ids``, ``attention_mask``, ``labels``.

    Args:
        num_batches: Number of micro-batches.
        batch_size: Rows (B).
        num_tokens: Columns (T).
        vocab_size: Ids are drawn from 3 up to here (the first three are pad, bos and eos).
        seed: Of the draw.
        padded: Pad the end of the last row, a different length in each batch.

    Returns:
        Dictionaries of (B, T) int64 tensors; padding has mask 0 and label -100.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, num_tokens)
    batches = []
    for index in range(num_batches):
        input_ids = torch.randint(min(3, vocab_size - 1), vocab_size, shape, generator=generator)
        attention_mask = torch.ones_like(input_ids)
        num_padding = index % (num_tokens // 2) if padded and num_tokens > 1 else 0
        if num_padding:
            input_ids[-1, -num_padding:] = 0
            attention_mask[-1, -num_padding:] = 0
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        batches.append({"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels})
    return batches


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence transformers' bars for loading and saving, and put them back as they were."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
