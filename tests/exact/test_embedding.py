"""An embedding that stays in host memory: what it may not change, and what notices if it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.errors import ParityError
from poros.head.host_matrix import HostMatrix
from poros.head.rows import RowReader
from tests.snapshots import assert_same_run, batches, build, changes, picture, run
from tests.support import prepare_plain

Model = Any


def prepared(model: Model, **policy: Any) -> Model:
    return prepare_plain(model, slots=2, stream_embedding=True, **policy)


def matrix_of(model: Model) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def test_it_trains_as_a_resident_one_and_comes_back() -> None:
    expected, model = run(build()), build()
    before = picture(model)
    prepared(model)
    assert isinstance(matrix_of(model), HostMatrix)
    poros.restore(model)
    assert changes(before, picture(model)) == {}
    prepared(model)
    assert_same_run(expected, run(model))
    stats = poros.runtime(model).stats()
    hidden = matrix_of(model).shape[1] * matrix_of(model).element_size()
    num_tokens = sum(batch["input_ids"].numel() for batch in batches())
    assert stats["rows_num_bytes"] == num_tokens * hidden
    assert stats["host_num_bytes"] - poros.runtime(model).host.num_bytes == matrix_of(model).nbytes


def flipped_byte(model: Model) -> None:
    # In a row that no batch asks for.
    asked = {int(token) for batch in batches() for token in batch["input_ids"].flatten()}
    row = next(row for row in range(matrix_of(model).shape[0]) if row not in asked)
    host = matrix_of(model).host  # type: ignore[attr-defined]
    host[row].view(torch.uint8)[3] ^= 1


def other_rows(model: Model) -> None:
    reader = poros.runtime(model).rows
    genuine = reader._streams.copy

    def copy(target: torch.Tensor, source: torch.Tensor, *, after: Any) -> Any:
        return genuine(target, source.roll(1, 0), after=after)

    reader._streams.copy = copy  # type: ignore[method-assign]


def rows_that_are_late(model: Model) -> None:
    poros.runtime(model).rows._streams.copy = lambda target, source, *, after: None  # type: ignore[method-assign]


FAULTS: dict[Callable[[Model], None], str] = {
    flipped_byte: "its bytes in host memory are not those",
    other_rows: "the rows on the device are not those",
    rows_that_are_late: "the rows on the device are not those",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_before_the_first_update(fault: Callable[[Model], None]) -> None:
    model = prepared(build())
    fault(model)
    with pytest.raises(ParityError, match=f"embed_tokens.weight: {FAULTS[fault]}"):
        run(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_the_reader_nothing_would_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the cells: rows do come from where they are said to."""
    model = prepared(build(), self_check="off")
    genuine = RowReader.rows
    monkeypatch.setattr(
        RowReader, "rows", lambda self, *given: torch.zeros_like(genuine(self, *given))
    )
    with pytest.raises(AssertionError):
        assert_same_run(run(build()), run(model))
