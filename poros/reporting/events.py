"""Reads a run's event log. Lines that are damaged are skipped and reported."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poros.errors import RunFolderError, quoted, reason_of
from poros.io.reading import open_regular

Event = Mapping[str, Any]


@dataclass
class Run:
    """The events of a run.

    Attributes:
        name: Name of its folder.
        starts: One event for each time it was started.
        logs: Logs of steps, in order; if a step ran twice, the later log.
        evaluations: Evaluations, in the same way.
        end: Counters at the end of the last start, if it ended in order.
        step: The recorded step and its times (``step_times``), if one was recorded.
        damaged: Numbers of the skipped lines, which are no events.
        recipe: Text of the recipe's file, if there is one.
    """

    name: str
    starts: list[Event] = field(default_factory=list)
    logs: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    end: Event | None = None
    step: Event | None = None
    damaged: list[int] = field(default_factory=list)
    recipe: str = ""

    @property
    def plan(self) -> Event | None:
        plans = (each["plan"] for each in reversed(self.logs) if each.get("plan"))
        return next(plans, None)

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return step and value of each log with a finite number of that name."""
        return finite(self.logs, key)


def finite(events: Sequence[Event], key: str) -> list[tuple[float, float]]:
    """Return step and value of each event with a finite number of that name."""
    return [
        (float(each["step"]), float(each[key]))
        for each in events
        if isinstance(each.get(key), int | float) and math.isfinite(each[key])
    ]


def read_run(path: Path) -> Run:
    """Read the events of the run in a folder.

    Raises:
        RunFolderError: If there is no file of events, or no event in it that begins a run.
    """
    file = path / "events.jsonl"
    try:
        with open_regular(file) as stream:
            lines = stream.read().split(b"\n")
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"RUN: expected the folder of a run, which contains events.jsonl, found "
            f"{quoted(str(file), is_bare=True)}: {quoted(reason_of(error), is_bare=True)}"
        ) from error
    run = Run(path.resolve().name)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _take(run, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            run.damaged.append(number)
    if not run.starts:
        raise RunFolderError(
            f"{quoted(str(file), is_bare=True)}: expected the event log of a run, found no start "
            f"and {len(run.damaged)} damaged lines"
        )
    try:
        with open_regular(path / "recipe.yaml") as stream:
            run.recipe = stream.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        pass  # a page has its use without
    return run


def _take(run: Run, event: Event) -> None:
    kind = event["event"]
    if kind == "start":
        run.starts.append(event)
        run.end = None
    elif kind == "end":
        run.end = event
    elif kind == "step":
        run.step = {"step": int(event["step"]), "times": {**event["times"]}}
    elif kind in ("log", "evaluation"):
        into = run.logs if kind == "log" else run.evaluations
        step = int(event["step"])
        while into and into[-1]["step"] >= step:
            into.pop()  # a resumed run repeats these steps
        into.append(event)
