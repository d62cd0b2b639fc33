"""Rows of an embedding in host memory, asked for each time the code of a loss runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import poros
from poros.accumulation import lookups as lookups_module
from poros.accumulation.lookups import MicroBatchLookups
from poros.errors import UnsupportedModelError
from poros.head.rows import RowReader
from poros.streams import EagerStreams
from tests.exact.arms import Bases
from tests.exact.together import Batch, num_groups, own_loss, same, train
from tests.support import same_bits

Model = Any
POLICY: Any = {"slots": 2, "loss": "chunked", "stream_head": True, "stream_embedding": True}
CPU = torch.device("cpu")
IDS, OTHERS = torch.tensor([[3, 1, 2]]), torch.tensor([[3, 1, 4]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Indices that came to the host."""
    found: list[torch.Tensor] = []
    genuine = RowReader._on_host

    def noted(self: RowReader, indices: torch.Tensor) -> torch.Tensor:
        found.append(indices)
        return genuine(self, indices)

    monkeypatch.setattr(RowReader, "_on_host", noted)
    return found


def test_indices_come_to_the_host_once_for_a_micro_batch(
    bases: Bases, looks: list[torch.Tensor]
) -> None:
    expected = train(poros.prepare(bases.build("qwen2").train(), **POLICY), together=False)
    looks.clear()
    model = poros.prepare(bases.build("qwen2").train(), **POLICY)
    assert same(train(model), expected) and num_groups(model) == 3
    assert len(looks) == 4 * 3, "though its code runs two or three times"


def another_time() -> Any:
    """A loss that takes other tokens, of the same shape, when its code runs again."""
    calls: list[int] = []

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        calls.append(1)
        tokens = batch["input_ids"].roll(len(calls), dims=1)
        return own_loss(model, {"input_ids": tokens, "labels": batch["labels"]})

    return loss


def test_other_rows_the_second_time_are_refused(bases: Bases) -> None:
    model = poros.prepare(bases.build("qwen2").train(), **POLICY)
    with pytest.raises(UnsupportedModelError, match="same values each time"):
        train(model, loss=another_time())
    assert all(each.grad is None for each in model.parameters())


def test_control_rows_that_are_taken_for_known_unseen(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatchLookups, "take_differs", lambda self: [])
    model = poros.prepare(bases.build("qwen2").train(), **POLICY)
    train(model, loss=another_time())  # nobody notices


@pytest.mark.parametrize("which", range(1, 13))
def test_an_interruption_leaves_nothing_behind(
    which: int, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a `with` begins: what it was to undo is not undone by it. The model is looked at then."""
    model = poros.prepare(bases.build("qwen2").train(), **POLICY)
    tokens = torch.arange(4, 52).view(4, 12)
    batches = [{"input_ids": row[None], "labels": row[None], "use_cache": False} for row in tokens]
    poros.accumulate(model, batches)

    def look() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=tokens[:1].flip(1), labels=tokens[:1]).loss
        model.train()
        return found

    expected, genuine, number = look(), MicroBatchLookups.of, 0

    @contextmanager
    def struck(self: MicroBatchLookups, reader: RowReader, *, is_again: bool) -> Iterator[None]:
        nonlocal number
        number += 1
        context = genuine(self, reader, is_again=is_again)
        if number == which:
            context.__enter__()
            kept.append(context)
            raise KeyboardInterrupt
        with context:
            yield

    kept: list[Any] = []
    monkeypatch.setattr(MicroBatchLookups, "of", struck)
    try:
        poros.accumulate(model, batches)
    except KeyboardInterrupt:
        assert same_bits(look(), expected), "while the traceback holds all frames"
    assert kept and poros.runtime(model).rows.lookups is None
    assert poros.runtime(model).context.in_place is None
    monkeypatch.setattr(MicroBatchLookups, "of", genuine)
    assert same_bits(look(), expected)
    poros.accumulate(model, batches)


def test_what_is_noted_is_the_values_of_that_time() -> None:
    reader, known = RowReader(EagerStreams(CPU)), MicroBatchLookups()
    matrix, indices = torch.randn(6, 4), IDS.clone()
    with known.of(reader, is_again=False):
        first = reader.rows("embed", matrix, indices)
    with known.of(reader, is_again=True):
        assert same_bits(reader.rows("embed", matrix, IDS), first)
    assert not any(map(bool, known.take_differs()))
    indices.copy_(OTHERS)
    with known.of(reader, is_again=True):
        reader.rows("embed", matrix, indices)
    assert list(map(bool, known.take_differs())) == [True], "the same tensor, edited"
    assert known.take_differs() == []


@pytest.mark.parametrize("indices", [IDS[:, :2], IDS.int(), IDS[0]])
def test_lookups_of_another_form_are_looked_at(indices: torch.Tensor) -> None:
    reader, known = RowReader(EagerStreams(CPU)), MicroBatchLookups()
    matrix = torch.randn(6, 4)
    with known.of(reader, is_again=False):
        reader.rows("embed", matrix, IDS)
    with known.of(reader, is_again=True):
        found = reader.rows("embed", matrix, indices)
        assert same_bits(found, matrix[indices.long()])
        # One more than before.
        assert same_bits(reader.rows("embed", matrix, IDS), matrix[IDS])
        assert same_bits(reader.rows("embed", matrix, OTHERS), matrix[OTHERS])
    assert reader.lookups is None and lookups_module._form(IDS) != lookups_module._form(indices)
