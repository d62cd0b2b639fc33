"""The table of a page of ``benchmarks.rivals``, drawn anew from the raw data beside the page.

    python -m benchmarks rival_table benchmarks/results/rivals_whole_rows_h100_202611.jsonl

A row is a line of JSON, as `rivals --out` appends it. The page, the file of the same name that ends
in ``.md``, has one table; everything else in it stays.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import Summary, markdown

Row = Mapping[str, Any]
TABLE = re.compile(r"^\|.*\n(?:\|.*\n)*", re.MULTILINE)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of raw data, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def step_times(row: Row) -> list[float]:
    """Seconds of a step, from one log to the next, of the last half; each step has one, or some."""
    steps = row.get("steps") or range(len(row["times"]))
    logs = zip(row["times"], steps, strict=True)
    between = [(after - begun) / (last - first) for (begun, first), (after, last) in pairwise(logs)]
    return between[len(between) // 2 :]


def summary(row: Row) -> dict[str, Any]:
    """What is told of a run: milliseconds of a step, tokens a second, memory and losses."""
    told = {key: row[key] for key in ("arm", "length", "accumulation")}
    if "note" in row:
        return told | {"note": row["note"]}
    steps = step_times(row)
    median = statistics.median(steps)
    return told | {
        "step_ms": round(median * 1e3, 1),
        "least_ms": round(min(steps) * 1e3, 1),
        "tokens_per_s": round(row["length"] * row["accumulation"] / median),
        "peak_gb": round(row["peak_gb"], 2),
        "loaded_gb": round(row.get("loaded_gb", 0.0), 2),
        "host_gb": round(row["host_gb"], 2),
        "pinned_gb": round(row["pinned_gb"], 2),
        "first_s": round(row["times"][0] - row["began"]),
        "losses": [round(each, 4) for each in row["losses"]],
    }


def work_of(row: Row) -> tuple[Any, ...]:
    """What rows have in common whose times can be compared."""
    return row.get("lease"), row["length"], row["accumulation"]


def beside_poros(row: Row, rows: Sequence[Row]) -> str:
    """Time of a step over that of the first row of Poros with the same work in the same lease."""
    for each in rows:
        is_poros = each["arm"].startswith("poros:") and "note" not in each
        if is_poros and work_of(each) == work_of(row):
            share = statistics.median(step_times(row)) / statistics.median(step_times(each))
            return f"{share:.2f}"
    return ""


def line_of(row: Row, rows: Sequence[Row]) -> Summary:
    """A line of the table; a run that failed has its reason."""
    told = summary(row)
    cut = f", {row['layers']} layers" if "layers" in row else ""
    line = {
        "lease": row.get("lease", ""),
        "model": row.get("model", "") + cut,
        "arm": told["arm"],
        "tokens a row": f"{told['length']:,}",
        "rows a step": str(told["accumulation"]),
    }
    if "note" in told:
        return line | {"note": told["note"]}
    losses = told["losses"]
    return line | {
        "steps": str((row.get("steps") or [len(losses)])[-1]),
        "tokens/s": f"{told['tokens_per_s']:,}",
        "a step, ms (least, of)": (
            f"{told['step_ms']:,.0f} ({told['least_ms']:,.0f}, {len(step_times(row))})"
        ),
        "time beside Poros": beside_poros(row, rows),
        "peak, GB": f"{told['peak_gb']:.2f}",
        "host, GB": f"{told['host_gb']:.2f}",
        "to step 1, s": str(told["first_s"]),
        "loss, step 1": f"{losses[0]:.4f}",
        "loss, last half": f"{statistics.mean(losses[len(losses) // 2 :]):.3f}",
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [line_of(row, rows) for row in rows]
    keys = dict.fromkeys(key for line in lines for key in line if key != "note")
    return markdown([{key: line.get(key, "") for key in (*keys, "note")} for line in lines])


def redrawn(page: str, rows: Sequence[Row]) -> str:
    """The text of a page with its table drawn from the rows.

    Raises:
        SystemExit: If the page has no table, or several.
    """
    found = TABLE.findall(page)
    if len(found) != 1:
        raise SystemExit(f"expected one table in the page, found {len(found)}")
    return page.replace(found[0], table(rows) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page with its table drawn anew."""
    known = argparse.ArgumentParser(prog="benchmarks.rival_table", description=__doc__)
    known.add_argument("jsonl", type=Path)
    path = known.parse_args(arguments).jsonl
    page = path.with_suffix(".md")
    text = redrawn(page.read_text(encoding="utf-8"), read(path))
    page.write_text(text, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    sys.exit(main())
