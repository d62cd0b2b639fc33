"""What is on record, as text for people: in a few lines, or each family whose name has a word."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from poros.errors import quoted
from poros.gates.registry import OUTCOMES, Record, Registry, code_hash

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"exact": "green", "failed": "bold red", "stale": "yellow"}
_REASON = 160  # characters of a reason that a line shows

_Found = tuple[Record, Sequence[str]]
"""A record, and why it does not count."""


def render(registry: Registry, part: str | None = None, console: "Console | None" = None) -> bool:
    """Print how many records there are and of what, or a line for each that is asked for.

    Args:
        registry: All records.
        part: Of the name of a family or of a kind of adapter; None is a summary of all.
        console: Where; None is standard output.

    Returns:
        Whether there is such a record, and all that are named still count; one that does not is
        shown as stale.
    """
    from rich.console import Console

    console = console or Console()
    code = code_hash()
    found = [
        (record, record.problems(code))
        for record in (*registry.records.values(), *registry.adapters.values())
        if part is None or part.casefold() in _name(record).casefold()
    ]
    if part is None:
        _summary(registry, found, console)
    else:
        _lines(found, part, console)
    return not any(problems for _, problems in found) and (part is None or bool(found))


def _name(record: Record) -> str:
    """What a record is looked up by: the family's names, or the kind of adapter on some family."""
    return str(getattr(record, "adapter", f"{record.name} {record.model_type}"))


def _lines(found: Sequence[_Found], part: str, console: "Console") -> None:
    if not found:
        console.print(
            f"nothing on record has {quoted(part)} in its name, so poros.prepare refuses it; if "
            "transformers knows it, `poros check --architecture NAME` tries it",
            markup=False,
            highlight=False,
        )
        return
    width = max(len(record.key) for record, _ in found)
    for record, stale in found:
        word = "stale" if stale else record.outcome
        why = "; ".join(stale) or record.reason or _measured(record)
        console.print(
            f"{record.key:{width}}  {word:8}  {quoted(why, is_bare=True, limit=_REASON)}",
            style=_STYLES.get(word),
            markup=False,
            highlight=False,
            # A line each: cut at the edge of a terminal, whole in a file.
            no_wrap=True,
            overflow="ellipsis" if console.is_terminal else "ignore",
            crop=console.is_terminal,
        )


def _summary(registry: Registry, found: Sequence[_Found], console: "Console") -> None:
    counting = [record for record, problems in found if not problems]
    stale = [record for record, problems in found if problems]
    exact = [record for record in counting if record.outcome == "exact"]
    model_types = registry.exact_model_types() & {record.model_type for record in exact}
    kinds = registry.exact_adapters() & {getattr(record, "adapter", None) for record in exact}

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False)

    say(
        f"{len(model_types)} exact families, {len(kinds)} exact kinds of adapters"
        + (f", {_span(exact)}" if exact else ""),
        "bold",
    )
    for what, names in (("families", model_types), ("kinds of adapters", kinds)):
        if names:
            say(f"exact {what}: {', '.join(sorted(str(name) for name in names))}", "green")
    for outcome, meaning in OUTCOMES.items():
        records = [record for record in counting if record.outcome == outcome]
        say(f"{len(records):4} {outcome:8} {meaning}")
        if records and outcome != "exact":
            say(f"     {', '.join(record.key for record in records)}", _STYLES.get(outcome))
    say(f"{len(stale):4} stale    to be recorded again")
    if stale:
        say(f"     {', '.join(record.key for record in stale)}", _STYLES["stale"])
    say("`poros check --registered NAME` says why")


def _span(records: Iterable[Record]) -> str:
    """When, and with which versions."""
    records = list(records)
    dates = sorted({record.date for record in records})
    versions = sorted(
        {f"{name} {value}" for record in records for name, value in record.versions.items()}
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{when}, with {', '.join(versions)}"


def _measured(record: Record) -> str:
    num_steps = sum(mode["num_steps"] for mode in record.modes)
    modes = "; ".join(map(_settings, record.modes))
    return f"{num_steps} steps, {record.date}: {modes}"


def _settings(mode: Mapping[str, Any]) -> str:
    autocast = mode.get("autocast_dtype")
    base = "" if mode.get("quantize", True) else "dense "
    return f"{base}{mode['dtype']}{f' autocast {autocast}' if autocast else ''} {mode['dropout']}"
