"""Kinds of adapters, optimizers, grouping, recording and residency, each pair of them together.

And programs that once gave other bits than resident without a word: what decides a layer was
recognized by a tensor's version, or left frozen adapters out.
"""

from typing import Any

import pytest
import torch

from poros.io.digests import checksum
from tests.exact.arms import Bases
from tests.exact.axes import (
    Cell,
    Facts,
    all_cells,
    difference,
    pairwise,
)


@pytest.fixture(scope="module")
def known() -> dict[Cell, Facts]:
    return {}


def are_unrelated(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """Whether neither knows of the other.

    An optimizer changes tensors between steps, behind what DoRA and recordings remember of them.
    What is exchanged is frozen tensors: none of LoRA and DoRA, and those of LoRA-FA as a second's.
    """
    values = dict([one, other])
    adapter = values.get("adapter")
    if "optimizer" in values:
        return adapter != "DoRA" and "is_recorded" not in values
    return "exchange" in values and adapter not in (None, "second frozen")


FAST = pairwise(all_cells(), are_unrelated)
REST = [cell for cell in pairwise(all_cells()) if cell not in FAST]


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=cell.name()) for cell in FAST),
        *(pytest.param(cell, id=cell.name(), marks=pytest.mark.slow) for cell in REST),
    ],
)
def test_a_cell_is_exact(cell: Cell, bases: Bases, known: dict[Cell, Facts]) -> None:
    assert difference(cell, bases, "cpu", known) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_tells_what_regular_edits_do(dtype: torch.dtype) -> None:
    """Signs, a single bit, neighbours exchanged, rows in another order."""
    values = (torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    other = torch.ones(3, dtype=torch.bfloat16)
    flipped = values.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    swapped = values.clone()
    swapped[0, :2] = values[0, :2].flip(0)
    edited = [-values, values.flip(0), flipped, swapped, values * 2]
    found = {int(checksum([each, other])) for each in (values, *edited)}
    assert len(found) == 1 + len(edited)
    assert int(checksum([values.clone(), other])) in found
