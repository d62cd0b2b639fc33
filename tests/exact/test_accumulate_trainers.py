"""Trainers whose micro-batches go through the blocks together: the logs and bits of the plain."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import poros
import poros.accumulation.trainer as block_major
from poros.gates.reference import Trajectory, compare_trajectories
from poros.head.logits import LazyLogits
from tests.exact.trainer_arms import FULL, NUM_STEPS, RESUME_AT, Arms
from tests.exact.trl_arms import PREFERENCES, TEXTS, trl
from tests.exact.trl_arms import Arms as TrlArms
from tests.support import prepare_plain, same_bits

TWO_SLOTS = partial(prepare_plain, slots=2)


def num_groups(model: Any) -> int:
    found: int = poros.runtime(model).stats()["num_groups"]
    return found


def alone(model: Any) -> list[str]:
    lines = poros.runtime(model).stats()["fallbacks"]
    return [line for line in lines if line.startswith("micro-batches")]


def pair(arms: Arms, **options: Any) -> tuple[Trajectory, Trajectory]:
    expected = arms.run("resident", **options)
    found = arms.run("together", TWO_SLOTS, trainer_class=poros.PorosTrainer, **options)
    return expected, found


OPTIONS: dict[str, dict[str, Any]] = {
    "two": {},
    # The epoch of 12 batches of 2 rows ends with a group of two.
    "five, the last incomplete": {"gradient_accumulation_steps": 5},
    "one": {"gradient_accumulation_steps": 1},
    "clipped": {"gradient_accumulation_steps": 4, "max_grad_norm": 0.1},
    "labels smoothed": {"gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1},
    "logged each step": {"gradient_accumulation_steps": 4, "logging_steps": 1},
    # Its weights are others in an evaluation, and edited as the next step begins.
    "schedule-free": {"gradient_accumulation_steps": 4, "optim": "schedule_free_adamw"},
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_trainer(options: str, bf16: bool, tmp_path: Path) -> None:
    arms = Arms.make(tmp_path, torch.float32)
    expected, found = pair(arms, **{**FULL, "bf16": bf16, **OPTIONS[options]})
    assert compare_trajectories(expected, found) == []
    assert arms.log_history("together") == arms.log_history("resident")
    assert alone(arms.model) == []
    size = OPTIONS[options].get("gradient_accumulation_steps", 2)
    assert (num_groups(arms.model) >= NUM_STEPS - 1) == (size > 1)


REGULARIZED: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing_factor": 0.1},
    "z-loss": {},
    "both": {"label_smoothing_factor": 0.1},
}


def with_z_loss(base: type[Trainer]) -> type[Trainer]:
    class WithZLoss(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, z_loss=0.01, **kwargs)

    return WithZLoss


@pytest.mark.parametrize("kind", REGULARIZED)
def test_smoothing_and_z_loss_in_slices(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, one after the other and from the host: one result; and nobody reads logits."""
    trainer = poros.PorosTrainer if kind == "smoothed" else with_z_loss(poros.PorosTrainer)
    options: Any = {**FULL, "gradient_accumulation_steps": 4, **REGULARIZED[kind]}
    arms = Arms.make(tmp_path, torch.float32)
    whole = arms.run("whole", TWO_SLOTS, trainer_class=trainer, **options)

    def refuse(self: LazyLogits) -> torch.Tensor:
        raise RuntimeError("expected nobody to read logits")

    sliced: Any = {"loss": "chunked", "adapter_kernels": "exact"}
    monkeypatch.setattr(LazyLogits, "computed", refuse)
    found = arms.run(
        "together", partial(poros.prepare, slots=2, **sliced), trainer_class=trainer, **options
    )
    assert num_groups(arms.model) >= NUM_STEPS - 1 and alone(arms.model) == []
    host = partial(poros.prepare, slots=2, stream_head=True, **sliced)
    for name, prepare, group in (("host", host, True), ("alone", host, False)):
        with monkeypatch.context() as patch:
            if not group:
                patch.setattr(block_major, "begin_group", lambda *given: None)
            other = arms.run(name, prepare, trainer_class=trainer, **options)
        assert (num_groups(arms.model) > 0) == group
        assert compare_trajectories(found, other) == []
        assert arms.log_history(name) == arms.log_history("together")
    # Before the first step the weights are the same: whole logits are rounded to bfloat16.
    first, near = (arms.log_history(name)[0]["loss"] for name in ("together", "whole"))
    assert first == pytest.approx(near, rel=2**-8)
    assert compare_trajectories(whole, found) != []


def test_z_loss_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(poros.PolicyError, match="z_loss"):
        poros.PorosTrainer(z_loss=-1.0)


def test_resuming(tmp_path: Path) -> None:
    arms = Arms.make(tmp_path, torch.float32)
    options: Any = {**FULL, "gradient_accumulation_steps": 4}
    expected, found = pair(arms, **options)
    assert compare_trajectories(expected, found) == []
    resumed = arms.run(
        "resumed",
        TWO_SLOTS,
        arms.checkpoint("together", RESUME_AT),
        trainer_class=poros.PorosTrainer,
        **options,
    )
    assert num_groups(arms.model) == NUM_STEPS - RESUME_AT
    assert arms.log_history("resumed") == arms.log_history("resident")
    for name, weight in expected.steps[-1].weights.items():
        assert same_bits(weight, resumed.steps[-1].weights[name]), name


def test_a_model_that_is_not_prepared(tmp_path: Path) -> None:
    arms = Arms.make(tmp_path, torch.float32)
    expected = arms.run("resident")
    found = arms.run("plain", trainer_class=poros.PorosTrainer)
    assert compare_trajectories(expected, found) == []


class Leaves(TrainerCallback):  # type: ignore[misc]
    """Ends the first epoch within a step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 1:
            control.should_epoch_stop = True
        return control


def test_an_epoch_that_ends_within_a_step(tmp_path: Path) -> None:
    def leaving(base: type[Trainer]) -> type[Trainer]:
        class Leaving(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.add_callback(Leaves())

        return Leaving

    arms = Arms.make(tmp_path, torch.float32)
    options: Any = {"gradient_accumulation_steps": 4, "max_steps": 4}
    expected = arms.run("resident", trainer_class=leaving(Trainer), **options)
    found = arms.run("left", TWO_SLOTS, trainer_class=leaving(poros.PorosTrainer), **options)
    assert compare_trajectories(expected, found) == []
    assert num_groups(arms.model) > 0 and alone(arms.model) == []


class Sft(poros.BlockMajorMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


class Dpo(poros.BlockMajorMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    pass


TRL: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, Sft, trl.SFTConfig, TEXTS, {}),
    "sft, packed": (
        trl.SFTTrainer,
        Sft,
        trl.SFTConfig,
        TEXTS,
        {"packing": True, "max_length": 24, "gradient_accumulation_steps": 2},
    ),
    "sft, dft": (trl.SFTTrainer, Sft, trl.SFTConfig, TEXTS, {"loss_type": "dft"}),
    "dpo": (trl.DPOTrainer, Dpo, trl.DPOConfig, PREFERENCES, {}),
}


@pytest.mark.parametrize("policy", [{}, {"loss": "chunked", "stream_head": True}], ids=str)
@pytest.mark.parametrize("kind", TRL)
def test_trainers_of_trl(kind: str, policy: dict[str, Any], tmp_path: Path) -> None:
    """What they log is compared as well."""
    plain, together, arguments, rows, options = TRL[kind]
    options = {"gradient_accumulation_steps": 3, **options}
    expected = TrlArms(tmp_path, plain, arguments, rows).run(**options)
    arms = TrlArms(tmp_path, together, arguments, rows)
    found = arms.run(partial(prepare_plain, slots=2, **policy), **options)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    # What DPO's reference pass draws is known behind the first micro-batch.
    assert num_groups(arms.model) == (3 if kind == "dpo" else 2) and alone(arms.model) == []
    assert any("line 0" in each.name for each in found.extras)


def test_the_reference_pass_of_dpo_loads_blocks_for_itself(tmp_path: Path) -> None:
    """The policy's passes load 2 (K - S) for a group of three; each reference pass its K - S."""
    arms = TrlArms(tmp_path, Dpo, trl.DPOConfig, PREFERENCES)
    arms.run(TWO_SLOTS, gradient_accumulation_steps=3)
    together = poros.runtime(arms.model).stats()["num_loads"]
    arms = TrlArms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
    arms.run(TWO_SLOTS, gradient_accumulation_steps=3)
    assert together < poros.runtime(arms.model).stats()["num_loads"]
