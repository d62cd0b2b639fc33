"""Batches of rows of like lengths, and rows that other processes tokenize and collate."""

from pathlib import Path
from typing import Any

import pytest
import transformers.trainer

from tests.covers import with_slow
from tests.finetune.arms import arm


@pytest.mark.parametrize("kind", with_slow(("sft, padded", "dpo"), ["dpo"]))
def test_batches_of_rows_of_like_lengths(
    kind: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    class Sampler(transformers.trainer.LengthGroupedSampler):
        def __init__(self, *args: Any, lengths: Any, **options: Any) -> None:
            given.append(lengths)
            super().__init__(*args, lengths=lengths, **options)

    monkeypatch.setattr(transformers.trainer, "LengthGroupedSampler", Sampler)
    said: dict[str, Any] = {"training__max_steps": 2}
    random = arm(model, data, tmp_path / "random", kind, memory__slots=2, **said)
    assert not given
    said["training__train_sampling_strategy"] = "group_by_length"
    streamed = arm(model, data, tmp_path / "streamed", kind, memory__slots=2, **said)
    resident = arm(model, data, tmp_path / "resident", kind, memory__resident=True, **said)
    assert streamed.losses == resident.losses
    assert streamed.adapter == resident.adapter != random.adapter
    (lengths, _) = given
    assert len(lengths) == 200 and len(set(lengths)) > 5


def test_rows_that_other_processes_tokenize_and_collate(
    model: Path, data: Path, tmp_path: Path
) -> None:
    kind = "sft, packed"
    said: dict[str, Any] = {"training__max_steps": 2, "memory__slots": 2}
    alone = arm(model, data, tmp_path / "alone", kind, **said)
    said |= {"training__dataloader_num_workers": 2, "training__dataset_num_proc": 2}
    together = arm(model, data, tmp_path / "together", kind, **said)
    assert together.losses == alone.losses
    assert together.adapter == alone.adapter
