"""The HF Trainer on a prepared model: bit for bit the run of the resident one, files included."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import poros
from poros.errors import PreparedModelError
from poros.gates.reference import Trajectory
from poros.slots.schedule import Phase
from tests.comparing import bits_of, changes, compare_trajectories
from tests.journal import count, training_visits, walk
from tests.loops import build, facts_of
from tests.support import damaged, prepare_plain
from tests.trainers import (
    ACCUMULATION,
    EVAL_EVERY,
    FULL,
    NUM_EVAL_BATCHES,
    NUM_LAYERS,
    NUM_STEPS,
    RESUME_AT,
    Arms,
    check_not_vacuous,
    logged,
    rows,
    trainer_arguments,
)

NUM_SLOTS = 2
STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Arms:
    return Arms(tmp_path_factory.mktemp("trainer"), torch.float32)


@pytest.fixture(scope="module")
def resident(arms: Arms) -> Trajectory:
    run = arms.run("resident", **FULL)
    check_not_vacuous(run)
    return run


@pytest.fixture(scope="module")
def streamed(arms: Arms) -> Trajectory:
    # The check of the first step would load blocks for itself.
    run = arms.run("streamed", partial(prepare_plain, self_check="off"), **FULL)
    check_loads(arms.model)
    return run


# What is compared.


def check_loads(model: Any) -> None:
    """As many loads as the walk of this run needs; checkpointing on top would add visits."""
    visits: list[tuple[int, Phase]] = []
    for _ in range(NUM_STEPS // EVAL_EVERY):
        visits += training_visits(NUM_LAYERS, EVAL_EVERY * ACCUMULATION)
        visits += [(block, Phase.INFERENCE) for block in range(NUM_LAYERS)] * NUM_EVAL_BATCHES
    expected = count(walk(visits, NUM_LAYERS, NUM_SLOTS), "prefetch")
    assert expected >= NUM_STEPS * ACCUMULATION * 2 * (NUM_LAYERS - NUM_SLOTS)
    assert poros.runtime(model).stats()["num_loads"] == expected


def differing_contents(expected: Path, found: Path) -> dict[str, object]:
    """Differences of what ``torch.load`` reads from two files."""
    contents = [facts_of(torch.load(path, weights_only=False)) for path in (expected, found)]
    assert contents[0]
    return changes(*contents)


def test_a_whole_run_is_bitwise_equal(
    arms: Arms, resident: Trajectory, streamed: Trajectory
) -> None:
    assert compare_trajectories(resident, streamed) == []
    names = logged(resident)
    assert {f"line 0, {each}" for each in ("loss", "grad_norm", "learning_rate")} <= names.keys()
    assert f"line {NUM_STEPS + NUM_STEPS // EVAL_EVERY}, train_loss" in names


def test_checkpoints_are_equal(arms: Arms, resident: Trajectory, streamed: Trajectory) -> None:
    """The files of adapters by their bytes, those of states by what they hold."""
    for step in (RESUME_AT, NUM_STEPS):
        folders = [arms.checkpoint(arm, step) for arm in ("resident", "streamed")]
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            expected, found = ((folder / name).read_bytes() for folder in folders)
            assert len(expected) > 100 and found == expected, name
        for name in STATES:
            assert differing_contents(*(folder / name for folder in folders)) == {}, name
    for name in STATES:
        paths = [arms.checkpoint("resident", step) / name for step in (RESUME_AT, NUM_STEPS)]
        assert differing_contents(*paths), "the file never changes, so it shows nothing"


def test_a_resumed_run_ends_as_the_straight_one(
    arms: Arms, resident: Trajectory, streamed: Trajectory
) -> None:
    checkpoint = arms.checkpoint("streamed", RESUME_AT)
    resumed = arms.run("resumed", prepare_plain, checkpoint, **FULL)
    assert [step.index for step in resumed.steps] == list(range(RESUME_AT, NUM_STEPS))
    evaluated = {each.name.split(",")[0] for each in resumed.extras}
    assert {f"after {each} steps" for each in (RESUME_AT + EVAL_EVERY, NUM_STEPS)} <= evaluated
    before = {f"step {step}" for step in range(RESUME_AT)}
    before |= {f"after {step} steps" for step in range(0, RESUME_AT + 1, EVAL_EVERY)}
    before |= {each.split(",")[0] for each in logged(resident) if "train_loss" in each}
    for straight in (resident, streamed):
        differences = compare_trajectories(straight, resumed)
        assert {each.kind for each in differences} == {"missing"}
        assert {each.name.split(",")[0] for each in differences} <= before


# Negative controls: a fault in the streamed arm has to show in the comparison.


def test_control_one_flipped_bit(arms: Arms, resident: Trajectory) -> None:
    differences = compare_trajectories(resident, arms.run("flipped", damaged, **FULL))
    assert differences[0].name.startswith("step 0, ")
    names = {each.name for each in differences}
    assert {
        f"after {EVAL_EVERY} steps, evaluation loss",
        f"step {NUM_STEPS - 1}, grad norm",
        "line 0, loss",
    } <= names
    assert "end, file adapter_model.safetensors" in names
    paths = [arms.checkpoint(arm, NUM_STEPS) / "optimizer.pt" for arm in ("resident", "flipped")]
    assert differing_contents(*paths)


# What streaming does shows in the logs, adds up, and changes no bit.


class Listener(TrainerCallback):
    """Sees what TensorBoard would."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def trainer_of(model: Any, folder: Path) -> Trainer:
    wanted = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments = trainer_arguments(folder, **wanted)
    return Trainer(model=model, args=arguments, train_dataset=rows(12, 0), eval_dataset=rows(2, 1))


def test_the_logs_add_up_and_nothing_changes(tmp_path: Path) -> None:
    plain = prepare_plain(build(), device="cpu")
    trainer_of(plain, tmp_path / "plain").train()
    model = prepare_plain(build(), device="cpu")
    trainer = trainer_of(model, tmp_path / "logged")
    listener = Listener()
    trainer.add_callback(listener)
    poros.log_streaming(trainer, events=tmp_path / "events.jsonl")
    before = poros.runtime(model).stats()
    trainer.train()
    assert changes(bits_of(plain), bits_of(model)) == {}
    logged = [each for each in listener.seen if "poros/num_loads" in each]
    assert len(logged) == 2 and all("loss" in each for each in logged)
    history = [each for each in trainer.state.log_history if "poros/num_loads" in each]
    assert [each["poros/num_loads"] for each in history] == [
        each["poros/num_loads"] for each in logged
    ]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [each["event"] for each in lines]
    assert kinds == ["start", "log", "evaluation", "log", "evaluation", "end"]
    assert lines[-1]["num_loads"] == poros.runtime(model).stats()["num_loads"]
    assert lines[-1]["check"] == poros.runtime(model).self_check
    assert lines[0]["versions"]["torch"] == torch.__version__
    assert lines[0]["num_blocks"] == poros.runtime(model).num_blocks
    # The last evaluation comes after the last log; until then every load is in one of them.
    total = poros.runtime(model).stats()["num_loads"] - before["num_loads"]
    counted = sum(each["poros/num_loads"] for each in logged)
    assert 0 < counted <= total
    moved = sum(each["poros/h2d_gb"] for each in logged)
    assert moved > 0 and all(each["poros/h2d_gb_per_s"] > 0 for each in logged)
    assert all(each["poros/stall_ms"] > 0 for each in logged)


def test_a_model_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreparedModelError, match="expected a prepared model"):
        poros.log_streaming(trainer_of(build(), tmp_path))
