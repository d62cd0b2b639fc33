"""What the tests of fine-tuning share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="poros finetune trains with TRL")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The number of threads changes the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    from tests.finetune.subjects import write_model

    return write_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 200 rows of every form."""
    from tests.finetune.subjects import rows, write_rows

    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "completions", "text", "preferences"):
        write_rows(folder / f"{form}.jsonl", rows(form))
    return folder
