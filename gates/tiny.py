"""Small random causal LMs for the gates: real checkpoints on disk, loaded the way a user loads.

Nothing here is special to Poros. A configuration of the architecture is shrunk, random weights are
saved as safetensors, loaded with transformers and bitsandbytes, and given adapters by PEFT.
Three choices make a comparison worth its time: no adapter is zero, so every gradient is non-zero;
norm weights and biases differ from layer to layer, so a tensor of the wrong layer is seen; and
windows are shorter than the sequences, so a wrong mask is seen.

Language models with a vision tower are configured as checkpoints on the hub have them. The tower's
layers are checkpointable like those of the decoder, and there are fewer of them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import UnsupportedModelError
from poros.gates.kinds import attach
from poros.kernels.nf4 import double_quantization
from poros.model.vision import find_towers

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
_GEMMA4 = {
    "global_head_dim": 48,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gemma4": _GEMMA4,
    "gemma4_shared_kv": {**_GEMMA4, "num_kv_shared_layers": 2},
    "mixtral": {"output_router_logits": True},
    "qwen3_moe": {"output_router_logits": True},
}


@dataclass(frozen=True)
class Multimodal:
    """A family, and how it is made small."""

    model_type: str
    language_model: str
    """The architecture of its language model."""
    tower: dict[str, Any]
    """Sizes of its vision tower."""
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields."""


_VIT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 28, "patch_size": 14},
}
_QWEN: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14},
}
_QWEN3 = {**_QWEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_QWEN_TOKENS = {"image_token_id": 505, "video_token_id": 506, "vision_start_token_id": 507}

MULTIMODAL = {
    "gemma3_multimodal": Multimodal(
        *("gemma3", "gemma3", {**_VIT, "model_type": "siglip_vision_model"}),
        {"mm_tokens_per_image": 4, "image_token_index": 505},
    ),
    "gemma4_multimodal": Multimodal(
        *("gemma4", "gemma4_shared_kv"),
        {**_VIT, "head_dim": 16, "num_key_value_heads": 4, "position_embedding_size": 64},
        {"audio_config": None, "image_token_id": 505, "video_token_id": 506, "audio_token_id": 507},
    ),
    "qwen2_5_vl": Multimodal(
        *("qwen2_5_vl", "qwen2_5_vl_text"),
        {**_QWEN, "fullatt_block_indexes": [1], "window_size": 56},
        _QWEN_TOKENS,
    ),
    "qwen3_vl": Multimodal("qwen3_vl", "qwen3_vl_text", _QWEN3, _QWEN_TOKENS),
    "mistral3": Multimodal(
        *("mistral3", "mistral", {**_VIT, "model_type": "pixtral", "head_dim": 16}),
        {"image_token_index": 505, "tie_word_embeddings": False},
    ),
    "llama4": Multimodal(
        *("llama4", "llama4_text"),
        {
            **{**_VIT, "image_size": 56, "vision_output_dim": 64, "projector_input_dim": 64},
            # Four patches side by side are the input of the projector.
            **{"projector_output_dim": 64, "pixel_shuffle_ratio": 0.5, "intermediate_size": 256},
        },
        {"image_token_index": 505},
    ),
    "qwen3_5": Multimodal("qwen3_5", "qwen3_5_text", _QWEN3, _QWEN_TOKENS),
    "qwen3_5_moe": Multimodal("qwen3_5_moe", "qwen3_5_moe_text", _QWEN3, _QWEN_TOKENS),
}
"""Families by the name that a user types."""

VOCAB_SIZE = 512

# A configuration that ignores what it is asked for has its default size, which no gate can afford.
_MAX_PARAMETERS = 30_000_000


def model_type_of(architecture: str) -> str:
    """The ``model_type`` that an architecture's name stands for.

    Raises:
        UnsupportedModelError: If transformers has no such model type.
    """
    from transformers import CONFIG_MAPPING

    model_type = ARCHITECTURES.get(architecture, architecture)
    if architecture in MULTIMODAL:
        model_type = MULTIMODAL[architecture].model_type
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"expected an architecture that the gates can build, found {architecture!r}; the "
            f"validated names are {', '.join((*ARCHITECTURES, *MULTIMODAL))}, and any other "
            "model_type that this transformers release knows can be tried"
        )
    return model_type


def small_config(
    architecture: str, *, num_layers: int = 6, hidden_size: int = 128, dropout: float = 0.0
) -> "PreTrainedConfig":
    """Build a small configuration of an architecture.

    Args:
        architecture: A name of ``ARCHITECTURES`` or of ``MULTIMODAL``, or any ``model_type``
            that transformers knows; one outside these is shrunk as far as its
            attribute names are the usual ones.
        num_layers: Decoder layers. When the architecture has several kinds of layers (sliding and
            full attention), they take turns.
        hidden_size: Width; a multiple of 8, since there are four heads and two key-value heads.
        dropout: Dropout probability of attention and residual paths, where the architecture has it.

    Raises:
        UnsupportedModelError: If transformers has no such model type, or it cannot be shrunk.
    """
    from transformers import CONFIG_MAPPING

    model_type = model_type_of(architecture)
    if architecture in MULTIMODAL:
        text = small_config(
            MULTIMODAL[architecture].language_model,
            num_layers=num_layers,
            hidden_size=hidden_size,
            dropout=dropout,
        )
        return _with_tower(architecture, text)
    wanted = _small_sizes(num_layers, hidden_size, dropout)
    if architecture not in ARCHITECTURES:
        # As the Trainer sets it: with a cache a family may compute in another precision (codegen).
        wanted["use_cache"] = False
    config_class = CONFIG_MAPPING[model_type]
    try:
        sizes = {**_shrunk(config_class, wanted), **_SPECIAL.get(architecture, {})}
        return config_class(**sizes)
    except Exception as error:
        raise UnsupportedModelError(
            f"expected a {architecture!r} configuration that takes small sizes, found "
            f"{type(error).__name__}: {error}; check a small checkpoint of it with "
            "`poros check MODEL_DIR` instead"
        ) from error


def _with_tower(name: str, text: "PreTrainedConfig") -> "PreTrainedConfig":
    """A family of ``MULTIMODAL`` around a small configuration of its language model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    row = MULTIMODAL[name]
    fields, tower = text.to_dict(), dict(row.tower)
    if "depth" in tower:  # of Qwen: positions have three axes, the projector is in the tower
        tower["out_hidden_size"] = text.hidden_size
        rope, half = fields["rope_parameters"], text.hidden_size // 8
        half = int(half * rope.get("partial_rotary_factor", 1))
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    config_class = CONFIG_MAPPING[row.model_type]
    config: PreTrainedConfig = config_class(text_config=fields, vision_config=tower, **row.others)
    # As a checkpoint has it; it chooses the class.
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class].__name__]
    return config


def _small_sizes(num_layers: int, hidden_size: int, dropout: float) -> dict[str, Any]:
    """Values by the names under which configurations of several families keep them."""
    head_dim = hidden_size // 4
    table = [
        # Of names for the same field the later one counts.
        (hidden_size, "hidden_size d_model n_embd word_embed_proj_dim"),
        (2 * hidden_size, "intermediate_size ffn_dim n_inner d_ff mamba_d_ssm"),
        (2 * hidden_size, "decoder_ffn_dim encoder_ffn_dim"),
        (hidden_size, "moe_intermediate_size expert_ffn_hidden_size"),
        (hidden_size, "shared_expert_intermediate_size"),
        (num_layers, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
        (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input"),
        (head_dim, "head_dim query_pre_attn_scalar mamba_d_head mamba_head_dim"),
        (4, "num_attention_heads n_head n_heads num_heads"),
        (4, "decoder_attention_heads encoder_attention_heads"),
        (2, "num_key_value_heads"),
        # Low-rank attention; queries and keys are a rotated and a plain half.
        (hidden_size // 2, "q_lora_rank kv_lora_rank o_lora_rank"),
        (head_dim, "qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        (2 * head_dim, "qk_head_dim"),
        (head_dim // 2, "rotary_dim"),
        # Experts in one group, and every kind of layer within a few layers.
        (4, "num_experts num_local_experts n_routed_experts"),
        (2, "num_experts_per_tok moe_topk moe_k attn_layer_period expert_layer_period"),
        (1, "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace"),
        (1, "attn_layer_offset expert_layer_offset"),
        # State-space and linear attention heads.
        (2, "linear_num_key_heads linear_num_value_heads"),
        (head_dim, "linear_key_head_dim linear_value_head_dim"),
        (8, "mamba_n_heads mamba_num_heads sliding_window window_size local_attention"),
        (16, "mamba_d_state ssm_state_size mamba_chunk_size"),
        (256, "max_position_embeddings n_positions max_seq_len original_max_position_embeddings"),
        # Wide enough that attention is far from uniform: a wrong mask then moves many bits.
        (0.08, "initializer_range"),
        (0, "pad_token_id num_kv_shared_layers"),
        (1, "bos_token_id"),
        (2, "eos_token_id"),
        # Inside the decoder.
        (dropout, "attention_dropout attn_pdrop resid_pdrop hidden_dropout hidden_dropout_prob"),
        (dropout, "attention_probs_dropout_prob dropout"),
    ]
    return {name: value for value, every in table for name in every.split()}


def _shrunk(config_class: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``wanted`` that the class has, with shortened per-layer lists.

    Configurations within it are shrunk in the same way.
    """
    default = config_class()
    # Not hasattr: sizes that vary by layer refuse to be read for the whole model.
    known = default.to_dict()
    own_names = getattr(config_class, "attribute_map", {})
    usual = {own_names.get(key, key): value for key, value in wanted.items()}
    usual = {key: value for key, value in usual.items() if key in known}
    for key, value in usual.items():
        if type(known[key]) is int and isinstance(value, float):
            usual[key] = int(value)  # a dropout that is declared as a whole number
    if "kv_lora_rank" in known and "num_key_value_heads" in usual:
        usual["num_key_value_heads"] = wanted["num_attention_heads"]  # keys are per query head
    num_layers = wanted["num_hidden_layers"]
    default_num_layers = known.get(own_names.get("num_hidden_layers", "num_hidden_layers"))
    for key, value in known.items():
        per_layer = isinstance(value, list) and len(value) == default_num_layers
        if key == "layer_types" or (
            per_layer and all(isinstance(v, str | int | float) for v in value)
        ):
            kinds = list(dict.fromkeys(value or ()))
            if kinds:
                usual[key] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    for key, part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(known.get(key), dict) and hasattr(part, "attribute_map"):
            usual[key] = {**known[key], **_shrunk(part, wanted)}
    return usual


def write_checkpoint(
    config: "PreTrainedConfig",
    directory: Path,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    auto_class: str | None = None,
) -> None:
    """Save a random model of ``config`` to ``directory`` as safetensors.

    Equal arguments write equal bytes. The caller's random state is left as it was.

    Args:
        auto_class: As in ``poros.load``, by name; None is a language model.

    Raises:
        UnsupportedModelError: If transformers has no such model for the configuration.
    """
    from poros.loaders.build import quiet
    from poros.loaders.settings import model_class_of

    with torch.random.fork_rng(devices=[]), quiet():
        torch.default_generator.manual_seed(seed)
        try:
            model_class, config = model_class_of(config, auto_class)
            model = model_class._from_config(config, dtype=dtype)
        except Exception as error:
            raise UnsupportedModelError(
                f"expected a causal language model of type {config.model_type!r}, found "
                f"{type(error).__name__}: {error}"
            ) from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
            for tower in find_towers(model).values():
                for parameter in tower.parameters():
                    if not parameter.any():  # a projector that begins with zeros hides the images
                        parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
        model.save_pretrained(directory)


def _refuse_large(config: "PreTrainedConfig") -> None:
    """Count the parameters of a model without memory before one that takes it is made."""
    from poros.loaders.settings import model_class_of

    try:
        model_class, config = model_class_of(config)
        with torch.device("meta"):
            model = model_class._from_config(config)
    except Exception:  # the model that is made next says better why
        return
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise UnsupportedModelError(
            f"expected a {config.model_type!r} configuration that takes small sizes, found "
            f"{num_parameters:,} parameters after shrinking it (at most {_MAX_PARAMETERS:,}); "
            "check a small checkpoint of it with `poros check MODEL_DIR` instead"
        )


def load_base(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    quantize: bool = True,
    attn_implementation: str | None = None,
    auto_class: str | None = None,
) -> "PreTrainedModel":
    """Load a checkpoint with transformers, as NF4 with double quantization or as it is.

    Args:
        directory: A folder that ``from_pretrained`` accepts; nothing is looked up on a network.
        dtype: Dtype of everything that is not quantized, and the 4-bit compute dtype.
        quantize: False loads dense weights.
        auto_class: As in ``write_checkpoint``.
    """
    from transformers import AutoConfig

    from poros.loaders.build import quiet
    from poros.loaders.settings import model_class_of

    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    options["trust_remote_code"] = False  # left open, transformers would ask on the terminal
    if quantize:
        options["quantization_config"] = double_quantization(dtype)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with quiet():
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model_class, _ = model_class_of(config, auto_class)
        model = model_class.from_pretrained(directory, local_files_only=True, **options)
    return without_repacking(model)


def without_repacking(model: "PreTrainedModel") -> "PreTrainedModel":
    """Keep bitsandbytes from changing 4-bit weights on a CPU; the same model.

    In eval mode it repacks them for AVX512-bf16 in place and rounds their scales: the bytes, and
    with them every later result, would change under the comparison.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
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
    adapter: str = "lora",
    **loading: Any,
) -> "PeftModel":
    """Build a small random model with adapters, through a checkpoint on disk.

    Args:
        architecture: As in ``small_config``.
        hidden_size: Width, a multiple of 8.
        dtype: Dtype of everything that is not NF4.
        dropout: Probability in the adapters and in the architecture's own dropouts.
        adapter: Kind of the adapters, a name of ``poros.gates.kinds.KINDS``.
        **loading: ``quantize``, ``device`` and ``attn_implementation`` of ``load_base``.

    Exactness:
        Two calls with equal arguments give models with equal bytes.

    Raises:
        UnsupportedModelError: If the architecture is unknown or cannot be built small, or the
            adapter is none that the gates can attach.
    """
    config = small_config(
        architecture, num_layers=num_layers, hidden_size=hidden_size, dropout=dropout
    )
    _refuse_large(config)
    with TemporaryDirectory(prefix="poros-tiny-") as directory:
        write_checkpoint(config, Path(directory), dtype=dtype, seed=seed)
        base = load_base(directory, dtype=dtype, **loading)
    # The folder is gone and had a random name, which would end up in every saved adapter.
    base.name_or_path = base.config.name_or_path = ""
    return attach(base, adapter, rank=rank, dropout=dropout, seed=seed + 1)


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
        batch_size: Rows (B).
        num_tokens: Columns (T).
        vocab_size: Ids are drawn from 3 up to here (the first three are pad, bos and eos).
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
