"""Holds the result of a parity check, as a record for machines and as a table for people."""

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import quoted
from poros.io.writing import write_text
from poros.self_check.compare import Difference
from poros.utils.versions import library_versions

if TYPE_CHECKING:
    from rich.console import Console

# A run that goes wrong early differs everywhere; the first differences are the ones that tell why.
_MAX_DIFFERENCES = 50


@dataclass
class ComparisonStats:
    """How one quantity compared, over all steps and parameters."""

    num_tensors: int = 0
    num_elements: int = 0
    num_differing_tensors: int = 0
    num_differing_elements: int = 0


@dataclass
class ParityReport:
    """The outcome of one parity check."""

    subject: str
    """What was checked: an architecture's name or a checkpoint's folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything that a repetition needs."""
    tallies: dict[str, ComparisonStats] = field(default_factory=dict)
    """Statistics of each compared quantity, in the order of the comparison."""
    differences: list[Difference] = field(default_factory=list)
    """The first differences; ``num_differences`` counts all of them."""
    num_differences: int = 0
    error: str | None = None
    """Why the comparison is incomplete or proves nothing; None otherwise."""
    traceback: str | None = None
    """The traceback behind ``error``, when an exception is behind it."""
    resident_repeats: bool | None = None
    """Whether a second resident run equalled the first; None when not tried. It is tried only after
    a difference: False means that this machine does not repeat its own results."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Counters of the streamed arm's runtime after its run."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, device and settings that bits can depend on."""

    @property
    def exact(self) -> bool:
        """True when the comparison is complete and not one bit differs."""
        return self.error is None and not self.num_differences and bool(self.tallies)

    def add(self, quantity: str, num_elements: int, difference: Difference | None) -> None:
        tally = self.tallies.setdefault(quantity, ComparisonStats())
        tally.num_tensors += 1
        tally.num_elements += num_elements
        if difference is None:
            return
        tally.num_differing_tensors += 1
        tally.num_differing_elements += difference.num_differing or 0
        self.num_differences += 1
        if len(self.differences) < _MAX_DIFFERENCES:
            self.differences.append(difference)

    def verdict(self) -> str:
        """Say the result in one line."""
        if self.exact:
            num_elements = sum(tally.num_elements for tally in self.tallies.values())
            return f"EXACT: {self.subject}: 0 differing bits in {num_elements:,} compared elements"
        if self.error is not None:
            return f"FAILED: {self.subject}: {self.error}"
        first = f"{self.num_differences:,} tensors differ; first: {self.differences[0]}"
        if self.resident_repeats is False:
            return (
                f"UNDECIDED: {self.subject}: two resident runs differ from each other on this "
                f"machine, so a difference says nothing about streaming; {first}"
            )
        return f"DIFFERENT: {self.subject}: {first}"

    def write(self, path: str | Path) -> None:
        """Write the report to ``path`` as JSON; a reader sees the old file or all of the new."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"exact": self.exact, "verdict": self.verdict(), **asdict(self)}
        write_text(path, json.dumps(values, indent=1, default=str) + "\n")


def environment(device: torch.device) -> dict[str, Any]:
    """Return what bits can depend on: versions, device, instruction set, thread count."""
    on_cuda = device.type == "cuda"
    libraries = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
    return {
        "versions": {"python": platform.python_version(), **library_versions(*libraries)},
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


def render(report: ParityReport, console: "Console | None" = None) -> None:
    """Print a table with a row per compared quantity, and the verdict."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()

    def line(text: str) -> str:
        parts = (quoted(part, is_bare=True, limit=4000) for part in text.split("\n"))
        return escape("\n".join(parts))

    table = Table(title=line(f"resident against streamed: {report.subject}"))
    table.add_column("quantity", no_wrap=True)
    for heading in ("tensors", "elements", "differing\ntensors", "differing\nelements"):
        table.add_column(heading, justify="right")
    for quantity, tally in report.tallies.items():
        numbers = (f"{number:,}" for number in vars(tally).values())
        table.add_row(quantity, *numbers, style="red" if tally.num_differing_tensors else "green")
    if report.tallies:
        console.print(table)
    if report.stats:
        counters = ", ".join(f"{name} {value}" for name, value in report.stats.items())
        console.print(line(f"streamed: {counters}"), highlight=False)
    style = "bold green" if report.exact else "bold red"
    console.print(line(report.verdict()), style=style, highlight=False)
