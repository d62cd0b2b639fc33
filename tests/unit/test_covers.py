"""What a cover keeps of a grid, and that the rest of the grid is slow."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.covers import cover, leave_out, with_slow

GRID = list(product("abcde", (0, 1), ("x", "y", "z"), (True, False)))
WITH_HOLES = [each for each in GRID if each[0] != "a" or each[2] == "y"]


def values(points: list[Any], size: int) -> set[Any]:
    return {each for point in points for each in combinations(enumerate(point), size)}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("points", [GRID, WITH_HOLES], ids=["whole", "with holes"])
def test_all_that_comes_together_is_kept_in_few_points(points: list[Any], size: int) -> None:
    kept = [points[place] for place in sorted(cover(points, size))]
    assert values(kept, size) == values(points, size)
    assert len(kept) <= (5 if size == 1 else 20)
    # Other sizes of a cover keep other things.
    assert (values(kept, size + 1) == values(points, size + 1)) is False


def test_the_slow_of_values_are_named() -> None:
    found = [(each.values, [mark.name for mark in each.marks]) for each in with_slow("abc", "b")]
    assert found == [(("a",), []), (("b",), ["slow"]), (("c",), [])]
    with pytest.raises(AssertionError, match="one of the values"):
        with_slow("abc", ["d"])


@pytest.mark.cover("values")
@pytest.mark.parametrize("second", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_rest_of_a_grid_is_slow(
    request: pytest.FixtureRequest, first: int, second: int
) -> None:
    """Tests that were slow before stay so, and keep nothing out."""
    grid = [each for each in request.session.items if each.nodeid.startswith(_name(request))]
    marked = {each.name: each.get_closest_marker("slow") is not None for each in grid}
    if "not slow" in request.config.option.markexpr:
        assert not any(marked.values()) and len(marked) == 3
    elif len(marked) == 9:
        assert sum(marked.values()) == 6
        before = dict(marked)
        leave_out(grid)
        assert {each.name: each.get_closest_marker("slow") is not None for each in grid} == before


def _name(request: pytest.FixtureRequest) -> str:
    return str(request.node.nodeid).partition("[")[0]
