"""Trainers whose micro-batches are grouped: the logs and bits of plain ones, interrupted too."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, default_data_collator

import poros
from poros.errors import UnsupportedModelError
from tests.comparing import compare_trajectories
from tests.loops import (
    Batch,
    adapted,
    add_noise,
    build,
    clamp,
    ends_so,
    num_groups,
    reasons,
    same,
    trained,
)
from tests.support import prepare_plain, same_bits
from tests.trainers import FULL, Arms, logged, rows, trainer_arguments

Model = Any
Kind = Callable[[tuple[type, ...]], type[Trainer]]
few = partial(adapted, num_layers=3, lora_dropout=0.05, target_modules=["q_proj", "down_proj"])
"""Two adapters a layer: what a Trainer does with a group is shown."""
TWO_SLOTS = partial(prepare_plain, slots=2)
NUM_STEPS = 4
"""With four micro-batches each an epoch is two steps of them."""
SHORT: dict[str, Any] = {**FULL, "max_steps": NUM_STEPS, "gradient_accumulation_steps": 4}


# Trainers that act between or within their micro-batches, as classes behind some mixins.


def stepping(act: Callable[[Model], object], is_behind: bool = False) -> Kind:
    """With a ``training_step`` of its own, before or behind the mixin."""

    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*(() if is_behind else mixins), Trainer):  # type: ignore[misc]
            def training_step(self, model: Model, *args: Any, **options: Any) -> Any:
                found = super().training_step(model, *args, **options)
                act(model)
                return found

        return type("Behind", (*mixins, Own), {}) if is_behind else Own

    return make


def called_back(act: Callable[..., object]) -> Kind:
    class Acts(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.calls = itertools.count(1)

        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
            act(given["model"])
            control.should_epoch_stop = act is leave and next(self.calls) % 6 == 3
            return control

    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*mixins, Trainer):  # type: ignore[misc]
            def __init__(self, **options: Any) -> None:
                super().__init__(**options, callbacks=[Acts()])

        return Own

    return make


def with_loss(change: Callable[[Any, Batch], object], loss: Any = lambda *_: 0.0) -> Kind:
    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*mixins, Trainer):  # type: ignore[misc]
            calls, text = 0, ""

            def compute_loss(self, model: Model, inputs: Batch, *args: Any, **options: Any) -> Any:
                change(self, inputs)
                found = super().compute_loss(model, inputs, *args, **options)
                return found + loss(self, model)

        return Own

    return make


def counting(mixins: tuple[type, ...]) -> type[Trainer]:
    """Counts micro-batches as each begins, in a class before the mixin, and masks by the number."""

    class Masking(Trainer):
        number = 0

        def compute_loss(self, model: Model, inputs: Batch, *args: Any, **options: Any) -> Any:
            inputs["labels"][:, : self.number % 5] = -100
            return super().compute_loss(model, inputs, *args, **options)

    class Own(*mixins, Masking):  # type: ignore[misc]
        def training_step(self, *args: Any, **options: Any) -> Any:
            self.number += 1
            return super().training_step(*args, **options)

    return Own


def replacing(mixins: tuple[type, ...]) -> type[Trainer]:
    """Hands on other inputs than the last ones of a step, in a class before the mixin."""

    class Own(*mixins, Trainer):  # type: ignore[misc]
        def training_step(self, model: Model, inputs: Batch, *args: Any) -> Any:
            if self.accelerator.sync_gradients:
                inputs = {name: value.flip(-1) for name, value in inputs.items()}
            return super().training_step(model, inputs, *args)

    return Own


def edited(mixins: tuple[type, ...], in_place: bool) -> type[Trainer]:
    """Masks labels in a class before the mixin, in place or by other ones."""

    class Own(*mixins, Trainer):  # type: ignore[misc]
        def training_step(self, model: Model, inputs: Batch, *args: Any) -> Any:
            labels = inputs["labels"] if in_place else inputs["labels"].clone()
            labels[:, :3] = -100
            inputs["labels"] = labels
            return super().training_step(model, inputs, *args)

    return Own


def dividing(mixins: tuple[type, ...]) -> type[Trainer]:
    """By a number of its own for each micro-batch."""

    class Own(*mixins, Trainer):  # type: ignore[misc]
        def training_step(self, model: Model, inputs: Batch, *args: Any) -> Any:
            number = (inputs["labels"] > 20).sum()
            return super().training_step(model, inputs, number)

    return Own


def of_lists(mixins: tuple[type, ...]) -> type[Trainer]:
    """Micro-batches are lists of rows, which the loss puts together."""

    class Own(*mixins, Trainer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, data_collator=list)

        def compute_loss(self, model: Model, inputs: Any, *args: Any, **options: Any) -> Any:
            return super().compute_loss(model, default_data_collator(inputs), *args, **options)

    return Own


def step(model: Model) -> None:
    torch.optim.SGD(trained(model), lr=1e-3).step()


def scale_weights(model: Model) -> None:
    with torch.no_grad():
        for each in trained(model):
            each.mul_(0.99)


def settings(model: Model) -> None:
    torch.use_deterministic_algorithms(True)


def leave(model: Model) -> None:
    """Ends the first epoch within a step."""


def mask_more(trainer: Any, inputs: Batch) -> None:
    trainer.text += "x"
    inputs["labels"][:, : len(trainer.text) % 5] = -100


def late_penalty(trainer: Any, model: Model) -> Any:
    return sum(each.square().sum() for each in trained(model)) if trainer.state.global_step else 0.0


TRAINERS: dict[str, tuple[Kind, Any]] = {
    "clamps, behind": (stepping(clamp, is_behind=True), None),
    "noise, before": (stepping(add_noise), "drawn between"),
    "drops, called back": (called_back(torch.nn.Module.zero_grad), None),
    "steps, behind": (stepping(step, is_behind=True), "edits parameters"),
    "weights, called back": (called_back(scale_weights), "edited, frozen"),
    "evaluation mode, called back": (called_back(torch.nn.Module.eval), None),
    "settings, called back": (called_back(settings), None),
    "leaves within a step": (called_back(leave), None),
    "writes": (with_loss(mask_more), None),
    "counts before the mixin": (counting, "number changes between micro-batches"),
    "other inputs": (replacing, None),
    "lists": (of_lists, None),
    "edits in place before the mixin": (partial(edited, in_place=True), "before its turn"),
    "other labels before the mixin": (partial(edited, in_place=False), "before its turn"),
    "other arguments": (dividing, "other arguments than"),
    "edits, and a penalty later": (
        *(
            with_loss(lambda _, inputs: inputs["input_ids"].add_(1), late_penalty),
            (UnsupportedModelError, "uses parameters of"),
        ),
    ),
}


@pytest.mark.parametrize("which", TRAINERS)
def test_trainers_that_act(which: str, tmp_path: Path) -> None:
    make, end = TRAINERS[which]
    model = TWO_SLOTS(few(quantize=False))

    def run(model: Model, is_grouped: bool) -> list[torch.Tensor]:
        adapters = trained(model)
        args = trainer_arguments(
            *(tmp_path,),
            **{"max_steps": 2, "gradient_accumulation_steps": 3, "learning_rate": 1e-2},
        )
        kind = make((poros.BlockMajorMixin,) if is_grouped else ())
        try:
            kind(model=model, args=args, train_dataset=rows(12, seed=0)).train()
        finally:
            torch.use_deterministic_algorithms(False)
        return [each.detach().clone() for each in adapters]

    assert ends_so(model, partial(run, model, True), end, lambda: run(few(quantize=False), False))


# The trainer as it is, with its logs and checkpoints.

OPTIONS: dict[str, dict[str, Any]] = {
    "float32, clipped, logged each step": {
        **{"bf16": False, "gradient_accumulation_steps": 2},
        **{"max_grad_norm": 0.1, "logging_steps": 1},
    },
    "labels smoothed": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    # The epoch of 8 batches of 2 rows ends with a group of three. Weights of this optimizer are
    # others in an evaluation, and edited as the next step begins.
    "five, the last incomplete, schedule-free": {
        **{"gradient_accumulation_steps": 5, "optim": "schedule_free_adamw"}
    },
}


@pytest.mark.parametrize("which", OPTIONS)
def test_the_trainer(which: str, tmp_path: Path) -> None:
    arms = Arms(tmp_path, torch.float32, make=lambda device, **dtype: few(**dtype))
    options = {**SHORT, **OPTIONS[which]}
    expected = arms.run("resident", **options)
    found = arms.run("grouped", TWO_SLOTS, trainer_class=poros.PorosTrainer, **options)
    assert compare_trajectories(expected, found) == []
    # The first micro-batch goes alone.
    num_missing = options["gradient_accumulation_steps"] == 2
    assert num_groups(arms.model) == NUM_STEPS - num_missing and reasons(arms.model) == []
    if which != "labels smoothed":
        return
    checkpoint = arms.checkpoint("grouped", 2)
    resumed = arms.run(
        "resumed", TWO_SLOTS, checkpoint, trainer_class=poros.PorosTrainer, **options
    )
    assert num_groups(arms.model) == NUM_STEPS - 3  # the last of the epoch has two, first of all
    assert logged(resumed).items() < logged(expected).items()
    for name, weight in expected.steps[-1].weights.items():
        assert same_bits(weight, resumed.steps[-1].weights[name]), name


def test_a_model_that_is_not_prepared(tmp_path: Path) -> None:
    arms = Arms(tmp_path, torch.float32)
    expected = arms.run("resident", max_steps=2)
    found = arms.run("plain", trainer_class=poros.PorosTrainer, max_steps=2)
    assert compare_trajectories(expected, found) == []


class Interrupted(Trainer):  # type: ignore[misc]
    """In the loss of the third micro-batch, or between that and the second."""

    at = "loss"
    losses = SimpleNamespace(number=0)  # not in the class itself: then none would go together

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.losses.number += 1
        if self.at == "loss" and self.losses.number == 3:
            raise KeyboardInterrupt
        return found

    def floating_point_ops(self, inputs: Any) -> int:
        if self.at == "between" and self.losses.number == 2:
            raise KeyboardInterrupt
        return 0


@pytest.mark.parametrize("at", ["loss", "between"])
def test_one_that_ends_a_trainer(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupted, "at", at)
    arms = Arms(tmp_path, torch.float32)
    found = []
    together = type("Together", (poros.BlockMajorMixin, Interrupted), {})
    for kind, way in ((Interrupted, None), (together, TWO_SLOTS)):
        Interrupted.losses.number = 0
        with pytest.raises(KeyboardInterrupt):
            arms.run("interrupted", way, trainer_class=kind, gradient_accumulation_steps=4)
        found.append([each.grad for each in trained(arms.model) if each.grad is not None])
    assert num_groups(arms.model) == 1
    assert same(*found) and len(found[0]) == len(trained(arms.model))


def test_other_gpus_of_the_machine_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a launcher, a Trainer that sees several would wrap the model in DataParallel."""
    found = {}
    for trainer_class in (Trainer, poros.PorosTrainer):
        arguments = trainer_arguments(tmp_path)
        arguments._n_gpu = 2  # as if it saw two
        trainer = trainer_class(build(num_layers=2), arguments)
        found[trainer_class] = trainer.args.n_gpu, trainer._train_batch_size
    assert found == {Trainer: (2, 4), poros.PorosTrainer: (1, 2)}
    assert caplog.text.count("torchrun --nproc-per-node 2") == 1
