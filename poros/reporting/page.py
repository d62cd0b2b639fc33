"""Renders one self-contained HTML page about a run."""

import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from poros.reporting.charts import bars, lines, streams
from poros.reporting.events import Run, finite
from poros.utils.formatting import duration

GB = 1e9
MOST_TERMS = 6
"""Of a plan, beside the sum of the others and what was measured."""

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }}</title>
<style>
:root { --ink: #1f2933; --soft: #52606d; --page: #ffffff; --box: #f5f7fa; --rule: #cbd2d9;
  --a: #2563a8; --b: #b44d12; --c: #0c7a5a; --d: #8a3ffc; --e: #a61b5b; --f: #6b7280;
  --g: #927400; --h: #0e7490 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa5b1; --page: #171c22;
  --box: #212830; --rule: #3e4c59; --a: #7db4f0; --b: #f0a06b; --c: #5fd3b0; --d: #c4a5ff;
  --e: #ff9ccc; --f: #9aa5b1; --g: #e0c341; --h: #67d5ea } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
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
.limit { stroke: var(--e); stroke-width: 2; stroke-dasharray: 6 4 }
polyline { fill: none; stroke-width: 2 }
{% for name in 'abcdefgh' %}
.line{{ loop.index0 }} { stroke: var(--{{ name }}) }
.dot{{ loop.index0 }}, .part{{ loop.index0 }} { fill: var(--{{ name }}) }
.key{{ loop.index0 }}::before, .part-key{{ loop.index0 }}::before {
  background: var(--{{ name }}) }
{% endfor %}
{% for kind, name in kinds %}
.span-{{ kind }} { fill: var(--{{ name }}) }
.span-key-{{ kind }}::before { background: var(--{{ name }}) }
{% endfor %}
.key { display: inline-block; margin-right: 1rem; white-space: nowrap }
.key-limit::before { background: repeating-linear-gradient(90deg, var(--e) 0 4px,
  transparent 4px 6px); height: 3px !important; vertical-align: middle }
.key::before { content: ""; display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; border-radius: 2px }
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
{% if content %}{{ content }}{% else %}<p class="none">{{ without }}</p>{% endif %}
{% endfor %}
{% if run.recipe %}<h2>Recipe</h2><pre>{{ run.recipe }}</pre>{% endif %}
<p class="none">GB is 10<sup>9</sup> bytes. Written by poros {{ version }}.</p>
</body></html>
"""
_KINDS = [("forward", "a"), ("backward", "c"), ("inference", "d"), ("copy", "b"), ("head", "g")]


_TERMS = {
    "slots": "blocks",
    "kept blocks": "blocks that stay",
    "kept graphs": "kept activations",
    "boundaries": "inputs of layers",
    "workspace": "workspace of a layer",
    "recordings": "CUDA graphs",
    "dense layer": "a layer's dense weights",
    "dense weight": "one dense weight",
}
"""What terms of a plan are called here."""


def page(run: Run) -> str:
    """Render the page of a run. Text from its files is escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    sections = [(title, Markup(content), without) for title, content, without in _sections(run)]
    environment = Environment(autoescape=True)
    text: str = environment.from_string(_TEMPLATE).render(
        run=run,
        verdict=verdict(run),
        sections=sections,
        kinds=_KINDS,
        version=run.starts[-1].get("versions", {}).get("poros", "?"),
    )
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
        rates = _tokens_per_s(run)
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
    damaged = [str(number) for number in run.damaged]
    if run.is_cut:
        damaged.pop()
        parts.append("The last line of its event log was cut off and is skipped.")
    if damaged:
        lines = ", ".join(damaged[:10]) + (" and others" if len(damaged) > 10 else "")
        parts.append(f"Damaged lines of its event log that are skipped: {lines}.")
    return " ".join(parts)


def _sections(run: Run) -> list[tuple[str, str, str]]:
    evaluations = finite(run.evaluations, "eval_loss")
    curves = {"training": run.values("loss")}
    if evaluations:
        curves["validation"] = evaluations
    budget = _budget(run)
    plan = run.plan
    terms = _largest({name: size / GB for name, size in (plan or {}).get("terms", {}).items()})
    peaks = run.values("poros/peak_gb")
    memory = ""
    if terms:
        rows = [("planned", terms)]
        if peaks:
            rows.append(("measured", {"measured peak": max(y for _, y in peaks)}))
        memory = bars(rows, budget, named="budget")
    over_steps = lines({"peak so far": peaks}, "GB", limit=budget, named="budget") if peaks else ""
    rate = lines({"copies": run.values("poros/h2d_gb_per_s")}, "GB/s")
    waits = lines({"waited for copies": run.values("poros/stall_ms")}, "ms per log")
    spans = (run.step or {}).get("spans", [])
    last = run.end or run.starts[-1]
    return [
        ("Loss", lines(curves, "loss"), _without_losses(run)),
        (
            "Memory, planned and measured",
            memory,
            "There is no plan, because the run had no budget.",
        ),
        ("Memory over the run", over_steps, "This was not measured, because there was no GPU."),
        (
            f"The two streams in step {(run.step or {}).get('step', '')}",
            streams(spans),
            "No step was recorded. Train with --trace-step 3 (log_streaming(trace_step=3)).",
        ),
        ("PCIe transfers", rate, "Nothing was copied."),
        ("Waiting for copies", waits, "Nothing was logged."),
        ("Counters", _table(_counters(last)), ""),
        ("Fallbacks", _list(last.get("fallbacks", [])), "There were none."),
        ("Versions", _table(run.starts[-1].get("versions", {})), ""),
    ]


def _largest(terms: Mapping[str, float]) -> dict[str, float]:
    """Select the largest parts, each with its color; sum up the others."""
    falling = sorted(terms, key=lambda name: -terms[name])
    shown = {name: size for name, size in terms.items() if size and name in falling[:MOST_TERMS]}
    rest = sum(terms.values()) - sum(shown.values())
    named = {_TERMS.get(name, name): size for name, size in shown.items()}
    return {**named, "everything else": rest} if rest > 0 else named


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


def _without_losses(run: Run) -> str:
    return "No loss is a number." if run.logs else "No step was logged yet."


def _tokens_per_s(run: Run) -> list[float]:
    """Return tokens per second of each step after another one of the same start."""
    starts = [float(each["time"]) for each in run.starts if "time" in each]
    times = dict(finite(run.logs, "time"))
    counts = finite(run.logs, "num_tokens")
    steps = [(step, count, times[step]) for step, count in counts if step in times]
    return [
        (count - before) / (now - then)
        for (first, before, then), (second, count, now) in pairwise(steps)
        if second == first + 1
        and count > before
        and now > then
        and not any(then < start < now for start in starts)
    ]


def _counters(last: Mapping[str, Any]) -> dict[str, object]:
    known = {
        "device": "device",
        "num_loads": "copies of blocks",
        "num_hits": "blocks found in a slot",
        "num_groups": "groups of micro-batches",
        "num_replayed_visits": "layer calls replayed as CUDA graphs",
        "num_eager_visits": "layer calls without a CUDA graph",
        "num_resizes": "changes of the blocks on the GPU",
    }
    found: dict[str, object] = {text: last[key] for key, text in known.items() if key in last}
    for key, text in (("h2d_num_bytes", "copied"), ("host_num_bytes", "in host memory")):
        if key in last:
            found[text] = f"{last[key] / GB:.2f} GB"
    if "time" in last:
        found["last event"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(last["time"])))
    return found


def _table(values: Mapping[str, object]) -> str:
    from markupsafe import escape

    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in values.items()
    )
    return f'<div class="wide"><table>{rows}</table></div>' if rows else ""


def _list(values: list[object]) -> str:
    from markupsafe import escape

    return "<ul>" + "".join(f"<li>{escape(v)}</li>" for v in values) + "</ul>" if values else ""
