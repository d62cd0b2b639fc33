"""Renders one self-contained HTML page about a run."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from poros.errors import RunFolderError, quoted
from poros.reporting.charts import lines
from poros.reporting.events import Run, finite
from poros.utils.formatting import duration

GB = 1e9

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }}</title>
<style>
:root { color-scheme: light dark; --soft: GrayText;
  --box: color-mix(in srgb, CanvasText 5%, Canvas);
  --rule: color-mix(in srgb, CanvasText 20%, Canvas);
  --a: #3f82c8; --b: #cc6a2c; --c: #189970; --e: #d04a8c }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.verdict { background: var(--box); border-left: 4px solid var(--c); padding: .75rem 1rem;
  border-radius: 4px }
figure { margin: 0; background: var(--box); padding: .75rem; border-radius: 6px; overflow-x: auto }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font-size: 13px }
figcaption { color: var(--soft); font-size: .9rem }
.unit { float: right }
.grid { stroke: var(--rule); stroke-width: 1 }
.limit { color: var(--e); stroke: var(--e); stroke-width: 2; stroke-dasharray: 6 4 }
.k0 { color: var(--a) } .k1 { color: var(--b) }
circle { fill: currentColor }
polyline { fill: none; stroke: currentColor; stroke-width: 2 }
i { font-style: normal }
.key { display: inline-block; margin-right: 1rem; white-space: nowrap }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid var(--rule); padding: .25rem .5rem; text-align: left;
  overflow-wrap: anywhere }
td + td { text-align: right }
.wide { overflow-x: auto }
pre { background: var(--box); padding: .75rem; border-radius: 6px; overflow-x: auto }
.none { color: var(--soft) }
@media (max-width: 34rem) { body { padding: .75rem } figure { padding: .5rem }
  svg text { font-size: 17px } }
@media print { figure { break-inside: avoid } }
</style></head><body>
<h1>{{ run.name }}</h1>
<p class="verdict">{{ verdict }}</p>
{% for title, content, without in sections %}
<h2>{{ title }}</h2>
{% if not content %}<p class="none">{{ without }}</p>
{% elif content is string %}{{ content }}
{% elif content is mapping %}<div class="wide"><table>
{% for name, value in content.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table></div>
{% else %}<ul>{% for each in content %}<li>{{ each }}</li>{% endfor %}</ul>
{% endif %}
{% endfor %}
{% if run.recipe %}<h2>Recipe</h2><pre>{{ run.recipe }}</pre>{% endif %}
<p class="none">GB is 10<sup>9</sup> bytes. Written by poros {{ version }}.</p>
</body></html>
"""


def page(run: Run) -> str:
    """Render the page of a run. Text from its files is escaped.

    Raises:
        RunFolderError: If a value in its events is not of the form that ``log_streaming`` writes.
    """
    from jinja2 import Environment

    try:
        text: str = (
            Environment(autoescape=True)
            .from_string(_TEMPLATE)
            .render(
                run=run,
                verdict=verdict(run),
                sections=_sections(run),
                version=run.starts[-1].get("versions", {}).get("poros", "?"),
            )
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            "RUN: expected values in events.jsonl as log_streaming writes them, found others: "
            f"{quoted(str(error), is_bare=True)}; remove the lines that were edited"
        ) from error
    return text.encode("utf-8", "replace").decode()  # JSON can hold halves of characters


def verdict(run: Run) -> str:
    """Summarize the run in a few sentences."""
    parts = []
    if run.logs:
        first, last = run.logs[0], run.logs[-1]
        state = "ended after" if run.end is not None else "has done"
        parts.append(f"The run {state} {last['step']} steps.")
        parts.append(f"Its loss went from {first['loss']:.3f} to {last['loss']:.3f}.")
        num_lost = len(run.logs) - len(run.values("loss"))
        if num_lost:
            steps = "1 step" if num_lost == 1 else f"{num_lost} steps"
            parts.append(f"The loss of {steps} is not a number.")
        seconds = sum(_seconds(run))
        if seconds:
            parts.append(f"It took {duration(seconds)}.")
        rates = [rate for _, rate in run.values("poros/tokens_per_s")]
        if rates:
            parts.append(f"It trained on {statistics.median(rates):,.0f} tokens per second.")
    else:
        parts.append("The run has logged no step yet.")
    peaks = run.values("poros/peak_gb")
    if peaks:
        parts.append(f"The peak of GPU memory was {max(y for _, y in peaks):.2f} GB.")
    if len(run.starts) > 1:
        parts.append(f"It was started {len(run.starts)} times.")
    check = (run.end or {}).get("check") or {}
    if check.get("status") == "passed":
        parts.append("Its first step was checked and gave the bits of a resident run.")
    elif check.get("status"):
        parts.append(f"The status of its first step's check is {check['status']}.")
    if run.damaged:
        lines = ", ".join(map(str, run.damaged[:10]))
        lines += " and others" if len(run.damaged) > 10 else ""
        parts.append(f"Damaged lines of its event log that are skipped: {lines}.")
    return " ".join(parts)


def _sections(run: Run) -> list[tuple[str, Any, str]]:
    """List for each section its title, its chart, table or list, and the text if that is empty."""
    curves = {"training": run.values("loss"), "validation": finite(run.evaluations, "eval_loss")}
    budget = _budget(run)
    peaks = run.values("poros/peak_gb")
    memory = _memory(run, peaks, budget)
    step, last = run.step or {}, run.end or run.starts[-1]
    no_loss = "No loss is a number." if run.logs else "No step was logged yet."
    found: list[tuple[str, Any, str]] = [
        ("Loss", lines({name: each for name, each in curves.items() if each}, "loss"), no_loss),
        ("Memory, planned and measured", memory, "There is no plan: the run had no budget."),
        (
            "Memory over the run",
            lines({"peak so far": peaks}, "GB", limit=budget, named="budget") if peaks else "",
            "This was not measured, because there was no GPU.",
        ),
        (
            f"Time of step {step['step']}" if step else "Time of a step",
            {name: f"{float(value):,.1f}" for name, value in step.get("times", {}).items()},
            "No step was recorded. Train with --trace-step 20 (log_streaming(trace_step=20)).",
        ),
        (
            "PCIe transfers",
            lines({"copies": run.values("poros/h2d_gb_per_s")}, "GB/s"),
            "Nothing was copied.",
        ),
        (
            "Waiting for copies",
            lines({"waited for copies": run.values("poros/stall_ms")}, "ms per log"),
            "Nothing was logged.",
        ),
        ("Counters", _counters(last), ""),
        ("Fallbacks", list(last.get("fallbacks", [])), "There were none."),
        ("Versions", run.starts[-1].get("versions", {}), ""),
    ]
    return [
        (title, Markup(content) if isinstance(content, str) else content, without)
        for title, content, without in found
    ]


def _memory(run: Run, peaks: list[tuple[float, float]], budget: float | None) -> dict[str, str]:
    """List the terms of the plan, the largest first, and the measured peak."""
    terms: Mapping[str, float] = (run.plan or {}).get("terms", {})
    if not terms:
        return {}
    found = {
        name: f"{terms[name] / GB:.3f} GB"
        for name in sorted(terms, key=lambda name: -terms[name])
        if terms[name]
    }
    found["planned, together"] = f"{sum(terms.values()) / GB:.3f} GB"
    if peaks:
        found["measured peak"] = f"{max(y for _, y in peaks):.3f} GB"
    if budget is not None:
        found["budget"] = f"{budget:.3f} GB"
    return found


def _budget(run: Run) -> float | None:
    budgets = (each["budget"] for each in reversed(run.logs) if each.get("budget"))
    budget = next(budgets, (run.plan or {}).get("vram_budget"))
    return budget / GB if isinstance(budget, int | float) else None


def _seconds(run: Run) -> list[float]:
    """Return the seconds of each start, from its beginning to its last event."""
    times = [float(each["time"]) for each in (*run.starts, *run.logs) if "time" in each]
    begins = sorted(float(each["time"]) for each in run.starts if "time" in each)
    found = []
    for place, begin in enumerate(begins):
        end = begins[place + 1] if place + 1 < len(begins) else float("inf")
        found.append(max((t for t in times if begin <= t < end), default=begin) - begin)
    return found


def _counters(last: Mapping[str, Any]) -> dict[str, object]:
    """Return what ``Runtime.stats`` counts, under its names, and when."""
    found: dict[str, object] = {
        name: f"{value:,}"
        for name, value in last.items()
        if name.startswith("num_") or name.endswith("num_bytes")
    }
    if "time" in last:
        found["last event"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(last["time"])))
    return found
