"""Kinds of adapters, optimizers, grouping, recording and residency on a GPU, with real graphs.

Every pair of values, or with POROS_ALL_AXES=1 every cell; POROS_AXES_SHARE=3/8 takes the fourth of
eight shares, for processes side by side:

    POROS_ALL_AXES=1 POROS_AXES_SHARE=0/8 python -m pytest tests/gpu/test_axes_on_gpu.py
"""

import os

import pytest

from tests.exact.arms import Bases
from tests.gpu.axes import Cell, Facts, all_cells, difference, pairwise

pytestmark = pytest.mark.gpu


def cells() -> list[Cell]:
    every = all_cells()
    chosen = every if os.environ.get("POROS_ALL_AXES") == "1" else pairwise(every)
    share, number = map(int, os.environ.get("POROS_AXES_SHARE", "0/1").split("/"))
    return chosen[share::number]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def known() -> dict[Cell, Facts]:
    return {}


@pytest.mark.parametrize("cell", [pytest.param(each, id=each.name()) for each in cells()])
def test_a_cell_is_exact(cell: Cell, bases: Bases, known: dict[Cell, Facts]) -> None:
    assert difference(cell, bases, "cuda", known) is None
