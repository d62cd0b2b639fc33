"""Two loss curves in a terminal, one on the other: plain characters, nothing smoothed away."""

from collections.abc import Sequence
from itertools import pairwise

STREAMED, RESIDENT, BOTH = ".", "r", "@"
"""What marks a point of one curve alone, of the other alone, and of both."""


def draw(
    streamed: Sequence[float],
    resident: Sequence[float],
    *,
    num_columns: int = 60,
    num_rows: int = 9,
) -> str:
    """Both curves over the same steps, as lines of text.

    A column is the mean over the steps that fall on it. The resident curve may have fewer steps; a
    column that it covers only in part is left to the other.

    Args:
        streamed: The loss of each step.
        resident: The same of a resident run, from the first step on.
        num_columns: At most.
        num_rows: Lines of the picture.
    """
    if not streamed:
        return "no steps"
    num_columns = min(num_columns, len(streamed))
    bounds = [round(column * len(streamed) / num_columns) for column in range(num_columns + 1)]
    first, second = (
        [
            sum(losses[begin:end]) / (end - begin) if end <= len(losses) else None
            for begin, end in pairwise(bounds)
        ]
        for losses in (streamed, resident)
    )
    values = [value for value in (*first, *second) if value is not None]
    low, high = min(values), max(values)

    def row_of(value: float | None) -> int | None:
        if value is None:
            return None
        return round((high - value) / ((high - low) or 1.0) * (num_rows - 1))

    grid = [[" "] * num_columns for _ in range(num_rows)]
    for column, pair in enumerate(zip(first, second, strict=True)):
        rows = [row_of(value) for value in pair]
        for row, mark in zip(rows, (STREAMED, RESIDENT), strict=True):
            if row is not None:
                # Equal values, not points that only look the same.
                grid[row][column] = BOTH if pair[0] == pair[1] else mark
    edges = {0: f"{high:.2f}", num_rows - 1: f"{low:.2f}"}
    width = max(map(len, edges.values()))
    lines = [f"{edges.get(row, ''):>{width}} |{''.join(grid[row])}" for row in range(num_rows)]
    steps = f"1{len(streamed):>{max(1, num_columns - 1)}}"
    return "\n".join(line.rstrip() for line in (*lines, f"{'':{width}}  {steps} steps"))
