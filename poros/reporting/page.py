"""Renders one self-contained HTML page about a run, with charts as SVG."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from poros.errors import RunFolderError, quoted
from poros.reporting.events import Run
from poros.utils.formatting import duration, size

GB = 1e9
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 220, 98, 28
_NUM_TICKS = 5
_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }}</title>
<style>
:root { color-scheme: light dark; --box: color-mix(in srgb, CanvasText 5%, Canvas) }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif }
h1, td { overflow-wrap: anywhere }
figure, pre { margin: 0; background: var(--box); padding: .75rem; overflow-x: auto }
svg text { fill: GrayText; font-size: 13px }
.grid { stroke: color-mix(in srgb, CanvasText 20%, Canvas) }
.k0 { color: #3f82c8 } .k1 { color: #cc6a2c }
polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round }
table { border-collapse: collapse; width: 100% }
td { border-bottom: 1px solid GrayText; padding: .25rem .5rem }
td + td { text-align: right }
.none { color: GrayText }
</style></head><body>
<h1>{{ run.name }}</h1>
{% for title, content, without in sections %}
<h2>{{ title }}</h2>
{% if not content %}<p class="none">{{ without }}</p>
{% elif content is mapping %}<table>
{% for name, value in content.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
{% elif content.curves is defined %}
<figure><svg viewBox="0 0 {{ width }} {{ height }}" role="img">
{% for y, value in content.ticks %}
<path class="grid" d="M{{ left }} {{ y }}H{{ width }}"/>
<text x="{{ left - 8 }}" y="{{ y }}" text-anchor="end">{{ value }}</text>
{% endfor %}
{% for points in content.curves.values() %}
<polyline class="k{{ loop.index0 }}" points="{{ points }}"/>
{% endfor %}
<text x="{{ left }}" y="{{ height - 8 }}">step {{ content.first }}</text>
<text x="{{ width }}" y="{{ height - 8 }}" text-anchor="end">{{ content.last }}</text>
</svg><figcaption>{% for name in content.curves %}
<span class="k{{ loop.index0 }}">■ {{ name }}</span>{% endfor %} ({{ content.unit }})
</figcaption></figure>
{% else %}<ul>{% for each in content %}<li>{{ each }}</li>{% endfor %}</ul>
{% endif %}
{% endfor %}
{% if run.recipe %}<h2>Recipe</h2><pre>{{ run.recipe }}</pre>{% endif %}
<p class="none">GB is 10<sup>9</sup> bytes.</p>
</body></html>
"""


class Chart(NamedTuple):
    """Curves over the steps of a run, in coordinates of the drawing."""

    unit: str
    curves: Mapping[str, str]
    """The points of each curve by its name, as SVG has them."""
    ticks: list[tuple[str, str]]
    """Heights, and the values there."""
    first: str
    last: str


def page(run: Run) -> str:
    """Render the page of a run. Text from its files is escaped.

    Raises:
        RunFolderError: If a value in its events is not of the form that ``log_streaming`` writes.
    """
    from jinja2 import Environment

    try:
        template = Environment(autoescape=True).from_string(_TEMPLATE)
        text: str = template.render(
            run=run, sections=_sections(run), width=_WIDTH, height=_HEIGHT, left=_LEFT
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            "RUN: expected values in events.jsonl as log_streaming writes them, found others: "
            f"{quoted(str(error), is_bare=True)}; remove the lines that were edited"
        ) from error
    return text.encode("utf-8", "replace").decode()  # JSON can hold halves of characters


def facts(run: Run) -> dict[str, object]:
    """Sum the run up: its state, loss, time, speed, memory and check, under their names."""
    found: dict[str, object] = {"state": "has ended" if run.end is not None else "has not ended"}
    found["starts"] = len(run.starts)
    if run.logs:
        first, last = run.logs[0], run.logs[-1]
        found["steps"] = last["step"]
        found["loss"] = f"{first['loss']:.3f}, then {last['loss']:.3f}"
        found["logs whose loss is not a number"] = len(run.logs) - len(run.values("loss"))
    found["time"] = duration(sum(run.seconds))
    rates = [rate for _, rate in run.values("poros/tokens_per_s")]
    if rates:
        found["tokens per second"] = f"{statistics.median(rates):,.0f}"
    found["check of the first step"] = ((run.end or {}).get("check") or {}).get("status", "none")
    if run.damaged:
        found["damaged lines, skipped"] = ", ".join(map(str, run.damaged[:10]))
    return found


def _sections(run: Run) -> list[tuple[str, Any, str]]:
    """List for each section its title, its chart, table or list, and the text if that is empty."""
    loss = {"training": run.values("loss"), "validation": run.values("eval_loss")}
    peaks = run.values("poros/peak_gb")
    plan, budget = _newest(run, "plan") or {}, _newest(run, "budget")
    memory = {"peak so far": peaks}
    if budget and peaks:
        memory["budget"] = [(step, budget / GB) for step, _ in (peaks[0], peaks[-1])]
    step, last = run.step or {}, run.end or run.starts[-1]
    return [
        ("Summary", facts(run), ""),
        ("Loss", _chart("loss", loss), "No loss was logged that is a number."),
        ("Memory", _chart("GB", memory), "This was not measured, because there was no GPU."),
        ("Memory, planned", _planned(plan), "There is no plan: the run had no budget."),
        (
            f"Time of step {step['step']}" if step else "Time of a step",
            {name: f"{float(value):,.1f}" for name, value in step.get("times", {}).items()},
            "No step was recorded. Train with --trace-step 20 (log_streaming(trace_step=20)).",
        ),
        (
            "PCIe transfers",
            _chart("GB/s", {"copies": run.values("poros/h2d_gb_per_s")}),
            "Nothing was copied.",
        ),
        (
            "Waiting for copies",
            _chart("ms per log", {"waited for copies": run.values("poros/stall_ms")}),
            "Nothing was logged.",
        ),
        ("Counters", {name: f"{each:,}" for name, each in last.items() if "num_" in name}, ""),
        ("Fallbacks", list(last.get("fallbacks", [])), "There were none."),
        ("Versions", run.starts[-1].get("versions", {}), ""),
    ]


def _newest(run: Run, key: str) -> Any:
    return next((each[key] for each in reversed(run.logs) if each.get(key)), None)


def _planned(plan: Mapping[str, Any]) -> dict[str, str]:
    """List the terms of a plan and their sum, the largest first."""
    terms: Mapping[str, float] = plan.get("terms", {})
    found = {"together": sum(terms.values()), **terms} if terms else {}
    largest = sorted((name for name in found if found[name]), key=lambda name: -found[name])
    return {name: size(int(found[name])) for name in largest}


def _chart(unit: str, series: Mapping[str, list[tuple[float, float]]]) -> Chart | None:
    """Draw curves; None if they have no points."""
    points = [point for each in series.values() for point in each]
    if not points:
        return None
    first, last = (choose(x for x, _ in points) for choose in (min, max))
    low, high = (choose(y for _, y in points) for choose in (min, max))
    num_steps, room = max(last - first, 1), max(high - low, abs(high) * 0.01, 1e-9)

    def down(y: float) -> str:
        return f"{10 + (high - y) / room * (_HEIGHT - 10 - _BOTTOM):.1f}"

    def drawn(curve: list[tuple[float, float]]) -> str:
        places = (_LEFT + (x - first) / num_steps * (_WIDTH - _LEFT) for x, _ in curve)
        drawn = [f"{x:.1f},{down(y)}" for x, (_, y) in zip(places, curve, strict=True)]
        return " ".join([*drawn, drawn[-1]])  # a curve of one point is a dot

    values = [high - room * number / (_NUM_TICKS - 1) for number in range(_NUM_TICKS)]
    return Chart(
        unit,
        {name: drawn(each) for name, each in series.items() if each},
        [(down(value), f"{value:.4g}") for value in values],
        f"{first:g}",
        f"{last:g}",
    )
