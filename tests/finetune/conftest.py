"""What the tests of fine-tuning share."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="poros finetune trains with TRL")


@pytest.fixture(scope="module", autouse=True)
def of_one_small_model(planned_once: None) -> None:
    """So are nearly all runs: they are planned once."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.finetune.subjects import write_model

    return write_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 200 rows of every form."""
    from tests.finetune.subjects import write_rows

    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "completions", "text", "preferences", "labelled"):
        write_rows(folder / f"{form}.jsonl", form)
    return folder
