"""The events of a run, read back; whatever a kill has cut off is left out, and said."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poros.errors import RunFolderError, quoted

Event = Mapping[str, Any]


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        name: Of its folder.
        starts: One for each time it was started.
        logs: Of steps, in order; of a step that ran twice, the later.
        evaluations: Likewise.
        step: The recorded step, if one was.
        end: The last one's counters, if it has ended in order.
        is_cut: Whether the last line was cut off.
        recipe: As it was written, if there is one.
    """

    name: str
    starts: list[Event] = field(default_factory=list)
    logs: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    step: Event | None = None
    end: Event | None = None
    is_cut: bool = False
    recipe: str = ""

    @property
    def plan(self) -> Event | None:
        """The estimate that the run went by, the latest."""
        plans = (each["plan"] for each in reversed(self.logs) if each.get("plan"))
        return next(plans, None)

    def values(self, key: str) -> list[tuple[float, float]]:
        """Step and value of each log that has a finite number of that name."""
        return finite(self.logs, key)


def finite(events: Sequence[Event], key: str) -> list[tuple[float, float]]:
    """Step and value of each event that has a finite number of that name."""
    return [
        (float(each["step"]), float(each[key]))
        for each in events
        if isinstance(each.get(key), int | float) and math.isfinite(each[key])
    ]


def read_run(path: Path) -> Run:
    """The events of the run in a folder.

    Raises:
        RunFolderError: If there are none, or a line is none.
    """
    file = path / "events.jsonl"
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise RunFolderError(
            f"RUN: expected the folder of a run, with events.jsonl, found "
            f"{quoted(str(path), is_bare=True)}: {error.strerror or error}"
        ) from error
    run = Run(path.resolve().name)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                run.is_cut = True
                break
            raise RunFolderError(
                f"{file}:{number}: expected an event in JSON, found "
                f"{quoted(line[:60].decode('utf-8', 'replace'))}; remove the line"
            ) from error
        _take(run, kind, event)
    if not run.starts:
        raise RunFolderError(f"{file}: expected the events of a run, found none that begins it")
    recipe = path / "recipe.yaml"
    if recipe.is_file():
        run.recipe = recipe.read_text(encoding="utf-8", errors="replace")
    return run


def _take(run: Run, kind: object, event: Event) -> None:
    if kind == "start":
        run.starts.append(event)
        run.end = None
    elif kind == "step":
        run.step = event
    elif kind == "end":
        run.end = event
    elif kind in ("log", "evaluation"):
        into = run.logs if kind == "log" else run.evaluations
        while into and into[-1]["step"] >= event["step"]:
            into.pop()  # a run that went on has done these steps again
        into.append(event)
