"""What streaming does shows in the Trainer's logs, adds up, and changes no bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import poros
from poros.errors import PreparedModelError
from poros.gates import tiny
from tests.comparing import bits_of, changes
from tests.loops import build
from tests.support import prepare_plain
from tests.trainers import trainer_arguments

ROWS = [
    {name: tensor[0] for name, tensor in batch.items()}
    for batch in tiny.make_batches(12, num_tokens=8, padded=False)
]


class Listener(TrainerCallback):
    """Sees what TensorBoard would."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def trainer_of(model: Any, folder: Path) -> Trainer:
    wanted = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments = trainer_arguments(folder, **wanted)
    return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:2])


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
