"""A run of the Trainer, its losses and the time of its steps noted."""

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Trainer

_NUM_WARM = 3
"""Steps that are left out of times: the self-check, memory that is taken for the first time."""


@dataclass
class Run:
    """What was noted of one.

    Attributes:
        losses: Of each step, before it.
        step_ms: Of forward and backward of each step.
    """

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Of a step, once warm; of all if there are no more."""
        return statistics.median(self.step_ms[_NUM_WARM:] or self.step_ms or [0.0])


def train(trainer: "Trainer", seed: int, num_steps: int | None = None) -> Run:
    """Train, from equal random states in each run, and note what happens.

    Args:
        trainer: Ready to train; changed in place, to be used once.
        seed: Of the order of the data and of dropout.
        num_steps: After so many the run ends, with the learning rates of a whole one; None is all.
    """
    from transformers import TrainerCallback, set_seed

    run = Run()
    training_step: Any = trainer.training_step

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        began = time.perf_counter()
        loss: torch.Tensor = training_step(*args, **kwargs)
        run.losses.append(float(loss))  # waits for the device
        run.step_ms.append(1e3 * (time.perf_counter() - began))
        return loss

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if num_steps is not None and state.global_step >= num_steps:
                control.should_training_stop = True

    trainer.training_step = noted
    trainer.add_callback(Stop())
    set_seed(seed)
    trainer.train()
    return run
