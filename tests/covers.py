"""Covers of grids: of many parametrized tests a few that have every value, or every pair of values.

A test whose parameters are crossed is marked `cover`. `make test` runs a cover of its grid and
`make test-all` all of it:

    @pytest.mark.cover("pairs")   # each pair of values of two parameters comes in some test
    @pytest.mark.cover("values")  # each value does: they have no bearing on each other
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

SIZES = {"values": 1, "pairs": 2}


def cover(points: Sequence[Sequence[Hashable]], size: int) -> set[int]:
    """The places of few points in which each ``size`` values that come together still do.

    Greedy, and the same at every call: of equally good points the one whose values came least.
    """
    uses: Counter[tuple[int, Hashable]] = Counter()

    def together(point: Sequence[Hashable]) -> set[object]:
        return set(combinations(enumerate(point), min(size, len(point))))

    left = {place: together(point) for place, point in enumerate(points)}
    chosen = set()
    while left:
        seen = {place: sum(uses[each] for each in enumerate(points[place])) for place in left}
        best = max(left, key=lambda place: (len(left[place]), -seen[place]))
        new = left.pop(best)
        uses.update(enumerate(points[best]))
        chosen.add(best)
        left = {place: rest for place, each in left.items() if (rest := each - new)}
    return chosen


def with_slow(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Values for ``parametrize``, of which ``slow`` ones are left out of `make test`."""
    values = list(values)
    assert set(slow) <= set(values), "each is one of the values"
    return [pytest.param(each, marks=[pytest.mark.slow] * (each in slow)) for each in values]


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the covers of grids do not need. Tests that were slow do not count."""
    grids: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("cover")
        if mark is not None and item.get_closest_marker("slow") is None:
            grids[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, which), grid in grids.items():
        # The names of its rows, one for each `parametrize`.
        points = [tuple(each.callspec._idlist) for each in grid]  # type: ignore[attr-defined]
        kept = cover(points, SIZES[which])
        for place, item in enumerate(grid):
            if place not in kept:
                item.add_marker(pytest.mark.slow)
