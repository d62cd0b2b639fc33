"""Kinds of adapters, optimizers, grouping, recording and residency, each pair of them together."""

import pytest

from tests.exact.arms import Bases
from tests.exact.axes import Cell, Facts, all_cells, difference, pairwise


@pytest.fixture(scope="module")
def known() -> dict[Cell, Facts]:
    return {}


@pytest.mark.parametrize("cell", [pytest.param(x, id=x.name()) for x in pairwise(all_cells())])
def test_a_cell_is_exact(cell: Cell, bases: Bases, known: dict[Cell, Facts]) -> None:
    assert difference(cell, bases, "cpu", known) is None
