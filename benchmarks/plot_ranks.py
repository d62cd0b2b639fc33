"""Speed-up and memory of DoRA's norm against the rank, from lines of ``benchmarks.dora norm``.

    python -m benchmarks.dora norm > norm.jsonl
    python -m benchmarks.plot_ranks norm.jsonl norm.svg

Needs matplotlib (``pip install -e '.[benchmarks]'``), no GPU.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASELINE, OURS = "PEFT", "Poros"
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The measurements in a file; what else was printed is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def curves(lines: Sequence[Line], what: str, arm: str) -> dict[str, list[tuple[int, float]]]:
    """By shape, what an arm measured at each rank."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        if line["arm"] == arm:
            found.setdefault(line["shape"], []).append((line["rank"], line[what]))
    return {shape: sorted(points) for shape, points in found.items()}


def draw(lines: Sequence[Line], target: Path) -> None:
    """Draw both, and write ``target``.

    Raises:
        ValueError: If there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Else every run would write another file.
    matplotlib.rcParams["svg.hashsalt"] = "poros"
    from matplotlib import pyplot

    times = [curves(lines, "ms", arm) for arm in (BASELINE, OURS)]
    if not all(times):
        raise ValueError("expected lines of benchmarks.dora norm, found none of both arms")
    peaks = [curves(lines, "peak_mb", arm) for arm in (BASELINE, OURS)]
    figure, (speed, memory) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6.5))
    for color, shape in zip(_COLORS, times[0], strict=False):
        ranks = [rank for rank, _ in times[0][shape]]
        ratios = [
            theirs / ours
            for (_, theirs), (_, ours) in zip(times[0][shape], times[1][shape], strict=True)
        ]
        speed.plot(ranks, ratios, "o-", color=color, label=shape.replace("x", " x "))
        for style, found in zip(("--", "-"), peaks, strict=True):
            memory.plot(ranks, [peak for _, peak in found[shape]], "o" + style, color=color)
    speed.axhline(1, linestyle=":", color="tab:gray")
    speed.set_ylabel("times as fast as PEFT")
    speed.legend()
    memory.set_yscale("log")
    memory.set_ylabel("temporary MB (dashed: PEFT)")
    memory.set_xlabel("rank")
    memory.set_xticks(ranks, [str(rank) for rank in ranks])
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
