"""What the tests of fine-tuning share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="poros finetune trains with TRL")


@pytest.fixture(scope="session", autouse=True)
def each_template_is_tried_once() -> Iterator[None]:
    """Do not render a chat template in a child again that one survived: it imports for a second."""
    from poros.loaders import tokenizer

    genuine, survived = tokenizer.require_bounded_template, set[str]()

    def require(where: Path, template: str, tokens: dict[str, Any]) -> None:
        tried = repr((template, tokens))
        if tried not in survived:
            genuine(where, template, tokens)
            survived.add(tried)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "require_bounded_template", require)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
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
