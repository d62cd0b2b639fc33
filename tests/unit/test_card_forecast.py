"""What is forecast of a card that is not here, from what was measured."""

import pytest

from benchmarks.card import Measured, forecast
from poros.planning.cards import CARDS

HERE, CARD = CARDS["h200"], CARDS["rtx3090"]
PRODUCTS, MEMORY = 989 / 71, 4800 / 936


def test_kernels_are_slowed_down_each_by_its_rate() -> None:
    found = forecast(Measured(100.0, 20.0, 0.0), 25, CARD, HERE, 0.0)
    assert found.ms == pytest.approx(100 * PRODUCTS + 20 * MEMORY)
    assert found.slow_ms == pytest.approx(120 * PRODUCTS) and found.slow_ms > found.ms
    assert found.wire_ms == found.least_ms == 0


def test_the_link_runs_beside_them_or_after_them() -> None:
    measured = Measured(1.0, 0.0, 25e9)
    beside = forecast(measured, 25, CARD, HERE, 0.0)
    after = forecast(measured, 25, CARD, HERE, 0.0, is_serial=True)
    assert beside.ms == beside.wire_ms == 1e3
    assert after.ms == pytest.approx(1e3 + PRODUCTS)
    assert forecast(measured, 12.5, CARD, HERE, 0.0).ms == 2e3


def test_the_ceiling_is_the_longer_of_peak_and_wire() -> None:
    num_flop = 71e12 * 2  # two seconds at the card's peak
    assert forecast(Measured(1e6, 0, 25e9), 25, CARD, HERE, num_flop).least_ms == pytest.approx(2e3)
    assert forecast(Measured(1e6, 0, 75e9), 25, CARD, HERE, num_flop).least_ms == pytest.approx(3e3)


def test_the_same_card_is_no_forecast() -> None:
    found = forecast(Measured(10.0, 5.0, 0.0), 55, HERE, HERE, 0.0)
    assert found.ms == found.slow_ms == 15.0
