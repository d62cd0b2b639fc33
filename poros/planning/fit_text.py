"""A fit report as a person reads it: the verdict, a table of facts, two of comparison."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from poros.errors import quoted
from poros.figures import duration, size, two_digits
from poros.planning.fit_report import FitReport, Point
from poros.planning.remedies import format_remedies

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_REASON = 200  # characters of what the registry says


def format_report(report: FitReport) -> "Group":
    """For ``rich`` to print."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    has_budget = report.request.budget is not None
    color = ("green" if report.fits else "red") if has_budget else ""
    facts = Table.grid(padding=(0, 2))
    for name, text in facts_of(report):
        facts.add_row(Text(name, style="dim"), Text(text))
    seq_len = report.point.seq_len
    place = report.device.title if has_budget else "as little on the card as there may be"
    lengths = _table(f"over lengths of rows, with {place}", "tokens", report.lengths, seq_len)
    rates = ", at the same rates" if report.device.rates else ""
    cards = _table(f"over cards, with rows of {seq_len:,} tokens{rates}", "card", report.cards)
    return Group(Text(report.verdict, style=f"bold {color}"), "", facts, "", lengths, cards)


def facts_of(report: FitReport) -> Iterator[tuple[str, str]]:
    """What a person asks next: what each is called, and what is to be said of it."""
    point, plan, host = report.point, report.plan, report.host
    if not report.fits_device:
        yield "remedies", format_remedies(report.remedies)
    elif not report.fits_host:
        waiting = "shorter rows, fewer rows and micro-batches; " if plan.offload_boundaries else ""
        yield (
            "remedies",
            f"{waiting}part of the base on a disk: poros.load(MODEL, store=DIR, host_budget=...)",
        )
    elif host.left is not None and plan.host_num_bytes > host.left:
        yield "host memory", f"{size(host.left)} are free now"
    yield "longest rows", _longest(report)
    if point.plan is not None and point.times_checkpointed is not None:
        times = f"{point.times_checkpointed:.1f} x the time of a resident run with checkpointing"
        yield "a micro-batch", f"about {two_digits(plan.step_ms or 0.0)} ms, {times}"
    elif point.plan is not None:
        yield "a micro-batch", "no time is forecast without --card, or --measure on its machine"
    wanted = report.request.micro_batches
    if plan.micro_batches == 1 < wanted and plan.keep_last:
        yield (
            "micro-batches",
            f"the {wanted} of a step go one after the other: they have no load to share, and "
            "layers that keep their graph save each of them a recomputation",
        )
    elif plan.micro_batches < wanted and point.plan is not None:
        yield "micro-batches", f"of {wanted} {plan.micro_batches} go together; more do not fit"
    together = report.together
    if together is not None and together.plan is not None:
        yield (
            "micro-batches",
            f"with --accumulate {together.plan.micro_batches} it would be about "
            f"{two_digits(together.tokens_per_s or 0.0)} tokens/s: the link is what a step waits "
            "for",
        )
    if report.seconds is not None:
        yield f"{report.num_tokens:,} tokens", f"about {duration(report.seconds)}"
    yield (
        "everything on the card",
        f"would need {size(report.resident_num_bytes)} there, without checkpointing",
    )
    reason = quoted(report.standing.reason, is_bare=True, limit=_REASON)
    yield report.model_type, f"{report.standing.outcome} ({reason})"
    yield "a forecast", _basis(report)


def _longest(report: FitReport) -> str:
    longest, most = report.longest, report.max_seq_len
    if longest is None:
        return "give --vram or --card to hear what fits"
    if longest == 0:
        return "no length fits"
    of = f" of the {most:,} that the model takes" if most else ""
    return f"{longest:,} tokens{of}"


def _basis(report: FitReport) -> str:
    speeds = report.plan.speeds
    if speeds is None:
        return "from the model's shapes"
    return (
        f"with {report.device.rates_from}: copies at {two_digits(speeds.copy_gb_per_s)} GB/s, "
        f"products at {two_digits(speeds.tflop_per_s)} TFLOP/s"
    )


def _table(title: str, first: str, points: Sequence[Point], marked: int | None = None) -> "Table":
    """Points, a line each; the one with rows of that length in bold."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    times = ("tokens/s", "x resident") if any(point.tokens_per_s for point in points) else ()
    for heading in (first, "peak GB", "blocks on the card", "host GB", *times):
        table.add_column(heading, justify="right")
    for point in points:
        name = f"{point.seq_len:,}" if point.card_gib is None else f"{point.card_gib} GB"
        is_marked = point.seq_len == marked
        table.add_row(name, *_cells(point), style="bold" if is_marked else None)
    return table


def _cells(point: Point) -> Iterator[str]:
    plan = point.plan
    if plan is None:
        yield "does not fit"
        return
    yield f"{plan.total_num_bytes / 1e9:.1f}"
    kept = f", {plan.keep_last} kept" if plan.keep_last else ""
    yield f"{plan.num_slots} of {plan.num_blocks}{kept}"
    yield f"{plan.host_num_bytes / 1e9:.1f}" + ("" if point.fits_host else ", too much")
    if point.tokens_per_s is not None:
        yield two_digits(point.tokens_per_s)
        yield f"{point.times_resident:.2f}"
