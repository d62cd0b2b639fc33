"""The registry as a table for people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from poros.gates.registry import OUTCOMES, Record, Registry, code_hash

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"exact": "green", "failed": "bold red"}


def render(registry: Registry, console: "Console | None" = None) -> bool:
    """Print a row per record, then how many are exact, with date and versions.

    Returns:
        Whether every record still counts; one that does not is shown as stale and not counted.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    code = code_hash()
    table = Table(title="what the parity gate found")
    table.add_column("architecture or adapter", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for heading in ("steps", "elements"):
        table.add_column(heading, justify="right")
    for heading in ("date", "dtypes and dropout, or reason"):
        table.add_column(heading)
    counting: list[Record] = []
    records = [*registry.records.values(), *registry.adapters.values()]
    for record in records:
        problems = record.problems(code)
        if not problems:
            counting.append(record)
        num_steps = sum(mode["num_steps"] for mode in record.modes)
        num_elements = sum(mode.get("num_elements", 0) for mode in record.modes)
        modes = "; ".join(map(_settings, record.modes))
        table.add_row(
            escape(record.key),
            "stale" if problems else record.outcome,
            f"{num_steps}",
            f"{num_elements:,}",
            record.date,
            escape("; ".join(problems) or record.reason or modes),
            style="yellow" if problems else _STYLES.get(record.outcome),
        )
    console.print(table)
    for outcome, meaning in OUTCOMES.items():
        num_records = sum(record.outcome == outcome for record in counting)
        console.print(f"{num_records:4} {outcome:8} {meaning}", highlight=False)
    num_stale = len(records) - len(counting)
    console.print(f"{num_stale:4} stale    to be recorded again", highlight=False)
    exact = [record for record in counting if record.outcome == "exact"]
    model_types = registry.exact_model_types() & {record.model_type for record in exact}
    kinds = registry.exact_adapters() & {getattr(record, "adapter", None) for record in exact}
    console.print(
        f"[bold]{len(model_types)} exact families, {len(kinds)} exact kinds of adapters[/bold]",
        highlight=False,
        end="",
    )
    if exact:
        dates = sorted({record.date for record in exact})
        versions = sorted(
            {f"{name} {value}" for record in exact for name, value in record.versions.items()}
        )
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        console.print(f", {span}, with {', '.join(versions)}", highlight=False, end="")
    console.print()
    return not num_stale


def _settings(mode: Mapping[str, Any]) -> str:
    autocast = mode.get("autocast_dtype")
    base = "" if mode.get("quantize", True) else "dense "
    return f"{base}{mode['dtype']}{f' autocast {autocast}' if autocast else ''} {mode['dropout']}"
