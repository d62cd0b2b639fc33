"""Peak memory and step time against the budget, drawn from the CSV of a budget table.

    python -m benchmarks.plot benchmarks/results/budget_h200_202611.csv

Writes an SVG beside the CSV. Needs matplotlib (``pip install -e '.[benchmarks]'``), no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import TextRow, numbers, percentiles, read

Point = tuple[float, float, float, float, float]
"""Budget in GB; step time in ms: median, p10, p90; peak in GB."""


def points(rows: Sequence[TextRow]) -> list[Point]:
    """One per budget, in order. A budget given as a string is not a number, and is left out."""
    curve = []
    for budget in dict.fromkeys(row["vram_budget"] for row in rows):
        own = [row for row in rows if row["vram_budget"] == budget and row["ms"]]
        if budget.isdigit() and own:
            curve.append((int(budget) / 1e9, *_times(own), _peak(own)))
    return sorted(curve)


def draw(rows: Sequence[TextRow], target: Path) -> None:
    """Draw ``points`` with the resident arms as lines, and write ``target``.

    Raises:
        ValueError: If the rows hold no budgets.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Else every run would write another file.
    matplotlib.rcParams["svg.hashsalt"] = "poros"
    from matplotlib import pyplot

    curve = points(rows)
    if not curve:
        raise ValueError("expected rows of a budget table, found none with vram_budget in bytes")
    budgets, middles, lows, highs, peaks = zip(*curve, strict=True)
    figure, (memory, time) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6.5))
    time.fill_between(budgets, lows, highs, alpha=0.2, color="tab:blue", linewidth=0)
    time.plot(budgets, middles, "o-", color="tab:blue", label="Poros: median, p10 to p90")
    memory.plot(budgets, budgets, ":", color="tab:gray", label="the budget")
    if any(peaks):
        memory.plot(budgets, peaks, "o-", color="tab:blue", label="Poros: peak allocated")
    for name, style in (("resident", "--"), ("resident, checkpointing", "-.")):
        own = [row for row in rows if row["arm"] == name and row["ms"]]
        if own:
            if _peak(own):
                memory.axhline(_peak(own), linestyle=style, color="tab:orange", label=name)
            time.axhline(_times(own)[0], linestyle=style, color="tab:orange", label=name)
    memory.set_ylabel("peak memory, GB")
    time.set_ylabel("step, ms")
    time.set_xlabel("vram_budget, GB")
    first = rows[0]
    memory.set_title(
        f"{first['model']}, {first['layers']} layers, {first['batch']} x {first['seq']} tokens"
    )
    for axes in (memory, time):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, metadata=_no_date(target))
    pyplot.close(figure)


def _times(rows: Sequence[TextRow]) -> tuple[float, float, float]:
    return percentiles(numbers(rows, "ms"))


def _peak(rows: Sequence[TextRow]) -> float:
    """0 on a CPU, where peaks are not counted."""
    return max(numbers(rows, "peak_allocated"), default=0.0) / 1e9


def _no_date(target: Path) -> dict[str, Any]:
    return {"Date": None} if target.suffix == ".svg" else {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args(argv)
    target = options.to or options.csv.with_suffix(".svg")
    draw(read(options.csv), target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
