"""Trainers of transformers and TRL, recorded: resident and prepared, on the CPU or a GPU.

A trainer is subclassed only to listen. The loss of a micro-batch is what ``training_step`` returns
(already divided by the accumulation), gradients and norm are taken where accelerate clips, weights
and moments right after the optimizer's step, evaluation losses where they are reported, logs at the
end. The files of the saved adapter are read back and compared as bytes, like any tensor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates import tiny
from poros.gates.reference import Entry, StepRecord, Trajectory, adapter_state, snapshot
from tests.comparing import compare_trajectories
from tests.loops import NUM_LAYERS, SMALL
from tests.support import make_base, make_model, prepare_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

EVALUATION_LOSS = "evaluation loss"
ADAPTER_FILES = "adapter files"
LOG = "log"
Prepare = Callable[..., Any]


def trainer_arguments(
    output_dir: str | Path, kind: "type[TrainingArguments] | None" = None, **overrides: Any
) -> "TrainingArguments":
    """Build quiet ``TrainingArguments``, or TRL's, for a short run on the GPU if there is one."""
    from transformers import TrainingArguments

    from poros.accumulation.trainer import on_one_gpu

    fields: dict[str, Any] = {
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
        **overrides,
    }
    return on_one_gpu((kind or TrainingArguments)(output_dir=str(output_dir), **fields))


def train_with_trainer(
    model: torch.nn.Module,
    arguments: "TrainingArguments",
    train_dataset: Any,
    *,
    eval_dataset: Any = None,
    resume_from: str | Path | None = None,
    trainer_class: "type[Trainer] | None" = None,
    **options: Any,
) -> Trajectory:
    """Train ``model`` in place under the HF Trainer and record every step.

    Args:
        model: A causal LM with adapters, resident or prepared.
        arguments: All settings, seeds included.
        train_dataset: Rows that the Trainer's default collator takes (mappings of 1-d tensors).
        eval_dataset: Evaluated when ``arguments`` says so; each loss is recorded.
        resume_from: A checkpoint folder of the Trainer to continue from.
        trainer_class: A subclass of the Trainer, such as TRL's, which takes the ``options``.

    Returns:
        The trajectory; its steps are numbered as the Trainer numbers them, from 0, so those of a
        resumed run continue the count. Evaluation losses, what is logged (wall times apart) and the
        bytes of the adapter that ``save_model`` writes are in ``extras``. The caller's random state
        is left as it was.
    """
    trajectory = Trajectory()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices), TemporaryDirectory() as saved:
        trainer = _recording_trainer(
            trajectory,
            trainer_class,
            model=model,
            args=arguments,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **options,
        )
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        trajectory.rng_end_state["cpu"] = torch.get_rng_state()
        for device in devices:
            trajectory.rng_end_state[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
        trainer.save_model(saved)
        for path in sorted(Path(saved).rglob("adapter_*")):
            content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            name = f"end, file {path.relative_to(saved)}"
            trajectory.extras.append(Entry(ADAPTER_FILES, name, content))
    for number, line in enumerate(trainer.state.log_history):
        if resume_from is not None and "train_loss" in line:
            continue  # of the steps since then
        for key, value in line.items():
            if isinstance(value, int | float) and not key.endswith(("runtime", "per_second")):
                logged = torch.tensor(value, dtype=torch.float64)
                trajectory.extras.append(Entry(LOG, f"line {number}, {key}", logged))
    return trajectory


def logged(run: Trajectory) -> dict[str, float]:
    """What was logged, by "line N, key"."""
    return {each.name: float(each.tensor) for each in run.extras if each.quantity == LOG}


def _recording_trainer(
    trajectory: Trajectory, trainer_class: "type[Trainer] | None", **options: Any
) -> "Trainer":
    """Make a Trainer that writes what it computes into ``trajectory``."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    losses: list[torch.Tensor] = []
    clipped: list[StepRecord] = []

    def clip_and_record(clip: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # With clipping off, the Trainer still comes here for the norm, with an infinite limit.
        record = StepRecord()
        record.gradients = {n: snapshot(p.grad) for n, p in trained.items() if p.grad is not None}
        norm = clip(*args, **kwargs)
        record.grad_norm = snapshot(norm)
        clipped.append(record)
        return norm

    class RecordingTrainer(trainer_class or Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(snapshot(loss))
            return loss

    class Recorder(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record = clipped.pop()
            record.index, record.losses = state.global_step, list(losses)
            record.weights, record.exp_avg, record.exp_avg_sq = adapter_state(
                trained, kwargs["optimizer"].state
            )
            trajectory.steps.append(record)
            losses.clear()

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any
        ) -> None:
            loss = torch.tensor(metrics["eval_loss"], dtype=torch.float64)
            name = f"after {state.global_step} steps, evaluation loss"
            trajectory.extras.append(Entry(EVALUATION_LOSS, name, loss))

    callbacks = [Recorder(), *options.pop("callbacks", ())]
    trainer = RecordingTrainer(callbacks=callbacks, **options)
    trainer.remove_callback(PrinterCallback)
    # Of its own model: some trainers attach the adapters themselves.
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    accelerator = trainer.accelerator
    accelerator.clip_grad_norm_ = partial(clip_and_record, accelerator.clip_grad_norm_)
    return trainer


# The HF Trainer.

NUM_STEPS = 6
RESUME_AT = 2
EVAL_EVERY = 2
NUM_EVAL_BATCHES = 2
ACCUMULATION = 2

# The whole of a user's run: bf16 autocast over an fp32 base, accumulation, evaluation, checkpoints,
# and the best of them loaded at the end. The loss falls, so that the one of the greatest is not the
# last, whose weights are there anyway.
FULL = {
    "bf16": True,
    "save_strategy": "steps",
    "save_steps": EVAL_EVERY,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "learning_rate": 5e-3,
}


def rows(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 20 tokens, as a Trainer's default collator takes them."""
    batches = tiny.make_batches(num_rows, batch_size=1, num_tokens=20, seed=seed)
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


small_model = partial(make_model, **SMALL)


@dataclass
class Arms:
    """Builds and runs both arms.

    The resident arm trains without activation checkpointing; the streamed arm is asked for it, as
    trainers ask by default, and has to ignore it.
    """

    folder: Path
    dtype: torch.dtype
    device: str = "cpu"
    model: Any = None
    """The model of the latest run."""
    make: Callable[..., Any] = small_model
    """Makes the model, of a dtype and on a device."""

    def run(
        self,
        name: str,
        prepare: Prepare | None = None,
        resume_from: Path | None = None,
        trainer_class: "type[Trainer] | None" = None,
        **changes: Any,
    ) -> Trajectory:
        """Train resident, or as ``prepare`` makes it; checkpoints go to a folder of this name."""
        model = self.make(dtype=self.dtype, device=self.device)
        self.model = model if prepare is None else prepare(model, device=self.device)
        options = {
            "use_cpu": self.device == "cpu",
            "dataloader_pin_memory": self.device != "cpu",
            "max_steps": NUM_STEPS,
            "gradient_accumulation_steps": ACCUMULATION,
            "eval_strategy": "steps",
            "eval_steps": EVAL_EVERY,
            "gradient_checkpointing": prepare is not None,
            **changes,
        }
        return train_with_trainer(
            self.model,
            trainer_arguments(self.folder / name, **options),
            rows(16, seed=0),  # an epoch ends between resuming and the end
            eval_dataset=rows(2 * NUM_EVAL_BATCHES, seed=1),
            resume_from=resume_from,
            trainer_class=trainer_class,
        )

    def checkpoint(self, name: str, step: int) -> Path:
        """Where the run of this name left its state after ``step`` steps."""
        return self.folder / name / f"checkpoint-{step}"


def check_not_vacuous(run: Trajectory) -> None:
    """Equal runs show something only if there is something in them."""
    num_adapters = 2 * 7 * NUM_LAYERS
    assert [step.index for step in run.steps] == list(range(NUM_STEPS))
    for step in run.steps:
        assert len(step.losses) == ACCUMULATION
        assert step.grad_norm is not None and float(step.grad_norm) > 0
        for kept in (step.gradients, step.weights, step.exp_avg, step.exp_avg_sq):
            assert len(kept) == num_adapters
            assert all(bool(tensor.any()) for tensor in kept.values())
    losses = [float(each.tensor) for each in run.extras if "evaluation loss" in each.name]
    assert len(losses) == NUM_STEPS // EVAL_EVERY
    assert len(set(losses)) == len(losses), "an evaluation that sees no training shows nothing"
    assert sum("file adapter_" in each.name for each in run.extras) == 2


# Trainers of TRL.

ADAPTED = ["q_proj", "down_proj"]

WORDS = "the slot holds a block that moves while layers compute and host memory waits its turn"


def sentence(number: int, length: int) -> str:
    words = WORDS.split()
    return " ".join(words[(number * 7 + 3 * each) % len(words)] for each in range(length))


TEXTS = [{"text": sentence(number, 6 + number % 9)} for number in range(24)]
COMPLETIONS = [
    {"prompt": sentence(number, 5), "completion": sentence(number + 1, 4 + number % 5)}
    for number in range(24)
]
PREFERENCES = [
    {
        "prompt": sentence(number, 5 + number % 3),
        "chosen": sentence(number + 1, 4 + number % 4),
        "rejected": sentence(number + 2, 3 + number % 6),
    }
    for number in range(24)
]


def tokenizer(more: Mapping[str, int] | None = None) -> "PreTrainedTokenizerFast":
    """A word-level tokenizer, made on the spot; ``more`` are special tokens and their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<bos>", "<eos>", "<unk>", *dict.fromkeys(WORDS.split())]
    numbers = {word: number for number, word in enumerate(known)} | dict(more or {})
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.add_special_tokens(list(more or ()))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


@dataclass
class TrlArms:
    """Runs a trainer on a resident and on a prepared model, made from equal bytes.

    Attributes:
        auto_class: As in ``poros.load``; with a head for one class.
        trainer: That of the latest run.
    """

    folder: Path
    trainer_class: type
    arguments_class: type
    rows: list[dict[str, Any]]
    _: KW_ONLY
    quantize: bool = True
    device: str = "cpu"
    num_steps: int = 2
    auto_class: str | None = None
    eval_rows: list[dict[str, str]] | None = None
    trainer: Any = None

    def base(self) -> Any:
        options = {"quantize": self.quantize, "device": self.device, "auto_class": self.auto_class}
        return make_base(**SMALL, **options)

    def adapter(self, **options: Any) -> LoraConfig:
        """As users attach it to a base; the head of a reward model is trained as a whole."""
        task = "CAUSAL_LM" if self.auto_class is None else "SEQ_CLS"
        given = {"r": 4, "lora_dropout": 0.05, "target_modules": ADAPTED, **options}
        return LoraConfig(task_type=task, **given)

    def run(
        self, prepare: Prepare | None = None, *, attach_in_trainer: bool = False, **options: Any
    ) -> Trajectory:
        """One training run; the adapter is made by the caller, or by the trainer."""
        import datasets

        extra: dict[str, Any] = {}
        if attach_in_trainer:
            model = self.base()
            extra["peft_config"] = self.adapter()
        else:
            torch.manual_seed(1)
            is_zero = self.auto_class is not None
            model = get_peft_model(self.base(), self.adapter(init_lora_weights=is_zero))
            model = model if prepare is None else prepare(model)
        arguments = trainer_arguments(
            self.folder / "run",
            self.arguments_class,
            max_steps=self.num_steps,
            learning_rate=1e-2,
            use_cpu=self.device == "cpu",
            dataloader_pin_memory=self.device != "cpu",
            **options,
        )
        owner = self

        class Prepared(self.trainer_class):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                owner.trainer = self
                if attach_in_trainer and prepare is not None:
                    prepare(self.model)

        torch.manual_seed(3)
        return train_with_trainer(
            model,
            arguments,
            datasets.Dataset.from_list(self.rows),
            eval_dataset=self.eval_rows and datasets.Dataset.from_list(self.eval_rows),
            trainer_class=Prepared,
            processing_class=tokenizer(),
            **extra,
        )

    @property
    def model(self) -> Any:
        """The model of the latest run."""
        return self.trainer.model


def check(
    arms: TrlArms, policy: dict[str, Any] | None = None, grouped: type | None = None, **options: Any
) -> Trajectory:
    """Both arms, compared in every bit; the streamed run, by the class ``grouped`` if given."""
    expected = arms.run(**options)
    arms.trainer_class = grouped or arms.trainer_class
    found = arms.run(partial(prepare_plain, **(policy or {})), **options)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert poros.runtime(arms.model).self_check["status"] == "passed"
    assert poros.runtime(arms.model).stats()["num_loads"] > 0
    assert len(found.steps) == arms.num_steps
    assert all(bool(each.any()) for each in found.steps[-1].gradients.values())
    num_trained = 2 * len(ADAPTED) * NUM_LAYERS + (arms.auto_class is not None)
    for step in found.steps:
        assert len(step.gradients) == len(step.exp_avg) == num_trained
    losses = [float(each) for step in found.steps for each in step.losses]
    assert len(set(losses)) == len(losses) > 0 and all(map(math.isfinite, losses))
    assert sum(entry.quantity == ADAPTER_FILES for entry in found.extras) >= 2
    return found
