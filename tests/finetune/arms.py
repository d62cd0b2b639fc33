"""Recipes that are trained in several ways, whose results have to be equal."""

from pathlib import Path
from typing import Any

from tests.finetune.subjects import SHORT, Trained, recipe_of, run

COMMON: dict[str, Any] = {
    **SHORT,
    "data__chat_template": "chatml",
    "training__per_device_train_batch_size": 2,
    "training__gradient_accumulation_steps": 2,
    "training__learning_rate": 1e-2,
    "training__warmup_steps": 0,
    "training__max_steps": 2,
}
Row = tuple[str, dict[str, Any]]
"""Form of the rows, and what is set."""


def training(form: str = "text", **said: Any) -> Row:
    if form in ("preferences", "labelled"):
        said["method"] = "dpo" if form == "preferences" else "kto"
    return form, {f"training__{name}": value for name, value in said.items()}


def adapter(**said: Any) -> Row:
    return "text", {f"adapter__{name}": value for name, value in said.items()}


RESTARTS = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
MOMENTUM = {"optim": "rmsprop", "optim_args": "momentum=0.5"}
PATTERNS = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}}
EVALUATED = {"data__validation": 0.04, "training__eval_steps": 1}
RECIPES: dict[str, Row] = {
    # Forms of rows and methods.
    "text": training(),
    "sft, packed": training("messages", packing=True, bf16=True),
    "packed attention": (
        "messages",
        {"training__packing": True, "training__bf16": True, "model__attention": "packed"},
    ),
    "sft, padded": training("messages", packing=False),
    "dpo": training("preferences", bf16=True),
    "kto": training("labelled", bf16=True),
    # Adapters, and what they are trained with.
    "dora": ("completions", {"adapter__use_dora": True, "training__bf16": True}),
    "lora+": training(lora_plus=16),
    "warmed up and evaluated": (
        "text",
        {**EVALUATED, "training__warmup_steps": 0.5, "training__max_steps": 3},
    ),
    "bfloat16 adapter": adapter(dtype="bfloat16"),
    "bfloat16 adapter, bf16": ("text", {"adapter__dtype": "bfloat16", "training__bf16": True}),
    "dense base": ("text", {"model__quantization": "none"}),
    "validation": ("completions", {"data__validation": 0.1, "training__eval_steps": 1}),
    # What is passed on to TRL, and to PEFT.
    "noise on the embedding": training(neftune_noise_alpha=5),
    "schedule with arguments": training(**RESTARTS),
    "warm-up by steps": training(warmup_steps=2, lr_scheduler_type="constant_with_warmup"),
    "moments": training(adam_beta1=0.5, adam_beta2=0.9, adam_epsilon=1e-3),
    # Under autocast, and without dropout: others are not grouped.
    "grouped adapters": (
        "text",
        {
            **{"training__adapter_kernels": "grouped", "training__bf16": True},
            "adapter__lora_dropout": 0,
        },
    ),
    "weight decay": training(weight_decay=0.5),
    "clipping": training(max_grad_norm=0.01),
    "another optimizer": training(optim="adafactor"),
    "arguments of an optimizer": training(**MOMENTUM),
    "another order": training(data_seed=7),
    "rows of like length": training(train_sampling_strategy="group_by_length", packing=False),
    "pairs of like length": training("preferences", train_sampling_strategy="group_by_length"),
    "rows in their order": training(train_sampling_strategy="sequential"),
    "losses of preferences": training(
        "preferences", loss_type=["sigmoid", "sft"], loss_weights=[1, 0.5]
    ),
    "smoothed preferences": training("preferences", loss_type="robust", label_smoothing=0.3),
    "weights of good and bad": training("labelled", desirable_weight=2),
    "without a KL term": training("labelled", loss_type="apo_zero_unpaired"),
    "several at once": training(neftune_noise_alpha=5, weight_decay=0.5, **MOMENTUM, **RESTARTS),
    "biases": adapter(bias="all"),
    "bias of B": adapter(lora_bias=True),
    "another start": adapter(init_lora_weights="gaussian"),
    "a start that is not the base": adapter(init_lora_weights=False),
    "some layers": adapter(target_modules="q_proj,v_proj", layers_to_transform=[0, 2]),
    "ranks of their own": adapter(**PATTERNS),
    "but some modules": adapter(exclude_modules=["down_proj"]),
    # PEFT has no dropout for parameters.
    "a matrix by name": adapter(
        target_modules="q_proj", target_parameters=["mlp.up_proj.weight"], lora_dropout=0
    ),
    "head and norms": adapter(target_modules="q_proj", modules_to_save=["lm_head", "norm"]),
    "some tokens": adapter(target_modules="q_proj", trainable_token_indices=[5, 6]),
    "rank-stabilized DoRA": adapter(use_dora=True, use_rslora=True),
    "several kinds at once": adapter(
        use_dora=True,
        bias="all",
        init_lora_weights="gaussian",
        modules_to_save=["norm"],
        **PATTERNS,
    ),
}
FAST = (*("dpo", "warmed up and evaluated"), *("several at once", "several kinds at once"))
"""What the others have, these have, or the tests beside them."""


def arm(model: Path, data: Path, out: Path, kind: str, **more: Any) -> Trained:
    return run(recipe_of(output__folder=out, **{**settings(model, data, kind), **more}))


def settings(model: Path, data: Path, kind: str) -> dict[str, Any]:
    form, options = RECIPES[kind]
    source = {"model__source": model, "data__source": data / f"{form}.jsonl"}
    return {**source, **COMMON, **options}


def both(model: Path, data: Path, out: Path, kind: str, **more: Any) -> Trained:
    """The streamed run; asserts that the resident one has its bits."""
    return streamed_as_resident(out, **{**settings(model, data, kind), **more})


def streamed_as_resident(out: Path, **said: Any) -> Trained:
    """The streamed run of these settings; asserts that the resident one has its bits."""
    streamed = run(recipe_of(output__folder=out / "streamed", memory__slots=2, **said))
    resident = run(recipe_of(output__folder=out / "resident", memory__resident=True, **said))
    assert streamed.losses == resident.losses and len(set(streamed.losses)) > 1
    assert streamed.adapter == resident.adapter
    return streamed
