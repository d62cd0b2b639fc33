"""Counting random draws, and states that are that many draws later."""

from collections.abc import Callable

import pytest
import torch

from poros.accumulation import draws
from poros.accumulation.draws import NONE, Drawn, Draws, DrawTable, between, later
from poros.stream.rng import RngStash

CPU = torch.device("cpu")
WAYS: dict[str, Callable[[], object]] = {
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(70001), 0.3),
    "uniform": lambda: torch.rand(3),
    "normal": lambda: torch.randn(17),
    "integers": lambda: torch.randint(0, 5, (623,)),
    "permutation": lambda: torch.randperm(600),
    "a whole period": lambda: torch.randint(0, 5, (624,)),
}


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_so_many_draws_later_is_the_state(way: str, is_fresh: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if not is_fresh:
            torch.rand(100)
        start = RngStash.capture(CPU)
        WAYS[way]()
        end = RngStash.capture(CPU)
        found = between(start, end)
        assert found is not None and found.cpu > 0
        assert later(start, found).equals(end)
        assert not later(start, Draws(found.cpu + 1, 0)).equals(end)
        # Neither touches the generator in use.
        assert RngStash.capture(CPU).equals(end)


def test_another_seed_and_a_normal_number_kept_for_later_are_no_number_of_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "MOST_DRAWS", 10_000)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        start = RngStash.capture(CPU)
        assert between(start, start) == NONE and later(start, NONE).equals(start)
        torch.randn(1)
        assert between(start, RngStash.capture(CPU)) is None
        torch.manual_seed(4)
        assert between(start, RngStash.capture(CPU)) is None


def test_a_plan_that_was_wrong_is_not_made_again() -> None:
    """Of layers that draw nothing in the first one, and later on something in others."""
    table, drawn = DrawTable(), Drawn(NONE, NONE, NONE)
    table.note("shape", drawn)
    assert table.plan("shape", NONE) == drawn
    table.forget("shape")
    assert table.plan("shape", NONE) is None and table.is_predictable("shape")
