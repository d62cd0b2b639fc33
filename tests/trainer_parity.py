"""The HF Trainer, recorded: its own loop, schedule, evaluation, saving and resuming.

The Trainer is subclassed only to listen. The loss of a micro-batch is what ``training_step``
returns (already divided by the accumulation), gradients and norm are taken where accelerate clips,
weights and moments right after the optimizer's step, evaluation losses where they are reported. The
files of the saved adapter are read back and compared as bytes, like any tensor.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from poros.gates.reference import Entry, StepRecord, Trajectory, adapter_state, snapshot

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

EVALUATION_LOSS = "evaluation loss"
ADAPTER_FILES = "adapter files"


def trainer_arguments(output_dir: str | Path, **overrides: Any) -> "TrainingArguments":
    """Build quiet ``TrainingArguments`` for a short run on the GPU if there is one.

    Args:
        output_dir: Where checkpoints go.
        **overrides: Fields of ``TrainingArguments``, such as ``bf16``, ``max_steps`` or
            ``gradient_accumulation_steps``.
    """
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
    return on_one_gpu(TrainingArguments(output_dir=str(output_dir), **fields))


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
        trainer_class: A subclass of the Trainer, such as TRL's.
        **options: Its other arguments.

    Returns:
        The trajectory; its steps are numbered as the Trainer numbers them, from 0, so those of a
        resumed run continue the count. Evaluation losses and the bytes of the adapter that
        ``save_model`` writes are in ``extras``. The caller's random state is left as it was.
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
    return trajectory


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
