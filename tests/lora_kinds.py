"""What LoRA offers, as options of its configuration: what trains exactly, and is planned."""

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
    "rank and alpha patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 3, "q_proj": 16},
    },
    "head saved": {"modules_to_save": ["lm_head"]},
    "norm saved": {"modules_to_save": ["input_layernorm"]},
    "head and norms saved": {"modules_to_save": ["lm_head", "input_layernorm", "norm"]},
    "layers to transform": {"layers_to_transform": [1]},
    "last layers only": {"layers_to_transform": [1, 2], "layers_pattern": "layers"},
    "bias of lora": {"bias": "lora_only"},
    "lora bias": {"lora_bias": True},
    "all linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*layers\.[02]\..*\.(o_proj|up_proj)"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "k_proj"]},
    "no dropout, embedding too": {"target_modules": ["q_proj", "embed_tokens"], "lora_dropout": 0},
    "some tokens": {"trainable_token_indices": list(range(3, 200))},
}
REPEATED = ("rslora", "dora", "head saved", "layers to transform", "excluded")
"""What they have, others have too."""
