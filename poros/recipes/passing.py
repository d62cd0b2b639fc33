"""Decides which fields of TRL and PEFT a recipe passes on, with reasons for the others.

Names, types and choices are those of the dataclasses: ``trl.SFTConfig``, ``DPOConfig``,
``KTOConfig`` and ``RewardConfig`` for ``training``, ``peft.LoraConfig`` for ``adapter``. Reading
them imports the libraries, which takes seconds, so it waits until a recipe names a field of theirs.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from poros.errors import RecipeError, quoted
from poros.recipes.values import readable, refusing

SECTIONS = ("adapter", "training")
_TRAINING = {
    "it is output.folder (--out)": "output_dir",
    "it is memory.device (--device)": "use_cpu",
    "it is memory.vram (--vram): a plan says what fits": "activation_offloading "
    "auto_find_batch_size",
    "it is training.bf16 (--bf16)": "fp16 fp16_full_eval bf16_full_eval",
    "it is training.use_liger_kernel (--liger)": "liger_kernel_config",
    "it is model, of which no code is run": "model_init_kwargs trust_remote_code "
    "router_aux_loss_coef",
    "it is data.chat_template (--chat-template)": "chat_template_path",
    "it is data.loss_on (--loss-on)": "completion_only_loss assistant_only_loss",
    "it is training.packing (--packing)": "padding_free packing_strategy eval_packing",
    "it is training.train_sampling_strategy": "shuffle_dataset",
    "a recipe is kept beside the adapter, and is no place for a secret: set HF_TOKEN": "hub_token",
    "poros finetune trains on one GPU: start a script with accelerate": "deepspeed fsdp "
    "fsdp_config parallelism_config local_rank average_tokens_across_devices ddp_backend "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
    "ddp_timeout log_on_each_node save_on_each_node log_level_replica",
    "a streamed run would not have the bits of a resident one, or could not go on": "torch_compile "
    "torch_compile_backend torch_compile_mode label_smoothing_factor optim_target_modules "
    "accelerator_config ignore_data_skip dataloader_in_order save_only_model",
    "poros finetune decides it": "gradient_checkpointing activation_checkpointing "
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs resume_from_checkpoint "
    "restore_callback_states_from_checkpoint enable_jit_checkpoint logging_nan_inf_filter debug "
    "skip_memory_metrics full_determinism do_train do_eval do_predict use_cache "
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics batch_eval_metrics label_names hub_strategy hub_always_push "
    "dataset_text_field dataset_kwargs remove_unused_columns length_column_name eos_token "
    "pad_token truncation_mode precompute_ref_log_probs precompute_ref_batch_size sync_ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps",
}
"""Why fields of TRL are not passed on, and which."""
_ADAPTER = {
    "poros finetune decides it": "task_type peft_type auto_mapping peft_version revision "
    "base_model_name_or_path inference_mode fan_in_fan_out megatron_config megatron_core "
    "ensure_weight_tying use_qalora qalora_group_size",
    "its value is an object of Python: call poros.prepare in a script": "runtime_config "
    "velora_config monteclora_config kasa_config use_bdlora arrow_config",
    "it changes the base as well, which `poros merge` and `poros chat` take as it is": "eva_config "
    "corda_config lora_ga_config loftq_config",
    "poros.prepare refuses it: a block would be shared, or not recomputed": "layer_replication "
    "alora_invocation_tokens",
}
_BY_METHOD = {
    ("sft", "loss_type"): "the model's own loss is computed, in slices of the head",
    ("kto", "train_sampling_strategy"): "each micro-batch holds the rows that its KL term pairs",
}
_OPTIMIZERS = ("flora", "lomo", "galore", "apollo", "schedule_free")
"""Refused by a part of their name."""
_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
    *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
"""Losses of DPO, which TRL checks only at the first step."""
_OF_PAIRS = "rewards/margins rewards/chosen rewards/rejected logps/chosen logps/rejected entropy"
_METRICS = {
    "dpo": f"rewards/accuracies {_OF_PAIRS} logits/chosen logits/rejected mean_token_accuracy",
    "kto": f"kl {_OF_PAIRS} logits/chosen logits/rejected",
    "reward": "accuracy margin min_reward mean_reward max_reward",
}
"""What TRL's evaluations give beside the loss; it looks a name up only once there is one."""
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_NARROWER: dict[str, Any] = {
    "rank_pattern": dict[str, Annotated[int, Field(ge=1)]],
    "alpha_pattern": dict[str, Annotated[float, Field(gt=0)]],
    "adam_beta1": Annotated[float, Field(ge=0, lt=1)],
    "adam_beta2": Annotated[float, Field(ge=0, lt=1)],
    "data_seed": Annotated[int, Field(ge=0, lt=2**32)],
    "per_device_eval_batch_size": Annotated[int, Field(ge=1)],
    "dataloader_prefetch_factor": Annotated[int, Field(ge=1)],
    "f_divergence_type": Literal[_DIVERGENCES],
}
"""Types of fields for which the library's own annotation is too wide."""
_OTHER_INITS = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga", "mica", "orthogonal")


def refused(section: str, name: str, method: str) -> str | None:
    """Return why a field is not passed on; None if it is passed on, or there is no such field."""
    table: Mapping[str, str] = {"training": _TRAINING, "adapter": _ADAPTER}.get(section, {})
    own = _BY_METHOD.get((method, name)) if section == "training" else None
    return own or next((why for why, names in table.items() if name in names.split()), None)


def types_of(section: str, method: str) -> dict[str, Any]:
    """The type of every field that is passed on, by name; imports PEFT or TRL.

    Raises:
        ImportError: If the library is not there.
    """
    config = config_of(method if section == "training" else None)
    hints = get_type_hints(config)
    found = {}
    for each in dataclasses.fields(config):
        if each.init and refused(section, each.name, method) is None:
            choices = each.metadata.get("choices") or ()
            found[each.name] = _particular(each.name, method) or readable(hints[each.name], choices)
    return found


@contextmanager
def refusals(section: str, library: str) -> Iterator[None]:
    """Turn what a library refuses in the body into one error.

    Raises:
        RecipeError: With what it says.
    """
    try:
        yield
    except (ValueError, TypeError, IndexError, NotImplementedError, ImportError) as error:
        raise RecipeError(
            f"{section}: expected settings that go together, found that {library} refuses them: "
            f"{quoted(str(error), is_bare=True, limit=600)}; change one of them"
        ) from error


def config_of(method: str | None) -> Any:
    """TRL's configuration of a method; PEFT's of adapters for None. Imports the library."""
    if method is None:
        from peft import LoraConfig

        return LoraConfig
    import trl

    return getattr(trl, "RewardConfig" if method == "reward" else f"{method.upper()}Config")


def _particular(name: str, method: str) -> Any:
    """Return the type of a field for which the library's own annotation is too wide."""
    if name == "optim":
        from transformers.training_args import OptimizerNames

        known = [str(each.value) for each in OptimizerNames]
        why = (
            "expected an optimizer of adapters that steps after the backward and has a schedule, "
            "found one of whole matrices, of all weights, or without a schedule; choose "
            "adamw_torch_fused (in a script, schedule-free ones train too, and poros.optim.Flora "
            "trains all weights)"
        )
        bad = [each for each in (*known, "flora") if any(part in each for part in _OPTIMIZERS)]
        left = tuple(each for each in known if each not in bad)
        return Annotated[Literal[left], refusing(bad, why)]
    if name == "init_lora_weights":
        why = (
            "expected true, false or gaussian, found one of those which change the base, or read "
            "it; `poros merge` and `poros chat` take it as it is"
        )
        return Annotated[bool | Literal["gaussian"], refusing(_OTHER_INITS, why)]
    if method == "dpo" and name == "loss_type":
        return readable(list[Literal[_LOSSES]])  # type: ignore[valid-type]
    if name == "metric_for_best_model":
        names = ("loss", *_METRICS.get(method, "").split())
        return Literal[(*names, *(f"eval_{each}" for each in names))]
    return _NARROWER.get(name)
