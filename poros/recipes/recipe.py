"""The fields of a recipe: model, data, adapter, training, memory, output.

Every field has a default that suits a person with one 24 GB card, so a recipe needs no more than a
model and data. A field's ``Kind`` reads its value from a file or a flag of the command line, and
its line of help serves both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from poros.recipes.values import (
    Kind,
    choice,
    real,
    share_or_source,
    size,
    switch,
    text,
    whole,
    words,
)

ADAPTERS = ("lora", "dora", "rslora")
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "schedule_free_adamw", "sgd")
_REFUSED = {
    "flora": "expected an optimizer of adapters, found flora, which trains all weights of a model "
    "on the GPU; poros finetune trains adapters alone: use poros.optim.Flora with a Trainer"
}
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


def _setting(default: Any, kind: Kind, flag: str, about: str, also: str = "") -> Any:
    metadata = {"kind": kind, "flag": flag, "about": about, "also": also}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The base that stays as it is."""

    source: str = _setting(
        "", text(), "MODEL", "Checkpoint folder, store of `poros load`, or name on the hub."
    )
    quantization: str = _setting(
        "nf4", choice("nf4", "fp4", "none"), "--quantization", "Of the base; none keeps it dense."
    )
    dtype: str = _setting(
        "bfloat16",
        choice("bfloat16", "float16", "float32"),
        "--dtype",
        "In which the base computes, and what of it is not quantized.",
    )
    attention: str | None = _setting(
        None,
        text(),
        "--attention",
        "Of transformers: sdpa, eager, flash_attention_2, ...; its choice if not given.",
    )
    vision: str = _setting(
        "keep",
        choice("keep", "drop"),
        "--vision",
        "Towers for images of the base: keep them on the device, or leave them away.",
    )
    store: str | None = _setting(
        None, text(), "--store", "Folder that keeps the quantized base for the next run."
    )
    host_budget: str | None = _setting(
        None,
        size(),
        "--host-budget",
        "Host memory for the base; the rest stays in the store.",
    )


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """What it is trained on."""

    source: str | tuple[str, ...] = _setting(
        "",
        text(takes_list=True),
        "DATA",
        "File or folder of rows (JSON, CSV, Parquet), or name of a data set on the hub; or a list.",
    )
    weights: float | tuple[float, ...] | None = _setting(
        None,
        real(0, is_above=True, takes_list=True),
        "--weights",
        "Of several sources: how often each is drawn from; all rows one after the other without.",
    )
    config: str | None = _setting(
        None, text(), "--config", "Configuration of a data set on the hub."
    )
    split: str | None = _setting(
        None, text(), "--split", "Of a data set on the hub; train if not given."
    )
    validation: float | str = _setting(
        0.0,
        share_or_source(),
        "--validation",
        "Share of the rows that is held out, or a file of rows.",
    )
    chat_template: str = _setting(
        "model", text(), "--chat-template", "model: its own; chatml, llama3; or a .jinja file."
    )
    loss_on: str = _setting(
        "auto",
        choice("auto", "assistant", "completion", "all"),
        "--loss-on",
        "Tokens that are learnt; auto: the assistant's, completions, all of plain text.",
    )
    max_length: int = _setting(
        2048, whole(8, 2**24), "--max-length", "Tokens of a row at most; longer rows are cut."
    )
    packing: bool | str = _setting(
        "auto", switch("auto"), "--packing", "Several documents a row, each seeing only itself."
    )
    pad_to: int = _setting(
        64, whole(1, 4096), "--pad-to", "Rows are padded to a multiple of this many tokens."
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of rows, in order."""
        return (self.source,) if isinstance(self.source, str) else self.source


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """What is trained."""

    kind: str = _setting("lora", choice(*ADAPTERS), "--adapter", "Kind of adapter.")
    rank: int = _setting(16, whole(1, 4096), "--rank", "Of the adapter's matrices.")
    alpha: float | None = _setting(
        None, real(0, is_above=True), "--alpha", "Numerator of the scaling; 2 x rank if not given."
    )
    dropout: float = _setting(0.0, real(0, 0.9), "--dropout", "Before the adapter.")
    target_modules: str | tuple[str, ...] = _setting(
        "all-linear", words("all-linear"), "--target-modules", "Modules that get an adapter."
    )
    dtype: str = _setting(
        "float32", choice("float32", "bfloat16"), "--adapter-dtype", "Of the adapter's weights."
    )


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """How it is trained."""

    method: str = _setting(
        "sft", choice("sft", "dpo"), "--method", "sft: on examples; dpo: on preferences."
    )
    epochs: float = _setting(1.0, real(0, 1e4, is_above=True), "--epochs", "Passes over all rows.")
    steps: int | None = _setting(None, whole(), "--steps", "Optimizer steps, instead of epochs.")
    batch_size: int = _setting(1, whole(1, 4096), "--batch-size", "Rows of a micro-batch.")
    accumulation: int = _setting(
        8,
        whole(1, 4096),
        "--accumulation",
        "Micro-batches of a step, for which a block is loaded once.",
    )
    learning_rate: float = _setting(
        2e-4,
        real(0, 10, is_above=True),
        "--lr",
        "Its peak; 2e-05 with dpo.",
        also="--learning-rate",
    )
    schedule: str = _setting(
        "cosine", choice(*SCHEDULES), "--schedule", "Of the learning rate after its warmup."
    )
    warmup: float = _setting(
        0.03, real(0, 0.9), "--warmup", "Share of the steps with a rising rate."
    )
    weight_decay: float = _setting(0.0, real(0, 10), "--weight-decay", "Of the adapter.")
    max_grad_norm: float = _setting(1.0, real(0), "--max-grad-norm", "Clipping; 0 does not clip.")
    optimizer: str = _setting(
        "adamw", choice(*OPTIMIZERS, refused=_REFUSED), "--optimizer", "Of the adapter."
    )
    lora_plus: float | None = _setting(
        None,
        real(0, is_above=True),
        "--lora-plus",
        "LoRA+: ratio of the rates of B and A, about 16.",
    )
    bf16: bool | str = _setting(
        "auto",
        switch("auto"),
        "--bf16",
        "Multiply in bfloat16 (autocast), adapters kept as they are; auto: on a GPU.",
    )
    beta: float = _setting(0.1, real(0, is_above=True), "--beta", "Of DPO: nearness to the base.")
    label_smoothing: float | None = _setting(
        None, real(0, 0.9), "--label-smoothing", "Share of the target that all tokens get."
    )
    z_loss: float | None = _setting(
        None, real(0), "--z-loss", "Weight of the squared log of the softmax's denominator."
    )
    seed: int = _setting(0, whole(0, 2**31 - 1), "--seed", "Of everything that is drawn.")


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Where the base lies meanwhile."""

    vram: str | None = _setting(
        None, size(), "--vram", "GPU memory for the training; what is free if not given."
    )
    slots: int | None = _setting(
        None, whole(2), "--slots", "Blocks on the GPU at a time, instead of --vram."
    )
    resident: bool = _setting(
        False, switch(), "--resident", "Keep the whole base on the device: nothing is streamed."
    )
    device: str | None = _setting(None, text(), "--device", "cpu, cuda or cuda:N.")


@dataclass(frozen=True, kw_only=True)
class OutputPart:
    """What is written."""

    folder: str | None = _setting(
        None, text(), "--out", "Folder of the run; runs/MODEL-DATA-METHOD if not given."
    )
    save_every: int = _setting(50, whole(), "--save-every", "Steps between checkpoints.")
    keep: int = _setting(2, whole(2, 1000), "--keep", "Checkpoints that are kept.")
    trace_step: int | None = _setting(
        None, whole(), "--trace-step", "Record this step for `poros report`; it takes longer."
    )
    evaluate_every: int | None = _setting(
        None, whole(), "--evaluate-every", "Steps between validations; once an epoch if not given."
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

    @property
    def is_packed(self) -> bool:
        """Whether several documents share a row."""
        if self.data.packing == "auto":
            return self.training.method == "sft"
        return bool(self.data.packing)

    @property
    def alpha(self) -> float:
        """The numerator of the adapter's scaling."""
        return 2.0 * self.adapter.rank if self.adapter.alpha is None else self.adapter.alpha

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, section by section; what is None or decides nothing is left out."""
        found: dict[str, dict[str, Any]] = {}
        idle = {
            "training.beta": self.training.method != "dpo",
            "training.epochs": self.training.steps is not None,
            "training.schedule": self.training.optimizer.startswith("schedule_free"),
        }
        for key, _ in settings():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if value is not None and not idle.get(key):
                plain = list(value) if isinstance(value, tuple) else value
                found.setdefault(section, {})[name] = plain
        return found

    def as_yaml(self) -> str:
        """The recipe as a file, every value spelled out."""
        import yaml

        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


SECTIONS = {
    "model": ModelPart,
    "data": DataPart,
    "adapter": AdapterPart,
    "training": TrainingPart,
    "memory": MemoryPart,
    "output": OutputPart,
}


@dataclass(frozen=True)
class Setting:
    """One field of a recipe, as files and flags know it."""

    kind: Kind
    flag: str
    about: str
    also: str
    """Another flag for the same; "" if there is none."""
    default: Any


def settings() -> Iterator[tuple[str, Setting]]:
    """All settings by their dotted keys, in order."""
    for section, part in SECTIONS.items():
        for each in fields(part):
            yield f"{section}.{each.name}", Setting(default=each.default, **each.metadata)
