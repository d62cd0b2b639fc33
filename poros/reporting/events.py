"""Reads a run's event log. Lines that are damaged are skipped and reported."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poros.errors import RunFolderError, quoted, reason_of
from poros.io.reading import open_regular

Event = Mapping[str, Any]
_NO_EVENT = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
)


@dataclass
class Run:
    """The events of a run.

    Attributes:
        name: Name of its folder.
        starts: One event for each time it was started.
        seconds: For each start, the time from its beginning to its last event.
        logs: Logs of steps, in order; if a step ran twice, the later log.
        evaluations: Evaluations, in the same way.
        end: Counters at the end of the last start, if it ended in order.
        step: The recorded step and its times (``step_times``), if one was recorded.
        damaged: Numbers of the skipped lines, which are no events.
        recipe: Text of the recipe's file, if there is one.
    """

    name: str
    starts: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    logs: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    end: Event | None = None
    step: Event | None = None
    damaged: list[int] = field(default_factory=list)
    recipe: str = ""

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return step and value of each log and evaluation with a finite number of that name."""
        return [
            (float(each["step"]), float(each[key]))
            for each in (*self.logs, *self.evaluations)
            if isinstance(each.get(key), int | float) and math.isfinite(each[key])
        ]


def read_run(path: Path) -> Run:
    """Read the events of the run in a folder.

    Raises:
        RunFolderError: If there is no file of events, or no event in it that begins a run.
    """
    file = path / "events.jsonl"
    shown = quoted(str(file), is_bare=True)
    try:
        with open_regular(file) as stream:
            lines = stream.read().split(b"\n")
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"RUN: expected the folder of a run, which contains events.jsonl, found {shown}: "
            f"{reason_of(error)}"
        ) from error
    run = Run(path.resolve().name)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                _take(run, json.loads(line))
            except _NO_EVENT:
                run.damaged.append(number)
    if not run.starts:
        raise RunFolderError(
            f"{shown}: expected the event log of a run, found no start and {len(run.damaged)} "
            "damaged lines"
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
        run.seconds.append(0.0)
        run.end = None
        return
    run.seconds[-1] = float(event["time"]) - float(run.starts[-1]["time"])
    if kind == "end":
        run.end = event
    elif kind == "step":
        run.step = {"step": int(event["step"]), "times": {**event["times"]}}
    elif kind in ("log", "evaluation"):
        into = run.logs if kind == "log" else run.evaluations
        step = int(event["step"])
        while into and into[-1]["step"] >= step:
            into.pop()  # a resumed run repeats these steps
        into.append(event)
