"""A recipe: all choices of a fine-tuning run, with their defaults.

The order of the fields is that of a printed recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AdapterRecipe:
    """What is trained.

    Args:
        kind: ``lora``, ``rslora`` (scaled by the root of the rank) or ``dora``.
        rank: Of the two matrices.
        alpha: The scaling is alpha / rank; None is twice the rank.
        dropout: Of the input of an adapter.
        target_modules: Names of linear modules, or ``all-linear``.
        dtype: ``float32`` or ``bfloat16``.
    """

    kind: str = "lora"
    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How it is trained.

    Args:
        epochs: How often all rows are seen.
        steps: Optimizer steps, instead of epochs.
        batch_size: Rows (packed: bins of ``max_length`` tokens) of a micro-batch.
        accumulation: Micro-batches of an optimizer step; they go through the blocks together.
        learning_rate: None is 2e-4, for preferences 5e-6.
        schedule: ``cosine``, ``linear`` or ``constant``.
        warmup: A share of the steps, or a number of them.
        optimizer: ``adamw``, ``adamw_8bit``, ``paged_adamw_8bit``, ``lora_plus`` (AdamW, with a
            larger rate for B) or ``schedule_free``.
        loraplus_ratio: With ``lora_plus``: the rate of B over that of A.
        weight_decay: Of AdamW.
        max_grad_norm: Gradients are clipped to this norm; 0 does not clip.
        save_every: Optimizer steps between checkpoints; None is a tenth of the run.
        log_every: Optimizer steps between lines of log.
        seed: Of everything that is drawn.
    """

    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 1
    accumulation: int = 8
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.03
    optimizer: str = "adamw"
    loraplus_ratio: float = 16.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    save_every: int | None = None
    log_every: int = 1
    seed: int = 42


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One fine-tuning run.

    Args:
        model: A checkpoint's folder, a store's, or a name on the hub.
        data: A JSONL file, a folder of them, or a name on the hub of data sets.
        task: ``sft`` (supervised fine-tuning) or ``dpo`` (preferences: Rafailov et al. 2023).
        out: The folder of the run.
        validation: A share of the rows that is held out, or a file or folder of other rows.
        max_length: Tokens of a row; longer ones are cut.
        packing: Whether several rows share a bin of ``max_length`` tokens, each seeing itself
            alone. None packs for ``sft``.
        loss_on: ``answers``: what the assistant says, or completions; ``everything``.
        chat_template: A name (``chatml``, ``plain``) or a file, in place of the model's own.
        vram: What the run may take on the GPU, such as ``22GiB``; None is what is free.
        host_memory: What the base may take in host memory, if ``model`` is a store.
        quantization: ``nf4``, or ``none`` for a base in 16 bit.
        placement: ``streamed``, or ``resident`` for a base that is on the GPU as a whole.
        beta: Of ``dpo``: how far preferences may move the model.
        allow_untested: Train an architecture that no check has found exact yet.
        adapter: What is trained.
        training: How.
    """

    model: str
    data: str
    task: str = "sft"
    out: str | None = None
    validation: float | str | None = None
    max_length: int = 2048
    packing: bool | None = None
    loss_on: str = "answers"
    chat_template: str | None = None
    vram: str | None = None
    host_memory: str | None = None
    quantization: str = "nf4"
    placement: str = "streamed"
    beta: float = 0.1
    allow_untested: bool = False
    adapter: AdapterRecipe = field(default_factory=AdapterRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)

    @property
    def packs(self) -> bool:
        """Whether rows share bins."""
        return self.task == "sft" if self.packing is None else self.packing

    @property
    def learning_rate(self) -> float:
        """As it is, or as it is for the task."""
        given = self.training.learning_rate
        return given if given is not None else 2e-4 if self.task == "sft" else 5e-6

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are None."""
        return _plain(self)


def _plain(recipe: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(recipe):
        value = getattr(recipe, each.name)
        if is_dataclass(value):
            found[each.name] = _plain(value)
        elif value is not None:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found


def made(values: Mapping[str, Any]) -> Recipe:
    """A recipe of values by dotted name, such as ``training.steps``; all of them are right."""
    groups: dict[str, dict[str, Any]] = {"adapter": {}, "training": {}, "": {}}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        groups[group][name] = value
    adapter, training = AdapterRecipe(**groups["adapter"]), TrainingRecipe(**groups["training"])
    return Recipe(**groups[""], adapter=adapter, training=training)
