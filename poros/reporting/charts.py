"""Draws small charts as SVG, in the colors of the page's style."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 62, 28, 12
_NAMES = 98
"""Room for the names of rows, in the large type of a narrow page."""


def lines(
    series: Mapping[str, Points], unit: str, *, limit: float | None = None, named: str = ""
) -> str:
    """Draw curves over steps; ``limit`` is a dashed line with a name."""
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    steps = [x for x, _ in points]
    values = [y for _, y in points] + ([] if limit is None else [limit])
    low, high = min(values), max(values)
    low = 0.0 if limit is not None else low
    if high == low:
        high, low = high + (abs(high) or 1) * 0.05, low - (abs(low) or 1) * 0.05
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 12)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = []
    for tick in _ticks(low, high):
        left, down = place(first, tick).split(",")
        right = place(last, tick).split(",")[0]
        parts.append(
            f'<line class="grid" x1="{left}" x2="{right}" y1="{down}" y2="{down}"/>'
            f'<text x="{_LEFT - 8}" y="{float(down) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    if limit is not None:
        left, down = place(first, limit).split(",")
        right = place(last, limit).split(",")[0]
        parts.append(f'<line class="limit" x1="{left}" x2="{right}" y1="{down}" y2="{down}"/>')
    for number, each in enumerate(series.values()):
        path = " ".join(place(x, y) for x, y in each)
        parts.append(f'<polyline class="line{number}" points="{path}"/>')
        if len(each) < 30:
            places = (at.split(",") for at in path.split())
            parts += [f'<circle class="dot{number}" cx="{x}" cy="{y}" r="3"/>' for x, y in places]
    parts.append(_axis(first, last))
    names = "".join(
        f'<span class="key key{number}">{escape(name)}</span>' for number, name in enumerate(series)
    )
    names += _limit_key(limit, named)
    return _figure("".join(parts), f"{names} <span class=unit>{escape(unit)}</span>", _HEIGHT)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], limit: float | None, *, named: str = ""
) -> str:
    """Draw stacked bars from names and sizes of their parts, with ``limit`` across them."""
    most = max([sum(parts.values()) for _, parts in rows] + [limit or 0.0])
    if not most:
        return ""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    height = 34 * len(rows) + 10
    scale = (_WIDTH - _NAMES - 20) / most
    drawn = []
    for place, (name, parts) in enumerate(rows):
        across = float(_NAMES)
        top = 6 + 34 * place
        drawn.append(_row_name(name, top + 17))
        for part, size in parts.items():
            width = size * scale
            drawn.append(
                f'<rect class="part{names.index(part) % 8}" x="{across:.1f}" y="{top}" '
                f'width="{max(width, 0.5):.1f}" height="24">'
                f"<title>{escape(part)}: {size:.3f} GB</title></rect>"
            )
            across += width
    if limit is not None:
        across = _NAMES + limit * scale
        drawn.append(
            f'<line class="limit" x1="{across:.1f}" x2="{across:.1f}" y1="0" y2="{height}"/>'
        )
    keys = "".join(
        f'<span class="key part-key{number % 8}">{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return _figure("".join(drawn), keys + _limit_key(limit, named), height)


def streams(spans: Sequence[Mapping[str, object]]) -> str:
    """Draw what ran on the two streams of one step."""
    found = [
        (str(s["name"]), str(s["stream"]), float(str(s["start_ms"])), float(str(s["ms"])))
        for s in spans
    ]
    end = max((start + ms for _, _, start, ms in found), default=0.0)
    if not end:
        return ""
    scale = (_WIDTH - _NAMES - 10) / end
    drawn = []
    for place, stream in enumerate(("compute", "copy")):
        top = 8 + 44 * place
        drawn.append(_row_name(stream, top + 21))
        for name, of, start, ms in found:
            if of == stream:
                kind = name.split(" ")[0]
                drawn.append(
                    f'<rect class="span-{escape(kind)}" x="{_NAMES + start * scale:.2f}" y="{top}" '
                    f'width="{max(ms * scale, 0.4):.2f}" height="32">'
                    f"<title>{escape(name)}: {ms:.2f} ms at {start:.2f}</title></rect>"
                )
    for tick in _ticks(0, end):
        across = _NAMES + tick * scale
        drawn.append(f'<text x="{across:.1f}" y="112" text-anchor="middle">{tick:g}</text>')
    kinds = sorted({name.split(" ")[0] for name, *_ in found})
    keys = "".join(f'<span class="key span-key-{escape(k)}">{escape(k)}</span>' for k in kinds)
    return _figure("".join(drawn), f"{keys} <span class=unit>ms</span>", 118)


def _row_name(name: str, down: float) -> str:
    return f'<text x="{_NAMES - 8}" y="{down}" text-anchor="end">{escape(name)}</text>'


def _limit_key(limit: float | None, name: str) -> str:
    if limit is None:
        return ""
    return f'<span class="key key-limit">{escape(name)} of {limit:.2f} GB</span>'


def _figure(content: str, caption: str, height: int) -> str:
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {height}" role="img">{content}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _axis(first: float, last: float) -> str:
    down = _HEIGHT - 8
    return (
        f'<text x="{_LEFT}" y="{down}">step {first:g}</text>'
        f'<text x="{_WIDTH - 12}" y="{down}" text-anchor="end">{last:g}</text>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 6)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]
