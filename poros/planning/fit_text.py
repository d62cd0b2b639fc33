"""Formats a fit report for people: verdict, advice, and figures as tables."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from poros.errors import quoted
from poros.planning.fit_report import FitReport
from poros.utils.formatting import duration, size, two_digits

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_FIGURES = {
    "longest_seq_len": "longest rows that fit, in tokens",
    "max_seq_len": "longest rows of the model, in tokens",
    "step_ms": "time of a micro-batch, in ms",
    "times_checkpointed": "x the time with gradient checkpointing",
    "hours": "time for all tokens",
    "resident_num_bytes": "a resident run needs",
    "ram_left_num_bytes": "free host memory",
    "forecast": "forecast from",
    "copy_gb_per_s": "PCIe copies, in GB/s",
    "tflop_per_s": "matrix products, in TFLOP/s",
}
_OF_SCENARIOS = {
    "total_num_bytes": "peak GB",
    "num_slots": "blocks",
    "keep_last": "not recomputed",
    "host_num_bytes": "host GB",
    "tokens_per_s": "tokens/s",
    "times_resident": "x resident",
    "fits": "fits",
}
"""What values of ``as_dict`` are called."""


def format_report(report: FitReport, *, with_terms: bool = False) -> "Group":
    """Format a report for ``rich``; unknown figures are left out.

    Args:
        report: What is said of a step.
        with_terms: Show the plan's memory term by term too.
    """
    from rich.console import Group
    from rich.text import Text

    values = report.as_dict()
    color = "" if report.request.budget is None else "green" if report.fits else "red"
    outcome, reason = report.record
    figures = {title: _text(name, values[name]) for name, title in _FIGURES.items()}
    figures[report.model_type] = f"{outcome} ({quoted(reason, is_bare=True)})"
    parts: list[Any] = [
        Text(report.verdict, style=f"bold {color}"),
        *map(Text, report.advice.splitlines()),
        "\nAll figures are forecasts:\n",
        _figures(figures),
        "\nBy row length:",
        _comparison("tokens", "seq_len", values["lengths"]),
        f"By card memory, with rows of {report.scenario.seq_len:,} tokens:",
        _comparison("card GiB", "card_gib", values["cards"]),
    ]
    if with_terms:
        terms = {name: _text("num_bytes", each) for name, each in values["terms"].items()}
        parts += ["Memory on the card:\n", _figures(terms)]
    return Group(*parts)


def _figures(values: Mapping[str, str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for title, text in values.items():
        if text:
            table.add_row(Text(title), Text(text))
    return table


def _comparison(title: str, first: str, scenarios: Sequence[Mapping[str, Any]]) -> "Table":
    """Make a table of scenarios, a line each, by one of their values."""
    from rich import box
    from rich.table import Table

    known = {
        name: title
        for name, title in _OF_SCENARIOS.items()
        if any(scenario[name] is not None for scenario in scenarios)
    }
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in (title, *known.values()):
        table.add_column(heading, justify="right")
    for scenario in scenarios:
        cells = (
            f"{scenario[name] / 1e9:.1f}"
            if name.endswith("num_bytes") and scenario[name] is not None
            else _text(name, scenario[name])
            for name in (first, *known)
        )
        table.add_row(*cells)
    return table


def _text(name: str, value: Any) -> str:
    """Format a figure in the unit that its name implies."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("num_bytes"):
        return size(value)
    if name == "hours":
        return duration(3600 * value)
    if isinstance(value, float):
        return f"{value:.2f}" if name.startswith("times") else two_digits(value)
    return f"{value:,}" if isinstance(value, int) else quoted(value, is_bare=True)
