"""Two arms under the HF Trainer, with their files to compare."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from poros.gates import tiny
from poros.gates.reference import Trajectory
from tests.support import make_model
from tests.trainer_parity import train_with_trainer, trainer_arguments

NUM_LAYERS = 3
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

Prepare = Callable[..., Any]


def rows(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 20 tokens, as a Trainer's default collator takes them."""
    batches = tiny.make_batches(num_rows, batch_size=1, num_tokens=20, seed=seed)
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


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

    def run(
        self,
        name: str,
        prepare: Prepare | None = None,
        resume_from: Path | None = None,
        trainer_class: type[Trainer] | None = None,
        **changes: Any,
    ) -> Trajectory:
        """Train resident, or as ``prepare`` makes it; checkpoints go to a folder of this name."""
        sizes = {"num_layers": NUM_LAYERS, "hidden_size": 64}
        model = make_model(**sizes, dropout=0.05, dtype=self.dtype, device=self.device)
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

    def log_history(self, name: str, step: int = NUM_STEPS) -> list[dict[str, float]]:
        """What the Trainer logged up to ``step``, wall times apart."""
        state = json.loads((self.checkpoint(name, step) / "trainer_state.json").read_text())
        times = ("_runtime", "_per_second")
        return [
            {key: value for key, value in line.items() if not key.endswith(times)}
            for line in state["log_history"]
        ]


def check_not_vacuous(run: Trajectory, num_steps: int = NUM_STEPS) -> None:
    """Equal runs show something only if there is something in them."""
    num_adapters = 2 * 7 * NUM_LAYERS
    assert [step.index for step in run.steps] == list(range(num_steps))
    for step in run.steps:
        assert len(step.losses) == ACCUMULATION
        assert step.grad_norm is not None and float(step.grad_norm) > 0
        for kept in (step.gradients, step.weights, step.exp_avg, step.exp_avg_sq):
            assert len(kept) == num_adapters
            assert all(bool(tensor.any()) for tensor in kept.values())
    losses = [float(each.tensor) for each in run.extras if "evaluation loss" in each.name]
    assert len(losses) == num_steps // EVAL_EVERY
    assert len(set(losses)) == len(losses), "an evaluation that sees no training shows nothing"
    assert sum("file adapter_" in each.name for each in run.extras) == 2
