"""Draws small charts as SVG, in the colors of the page's style (classes ``k0`` and ``k1``)."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 98, 28, 12


def lines(
    series: Mapping[str, Points], unit: str, *, limit: float | None = None, named: str = ""
) -> str:
    """Draw curves over steps; ``limit`` is a dashed line with a name. "" if there are no points."""
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    steps = [x for x, _ in points]
    values = [y for _, y in points] + ([] if limit is None else [0.0, limit])
    low, high = min(values), max(values)
    if high == low:
        high, low = high + (abs(high) or 1) * 0.05, low - (abs(low) or 1) * 0.05
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def across(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 12)

    def down(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [
        f'<path class="grid" d="M{_LEFT} {down(tick):.1f}H{_WIDTH - 12}"/>'
        + _text(_LEFT - 8, down(tick) + 4, "end", f"{tick:g}")
        for tick in _ticks(low, high)
    ]
    if limit is not None:
        drawn.append(f'<path class="limit" d="M{_LEFT} {down(limit):.1f}H{_WIDTH - 12}"/>')
    for number, each in enumerate(series.values()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in each)
        drawn.append(f'<polyline class="k{number}" points="{path}"/>')
        if len(each) < 30:
            drawn += [
                f'<circle class="k{number}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3"/>'
                for x, y in each
            ]
    drawn += [
        _text(_LEFT, _HEIGHT - 8, "start", f"step {first:g}"),
        _text(_WIDTH - 12, _HEIGHT - 8, "end", f"{last:g}"),
    ]
    keys = [f'<i class="k{number}">■</i> {escape(name)}' for number, name in enumerate(series)]
    if limit is not None:
        keys.append(f'<i class="limit">┅</i> {escape(named)} of {limit:.2f} {escape(unit)}')
    legend = "".join(f'<span class="key">{each}</span>' for each in keys)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'
        f'<figcaption>{legend}<span class="unit">{escape(unit)}</span></figcaption></figure>'
    )


def _text(across: float, down: float, anchor: str, text: str) -> str:
    place = f'x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]
