"""Draws small charts as SVG, in the colors of the page's style (classes ``k0`` to ``k7``)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
Part = tuple[str, str, float, float]
"""A part of a row: its kind, its name, where it begins, how long it is."""
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
    return _figure(drawn, series, unit, _HEIGHT, limit, named)


def bars(
    rows: Mapping[str, Iterable[Part]], unit: str, *, limit: float | None = None, named: str = ""
) -> str:
    """Draw parts along rows with names, ``limit`` across them. "" if all parts are empty."""
    parts = [(row, part) for row, name in enumerate(rows) for part in rows[name]]
    end = max([start + length for _, (*_, start, length) in parts] + [limit or 0.0])
    if not end:
        return ""
    kinds = list(dict.fromkeys(kind for _, (kind, *_) in parts))
    scale = (_WIDTH - _LEFT - 20) / end
    bottom = 6 + 40 * len(rows)
    drawn = [_text(_LEFT - 8, 28 + 40 * row, "end", name) for row, name in enumerate(rows)]
    drawn += [
        f'<rect class="k{kinds.index(kind) % 8}" x="{_LEFT + start * scale:.2f}" '
        f'y="{6 + 40 * row}" width="{max(length * scale, 0.4):.2f}" height="30">'
        f"<title>{escape(name)}: {length:.3f} {unit}</title></rect>"
        for row, (kind, name, start, length) in parts
    ]
    drawn += [
        _text(_LEFT + tick * scale, bottom + 14, "middle", f"{tick:g}") for tick in _ticks(0, end)
    ]
    if limit is not None:
        drawn.append(f'<path class="limit" d="M{_LEFT + limit * scale:.1f} 0V{bottom}"/>')
    return _figure(drawn, kinds, unit, bottom + 22, limit, named)


def _text(across: float, down: float, anchor: str, text: str) -> str:
    place = f'x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _figure(
    drawn: Iterable[str],
    names: Iterable[str],
    unit: str,
    height: int,
    limit: float | None,
    named: str,
) -> str:
    """Join a chart with its legend: the names in their colors, the unit at the right."""
    keys = [f'<i class="k{place % 8}">■</i> {escape(name)}' for place, name in enumerate(names)]
    if limit is not None:
        keys.append(f'<i class="k4">┅</i> {escape(named)} of {limit:.2f} {escape(unit)}')
    legend = "".join(f'<span class="key">{each}</span>' for each in keys)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(drawn)}</svg>'
        f'<figcaption>{legend}<span class="unit">{escape(unit)}</span></figcaption></figure>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]
