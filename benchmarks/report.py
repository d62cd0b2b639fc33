"""From rows to files: the raw CSV, and a page whose every number is computed from that CSV."""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TextRow = Mapping[str, str]
Summary = dict[str, str]


def write(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    page: "Page",
) -> str:
    """Write ``path`` as CSV and the page beside it as ``.md``; returns the page's text.

    Raises:
        FileExistsError: If either is there: a result is never written over.
        ValueError: If a row has a key that is no column.
    """
    beside = path.with_suffix(".md")
    for file in (path, beside):
        if file.exists():
            raise FileExistsError(f"{file} is there already: a new measurement is a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    text = page.text(read(path), path)
    beside.write_text(text)
    return text


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Page:
    """A result page. ``summarize`` turns the rows of the CSV into lines of the table."""

    def __init__(
        self,
        title: str,
        question: str,
        command: str,
        environment: Mapping[str, str],
        procedure: str,
        limits: str,
        summarize: Callable[[Sequence[TextRow]], list[Summary]],
        has_plot: bool = False,
    ) -> None:
        self.title, self.question, self.command = title, question, command
        self.environment, self.procedure, self.limits = environment, procedure, limits
        self.summarize, self.has_plot = summarize, has_plot

    def text(self, rows: Sequence[TextRow], path: Path) -> str:
        """The page for the rows of ``path``; a plot is linked where ``benchmarks.plot`` puts it."""
        machine = "; ".join(f"{key} {value}" for key, value in self.environment.items() if value)
        parts = [
            f"# {self.title}: {rows[0]['model']}, {_base(rows[0])}, {rows[0]['layers']} layers",
            f"**Question.** {self.question}",
            f"**Machine and software.** {machine}",
            f"**Procedure.** `{self.command}`. {self.procedure}",
            markdown(self.summarize(rows)),
            *([f"![{self.title}]({path.stem}.svg)"] if self.has_plot else []),
            f"**What it does not show.** {self.limits}",
            f"Raw data: `{path.name}`. GB is 1e9 bytes.",
        ]
        return "\n\n".join(parts) + "\n"


def markdown(lines: Sequence[Summary]) -> str:
    """A table; columns that are empty in every line are left out."""
    names = [key for key in lines[0] if any(line.get(key) for line in lines)] if lines else []
    table = [names, ["---"] * len(names)]
    table += [[line.get(key, "").replace("|", "/") for key in names] for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def summarize_steps(rows: Sequence[TextRow]) -> list[Summary]:
    """One line per case of a step table."""
    first: dict[tuple[str, str, str], dict[tuple[str, str], tuple[str, str]]] = {}
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        line = _head(own[0])
        timed = [row for row in own if row["ms"]]
        if timed:
            work = (own[0]["batch"], own[0]["seq"], own[0].get("loss") or "reference")
            bits = {
                (row["pass"], row["step"]): (row["loss_bits"], row["adapters_end"]) for row in timed
            }
            line |= _times(timed) | _beside_resident(timed, rows)
            line |= _sizes(timed) | _plans(timed, rows)
            line["same bits"] = "yes" if bits == first.setdefault(work, bits) else "NO"
        line["note"] = "; ".join(dict.fromkeys(row["note"] for row in own if row["note"]))
        lines.append(line)
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "note"))
    return [{key: line.get(key, "") for key in (*keys, "note")} for line in lines]


def is_exact(rows: Sequence[TextRow]) -> bool:
    """Whether all arms on the same work, with the same loss, gave the same bits."""
    return all(line.get("same bits") != "NO" for line in summarize_steps(rows))


def numbers(rows: Sequence[TextRow], key: str) -> list[float]:
    """The values of a column that are there."""
    return [float(row[key]) for row in rows if row.get(key)]


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, p10 and p90."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return statistics.median(ordered), ordered[tenth], ordered[-1 - tenth]


def _head(row: TextRow) -> Summary:
    return {
        "arm": row["arm"],
        "batch": f"{row['batch']} x {row['seq']}",
        "slots": row["num_slots"],
        "kept": row["keep_last"],
        "block": row["block_size"],
    }


def _times(timed: Sequence[TextRow]) -> Summary:
    middle, low, high = percentiles(numbers(timed, "ms"))
    tokens = int(timed[0]["batch"]) * int(timed[0]["seq"])
    return {
        "median ms": f"{middle:.1f}",
        "p10": f"{low:.1f}",
        "p90": f"{high:.1f}",
        "tokens/s": f"{tokens / middle * 1e3:.0f}",
    }


def _resident(timed: Sequence[TextRow], rows: Sequence[TextRow]) -> list[TextRow]:
    """The timed rows of the resident arm on the same work."""
    work = (timed[0]["batch"], timed[0]["seq"])
    return [
        row
        for row in rows
        if row["arm"] == "resident" and row["ms"] and (row["batch"], row["seq"]) == work
    ]


def _beside_resident(timed: Sequence[TextRow], rows: Sequence[TextRow]) -> Summary:
    resident_ms = numbers(_resident(timed, rows), "ms")
    share = (
        statistics.median(numbers(timed, "ms")) / statistics.median(resident_ms)
        if resident_ms
        else None
    )
    return {"of resident": "" if share is None else f"{share:.3f}"}


def _sizes(timed: Sequence[TextRow]) -> Summary:
    named = {
        "peak GB": "peak_allocated",
        "requested GB": "peak_requested",
        "reserved GB": "peak_reserved",
        "process GB": "peak_process",
        "host GB": "host_rss",
        "pinned GB": "pinned_num_bytes",
    }
    summary = {name: _gb(numbers(timed, key), max) for name, key in named.items()}
    summary["moved GB"] = _gb(numbers(timed, "h2d_num_bytes"), statistics.median)
    summary["stall ms"] = _one(numbers(timed, "stall_ms"), "{:.1f}")
    summary["engine GB/s"] = _one(numbers(timed, "runtime_gb_per_s"), "{:.1f}")
    return summary


def _plans(timed: Sequence[TextRow], rows: Sequence[TextRow]) -> Summary:
    """The plan's size and time beside the measured ones, and the floor of the step's phases."""
    peaks, planned = numbers(timed, "peak_allocated"), numbers(timed, "planned_num_bytes")
    summary = {"plan GB": _gb(planned, max)}
    if planned and peaks:
        summary["plan error"] = f"{planned[0] / max(peaks) - 1:+.1%}"
    rates = numbers(timed, "copy_gb_per_s")
    resident = _resident(timed, rows)
    summary["plain GB/s"] = _one(rates, "{:.1f}")
    if not rates or not resident:
        return summary
    middle = statistics.median(numbers(timed, "ms"))
    wire = statistics.median(numbers(timed, "h2d_num_bytes")) / statistics.median(rates) / 1e6
    forward = statistics.median(numbers(resident, "forward_ms"))
    step = statistics.median(numbers(resident, "ms"))
    recomputed = 1 - float(timed[0]["keep_last"]) / float(timed[0]["layers"])
    floor = max(wire / 2, forward) + max(wire / 2, step - (1 - recomputed) * forward)
    summary |= {"floor ms": f"{floor:.1f}", "over floor": f"{middle / floor:.2f}"}
    forecast = numbers(timed, "forecast_ms")
    if forecast:
        summary["forecast ms"] = f"{forecast[0]:.1f}"
        summary["forecast error"] = f"{forecast[0] / middle - 1:+.0%}"
    return summary


def _base(row: TextRow) -> str:
    return "dense" if row["quantization"] == "none" else row["quantization"]


def _gb(values: Sequence[float], choose: Any) -> str:
    return f"{choose(values) / 1e9:.3f}" if values else ""


def _one(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else ""


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else value
