"""An answer as a person reads it: the verdict, what stands behind it, and two tables."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from poros.errors import quoted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from poros.planning.answer import Answer, Point

_REASON = 200  # characters of what the registry says


def verdict(answer: "Answer") -> str:
    """One sentence: whether it fits, with what on the card and the host, and how fast it is."""
    plan, title = answer.plan, answer.device.title
    parts = [_on_card(answer.point), _host_memory(answer)]
    if answer.request.budget is None:
        needed = f"Needs {_gb(plan.total_num_bytes)} on the card at the least"
        return _sentence(needed, [*parts, _rate(answer.point)])
    if not answer.fits_device:
        return (
            f"Does not fit {title}: the step needs {_gb(plan.total_num_bytes)} at the least, and "
            f"training may have {_gb(answer.request.budget)}."
        )
    if not answer.fits_host:
        return _sentence(f"Fits {title}, but not the host memory", parts)
    return _sentence(f"Fits {title}", [*parts, _rate(answer.point)])


def facts(answer: "Answer") -> Iterator[str]:
    """What a person asks next, a line each."""
    if not answer.fits_device:
        yield from answer.advice.splitlines()
    elif not answer.fits_host:
        if answer.plan.offload_boundaries:
            yield (
                "Inputs of layers wait in host memory: shorter rows, --batch and --accumulate make "
                "them fewer."
            )
        yield (
            "Of the base a part can stay on a disk: poros.load(MODEL, store=DIR, host_budget=...)."
        )
    elif answer.host.left is not None and answer.plan.host_num_bytes > answer.host.left:
        yield f"Of this host memory {_gb(answer.host.left)} are free now."
    yield from _longest(answer)
    if answer.point.plan is not None:
        yield from _time(answer)
    yield (
        f"A run with everything on the card would need {_gb(answer.resident_num_bytes)} there, "
        "without checkpointing."
    )
    reason = quoted(answer.standing.reason, is_bare=True, limit=_REASON)
    yield f"{answer.model_type}: {answer.standing.word} ({reason})."
    yield f"All of this is a forecast{_basis(answer)}."


def render(answer: "Answer", console: "Console") -> None:
    """Print the verdict, the facts, and the tables."""
    color = "green" if answer.fits else "red"
    style = "bold" if answer.request.budget is None else f"bold {color}"
    console.print(verdict(answer), style=style, highlight=False, markup=False)
    for line in facts(answer):
        console.print(line, highlight=False, markup=False)
    console.print()
    place = f"on {answer.device.title}"
    if answer.request.budget is None:
        place = "with as little on the card as there may be"
    lengths = _table(f"over lengths of rows, {place}", answer.lengths, "tokens")
    for point in answer.lengths:
        is_asked = point.seq_len == answer.point.seq_len
        lengths.add_row(f"{point.seq_len:,}", *_cells(point), style="bold" if is_asked else None)
    console.print(lengths)
    rates = ", at the same rates" if answer.device.rates else ""
    title = f"over cards, with rows of {answer.point.seq_len:,} tokens{rates}"
    cards = _table(title, answer.cards, "card")
    for point in answer.cards:
        cards.add_row(f"{point.card_gib} GB", *_cells(point))
    console.print(cards)


def _table(title: str, points: "Sequence[Point]", first: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column(first, justify="right")
    for heading in ("peak GB", "blocks on the card", "host GB"):
        table.add_column(heading, justify="right")
    if any(point.tokens_per_s for point in points):
        for heading in ("tokens/s", "x resident"):
            table.add_column(heading, justify="right")
    return table


def _cells(point: "Point") -> list[str]:
    plan = point.plan
    if plan is None:
        return ["does not fit"]
    blocks = f"{plan.num_slots} of {plan.num_blocks}"
    if plan.keep_last:
        blocks += f", {plan.keep_last} kept"
    host = f"{plan.host_num_bytes / 1e9:.1f}" + ("" if point.fits_host else ", too much")
    cells = [f"{plan.total_num_bytes / 1e9:.1f}", blocks, host]
    if point.tokens_per_s is not None:
        cells += [_about(point.tokens_per_s), f"{point.times_resident:.2f}"]
    return cells


def _sentence(begin: str, parts: Sequence[str]) -> str:
    return f"{begin}: {', '.join(part for part in parts if part)}."


def _on_card(point: "Point") -> str:
    plan = point.plan
    if plan is None:
        return ""
    if plan.num_slots < plan.num_blocks:
        return f"{plan.num_slots} of {plan.num_blocks} blocks stay on the card"
    kept = f", {plan.keep_last} layers are not recomputed" if plan.keep_last else ""
    return f"all {plan.num_blocks} blocks stay on the card{kept}"


def _host_memory(answer: "Answer") -> str:
    needed, whole = f"{_gb(answer.plan.host_num_bytes, 0)} of host memory", answer.host.whole
    if whole is None:
        return needed
    between = "of" if answer.fits_host else "where there are"
    return f"{needed} {between} {whole / 1e9:.0f}"


def _rate(point: "Point") -> str:
    if point.tokens_per_s is None:
        return ""
    return (
        f"about {_about(point.tokens_per_s)} tokens/s, {point.times_resident:.1f} x the time of a "
        "resident run"
    )


def _longest(answer: "Answer") -> Iterator[str]:
    longest = answer.longest
    if longest is None:
        yield "Give --vram or --card to hear what fits."
    elif longest == answer.max_seq_len:
        yield f"Rows of up to {longest:,} tokens fit, which is all that the model takes."
    elif longest:
        limit = f" (the model takes {answer.max_seq_len:,})" if answer.max_seq_len else ""
        yield f"The longest rows that fit have {longest:,} tokens{limit}."
    else:
        yield "No length of rows fits."


def _time(answer: "Answer") -> Iterator[str]:
    point, plan = answer.point, answer.plan
    if point.tokens_per_s is None or point.times_checkpointed is None:
        yield "Time is not forecast: give --card, or --measure on the machine with the card."
        return
    yield (
        f"A micro-batch takes about {_about(plan.step_ms or 0.0)} ms: "
        f"{point.times_checkpointed:.1f} x the time of a resident run with checkpointing."
    )
    wanted = answer.request.micro_batches
    if plan.micro_batches == 1 < wanted and plan.keep_last:
        yield (
            f"The {wanted} micro-batches of a step go one after the other: they have no load to "
            "share, and layers that keep their graph save each of them a recomputation."
        )
    elif plan.micro_batches < wanted:
        yield f"Of {wanted} micro-batches {plan.micro_batches} go together; more do not fit."
    if answer.hours is not None and answer.num_tokens is not None:
        yield f"{_count(answer.num_tokens)} tokens take about {_hours(answer.hours)}."
    other = answer.together
    if other is not None and other.plan is not None and other.tokens_per_s is not None:
        yield (
            "The link is what a step waits for: with --accumulate "
            f"{other.plan.micro_batches} it would be about {_about(other.tokens_per_s)} tokens/s."
        )


def _basis(answer: "Answer") -> str:
    speeds = answer.plan.speeds
    if speeds is None:
        return ", from the model's shapes"
    return (
        f", with {answer.device.rates_from}: copies at {_about(speeds.copy_gb_per_s)} GB/s, "
        f"products at {_about(speeds.tflop_per_s)} TFLOP/s"
    )


def _gb(num_bytes: int, digits: int = 1) -> str:
    return f"{num_bytes / 1e9:.{digits}f} GB"


def _about(value: float) -> str:
    """Two digits: a forecast has no more."""
    if value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return str(number)


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(60 * hours))} minutes"
    if hours < 48:
        return f"{_about(hours)} hours"
    return f"{_about(hours)} hours ({hours / 24:.1f} days)"
