"""The fields of a recipe: model, data, adapter, training, memory, output.

Every field has a default that suits a person with one 24 GB card, so a recipe needs no more than a
model and data. ``adapter`` and ``training`` take PEFT's and TRL's fields under their names
(``poros.recipes.passing``); those that stand here have a default of ours, or a flag of the command
line. A field's type says how its value is read from a file or a flag; its line of help serves both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import Field

from poros.recipes.values import Modules, ShareOrFile, ShareOrNumber, Size, Text

Method = Literal["sft", "dpo", "kto", "reward"]
METHODS: tuple[str, ...] = get_args(Method)

THEIRS = None
"""Stands for the type of the library's field of the same name."""
Count = Annotated[int, Field(ge=1, le=4096)]
Number = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(gt=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=0.9)]
Often = Annotated[ShareOrNumber, Field(gt=0)]


def _setting(default: Any, about: str, *, flag: str | None = None) -> Any:
    """Declare a setting; its flag is that of its own name, unless it has another or none ("")."""
    return field(default=default, metadata={"about": about, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The frozen base."""

    source: Text = _setting(
        "", "Checkpoint folder, store written by `poros load`, or name on the hub.", flag="MODEL"
    )
    quantization: Literal["nf4", "fp4", "none"] = _setting(
        "nf4", "Quantization of the base; none keeps it dense."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = _setting(
        "bfloat16", "Dtype in which the base computes, and of its weights that are not quantized."
    )
    attention: Text | None = _setting(
        None,
        "Attention: sdpa, eager, flash_attention_2, ... of transformers; packed, of documents in "
        "packed rows. Default: packed on a GPU, where it fits; else the choice of transformers.",
    )
    vision: Literal["keep", "drop"] = _setting(
        "keep", "Towers of the base for images and sound: keep them on the device, or drop them."
    )
    store: Text | None = _setting(None, "Folder that keeps the quantized base for the next run.")
    host_budget: Size | None = _setting(
        None, "Host memory for the base (64GiB); the rest is read from the store."
    )


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """The rows to train on."""

    source: Text | tuple[Text, ...] = _setting(
        "",
        "File or folder of rows (JSON, CSV, Parquet), or name of a data set on the hub; or a list.",
        flag="DATA",
    )
    weights: tuple[Weight, ...] | None = _setting(None, "", flag="")
    """How often each epoch takes the rows of each source: 2 takes them twice, 0.5 half of them."""
    config: Text | None = _setting(None, "Configuration of a data set on the hub.")
    split: Text | None = _setting(None, "Split of a data set on the hub; default: train.")
    validation: ShareOrFile = _setting(
        0.0, "Share of the rows that is held out, or a file of rows."
    )
    chat_template: Text = _setting("model", "model: its own; chatml, llama3; or a .jinja file.")
    loss_on: Literal["auto", "assistant", "completion", "all"] = _setting(
        "auto",
        "Tokens to train on; auto: the assistant's messages, completions, or all of plain text.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """The adapter: fields of ``peft.LoraConfig``."""

    r: Count = _setting(16, "Rank of the adapter's matrices.", flag="--rank")
    lora_alpha: Positive | None = _setting(
        None, "LoRA alpha, the numerator of the scaling; default: 2 x rank.", flag="--alpha"
    )
    lora_dropout: Share = _setting(0.0, "Dropout on the adapter's input.", flag="--dropout")
    target_modules: Modules = _setting("all-linear", "Modules that get an adapter.")
    use_dora: bool = _setting(False, "", flag="")
    use_rslora: bool = _setting(False, "", flag="")
    dtype: Literal["float32", "bfloat16"] = _setting(
        "float32", "Dtype of the adapter's weights.", flag="--adapter-dtype"
    )
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of ``LoraConfig``."""


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """The training: fields of TRL's configuration of the method, and four of ours."""

    method: Method = _setting(
        "sft",
        "sft: on examples; dpo: on preferences; kto: on answers that are good or bad; reward: a "
        "reward model, on preferences.",
    )
    num_train_epochs: Positive = _setting(1.0, "Number of passes over all rows.", flag="--epochs")
    max_steps: Number | None = _setting(
        None, "Number of optimizer steps, instead of epochs.", flag="--steps"
    )
    per_device_train_batch_size: Count = _setting(
        1, "Rows per micro-batch; 2 with kto.", flag="--batch-size"
    )
    gradient_accumulation_steps: Count = _setting(
        8, "Micro-batches of a step, for which a block is loaded once.", flag="--accumulation"
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = _setting(
        2e-4, "Peak learning rate; 2e-05 with dpo and kto, 0.0001 with reward.", flag="--lr"
    )
    lr_scheduler_type: Annotated[str, THEIRS] = _setting(
        "cosine",
        "Learning-rate schedule after the warm-up: linear, constant, ...",
        flag="--schedule",
    )
    warmup_steps: ShareOrNumber = _setting(
        0.03, "Warm-up steps: a share below 1, or a number.", flag="--warmup"
    )
    optim: Annotated[str, THEIRS] = _setting(
        "adamw_torch_fused",
        "Optimizer, by its name in transformers: adamw_8bit, sgd, ...",
        flag="--optimizer",
    )
    lora_plus: Positive | None = _setting(None, "LoRA+: ratio of the rates of B and A, about 16.")
    bf16: bool | Literal["auto"] = _setting(
        "auto", "Multiply in bfloat16 (autocast) and keep the adapter's dtype; auto: on a GPU."
    )
    use_liger_kernel: bool | Literal["auto"] = _setting(
        "auto",
        "Liger's norms, GeGLU and rotary embeddings; auto: on a GPU, if they are there.",
        flag="--liger",
    )
    adapter_kernels: Literal["auto", "fused", "exact", "grouped", "peft"] = _setting(
        "auto",
        "Kernels of the adapter. grouped: fewer products, within rounding of PEFT's; auto: "
        "grouped for LoRA without dropout in bfloat16 on a GPU, else fused.",
    )
    max_length: Annotated[int, Field(ge=8)] = _setting(
        2048, "Most tokens of a row; longer rows are cut."
    )
    packing: bool = _setting(
        True, "Pack several documents into a row; each attends only to itself."
    )
    pad_to_multiple_of: Count = _setting(
        64, "Rows are padded to a multiple of this many tokens.", flag="--pad-to"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = _setting(0, "Random seed.")
    save_steps: Often = _setting(50, "Steps between checkpoints.", flag="--save-every")
    save_total_limit: Several = _setting(2, "Number of checkpoints to keep.", flag="--keep")
    eval_steps: Often | None = _setting(
        None, "Steps between validations; default: once an epoch.", flag="--evaluate-every"
    )
    early_stopping_patience: Number | None = _setting(
        None, "Stop after so many validations without a better loss.", flag="--early-stopping"
    )
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of TRL's configuration."""


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """The memory for the base during training."""

    vram: Size | None = _setting(None, "GPU memory budget, such as 8GiB; default: the free memory.")
    slots: Several | None = _setting(None, "Blocks on the GPU at a time, instead of --vram.")
    resident: bool = _setting(False, "Keep the whole base on the device: nothing is streamed.")
    device: Literal["cpu", "cuda", "cuda:0"] | None = _setting(
        None, "The device; CUDA_VISIBLE_DEVICES=N chooses among several GPUs."
    )


@dataclass(frozen=True, kw_only=True)
class OutputPart:
    """The files that a run writes."""

    folder: Text | None = _setting(
        None, "Folder of the run; default: runs/MODEL-DATA-METHOD.", flag="--out"
    )
    merged: Text | None = _setting(
        None, "Folder for the base with the adapter in it, a checkpoint."
    )
    trace_step: Number | None = _setting(
        None, "Record where the time of this step goes; the step takes longer."
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelPart = field(default_factory=ModelPart)
    data: DataPart = field(default_factory=DataPart)
    adapter: AdapterPart = field(default_factory=AdapterPart)
    training: TrainingPart = field(default_factory=TrainingPart)
    memory: MemoryPart = field(default_factory=MemoryPart)
    output: OutputPart = field(default_factory=OutputPart)

    def is_autocast(self, device_type: str) -> bool:
        """Whether adapters are multiplied in bfloat16, whatever they are kept in."""
        if self.training.bf16 == "auto":
            return device_type == "cuda" and self.model.dtype == "bfloat16"
        return bool(self.training.bf16)

    def adapter_kernels(self, device_type: str) -> str:
        """The kernels of the adapter, as ``poros.prepare`` takes them."""
        if self.training.adapter_kernels != "auto":
            return self.training.adapter_kernels
        adapter = self.adapter
        is_plain = not adapter.use_dora and not adapter.lora_dropout
        is_grouped = is_plain and device_type == "cuda" and self.is_autocast(device_type)
        return "grouped" if is_grouped else "fused"

    @property
    def is_packed(self) -> bool:
        """Whether several documents share a row."""
        return self.training.method == "sft" and self.training.packing

    @property
    def alpha(self) -> float:
        """The numerator of the adapter's scaling."""
        given = self.adapter.lora_alpha
        return 2.0 * self.adapter.r if given is None else given

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, section by section; what is None or decides nothing is left out."""
        training = self.training
        found: dict[str, dict[str, Any]] = {}
        for key in settings():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            is_idle = (key == "training.packing" and training.method != "sft") or (
                key == "training.num_train_epochs" and training.max_steps is not None
            )
            if value is not None and not is_idle:
                plain = list(value) if isinstance(value, tuple) else value
                found.setdefault(section, {})[name] = plain
        found["adapter"] |= self.adapter.more
        found["training"] |= training.more
        return found

    def as_yaml(self) -> str:
        """The recipe as a file, every value spelled out."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, Any] = get_type_hints(Recipe)


@dataclass(frozen=True)
class Setting:
    """One field of a recipe, as files and flags know it."""

    default: Any
    hint: Any
    """Its type; None: that of the library's field of this name."""
    flag: str
    about: str


@cache
def settings() -> dict[str, Setting]:
    """All settings with a default of ours by their dotted keys, in order."""
    found = {}
    for section, part in SECTIONS.items():
        hints = get_type_hints(part, include_extras=True)
        for each in fields(part):
            if each.metadata:
                is_theirs = THEIRS in get_args(hints[each.name])
                hint = None if is_theirs else hints[each.name]
                flag, about = each.metadata["flag"], each.metadata["about"]
                if flag is None:
                    flag = f"--{each.name.replace('_', '-')}"
                found[f"{section}.{each.name}"] = Setting(each.default, hint, flag, about)
    return found


def named(name: str) -> list[str]:
    """Return the keys of settings that have a name, or a flag of that name."""
    flag = f"--{name.replace('_', '-')}"
    every = settings().items()
    return [key for key, each in every if key.endswith(f".{name}") or each.flag == flag]
