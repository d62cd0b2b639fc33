"""What the demo found: the result, its record as JSON, and the summary for a person."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import quoted
from poros.examples.demo_data import LESSON
from poros.examples.demo_picture import BOTH, RESIDENT, STREAMED, draw
from poros.examples.demo_training import Run
from poros.kernels.nf4 import part_tensors

if TYPE_CHECKING:
    from rich.console import Console

    from poros.gates.report import ParityReport
    from poros.self_check.compare import Difference

# In nats per token. A tenth of a nat less is a perplexity lower by a tenth.
MIN_LOSS_DROP = 0.1


@dataclass
class DemoReport:
    """What the demo found; ``passed`` is its result.

    Attributes:
        files: What was written, by name.
        parity: The gate's report.
        logits_difference: First difference between the streamed model's held-out logits and those
            of the reloaded resident model; None when there is none.
        num_logits: Number of logits compared.
        completions: The line that a model says to each question of the lesson, greedily:
            ``streamed``, ``resident``, and ``base``, which has no adapter.
        same_tokens: Whether streamed and resident said the same tokens.
        runs: The fine-tuning, ``streamed``, and its first steps once more, ``resident``.
        resident_num_bytes: Frozen bytes of all decoder layers, as they lie on the device in the
            resident model.
        stats: The runtime's counters after the fine-tuning, and its shape.
        loss_before: Mean loss before fine-tuning, by part: ``train``, ``held_out``.
        loss_after: The same after it.
        phase_s: Wall time of each phase in seconds.
    """

    device: str
    files: dict[str, Path]
    parity: "ParityReport | None" = None
    logits_difference: "Difference | None" = None
    num_logits: int = 0
    completions: dict[str, list[str]] = field(default_factory=dict)
    same_tokens: bool = False
    runs: dict[str, Run] = field(default_factory=dict)
    resident_num_bytes: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    loss_before: dict[str, float] = field(default_factory=dict)
    loss_after: dict[str, float] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_differing(self) -> int:
        """Differing elements in the gate and between the streamed and the reloaded logits."""
        tallies = self.parity.tallies.values() if self.parity else ()
        in_logits = self.logits_difference.num_differing if self.logits_difference else 0
        return sum(tally.num_differing_elements for tally in tallies) + (in_logits or 0)

    @property
    def same_outputs(self) -> bool:
        """Whether the reloaded resident model gave the streamed model's logits and tokens."""
        return self.num_logits > 0 and self.logits_difference is None and self.same_tokens

    @property
    def same_losses(self) -> bool:
        """Whether each step that a resident model did as well had the same loss, bit for bit."""
        streamed, resident = (self.runs.get(name, Run()) for name in ("streamed", "resident"))
        num_steps = len(resident.losses)
        return num_steps > 0 and streamed.losses[:num_steps] == resident.losses

    @property
    def loss_fell(self) -> bool:
        """Whether fine-tuning lowered the loss clearly on every part."""
        return bool(self.loss_before) and all(
            self.loss_after.get(part, loss) <= loss - MIN_LOSS_DROP
            for part, loss in self.loss_before.items()
        )

    @property
    def passed(self) -> bool:
        """Whether every claim of the demo held."""
        exact = self.parity is not None and self.parity.exact
        return exact and self.same_outputs and self.same_losses and self.loss_fell

    def record(self) -> dict[str, Any]:
        """Return the report as plain values that JSON can hold."""
        return {
            **vars(self),
            "passed": self.passed,
            "num_differing": self.num_differing,
            "same_outputs": self.same_outputs,
            "same_losses": self.same_losses,
            "runs": {
                name: {**vars(run), "median_ms": run.median_ms} for name, run in self.runs.items()
            },
            "loss_fell": self.loss_fell,
            "files": {name: str(path) for name, path in self.files.items()},
            "parity": None if self.parity is None else self.parity.record(),
            "logits_difference": self.logits_difference and self.logits_difference.record(),
        }


def frozen_layer_num_bytes(model: torch.nn.Module) -> int:
    """Count the frozen bytes of the decoder layers: weights, buffers, and all 4-bit constants.

    Args:
        model: A resident model with adapters and NF4 weights with double quantization; its decoder
            layers are numbered modules.
    """
    num_bytes = 0
    for name, module in model.named_modules():
        if not any(part.isdigit() for part in name.split(".")):
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.requires_grad:
                continue
            parts = part_tensors(name, tensor, with_constants=True)
            num_bytes += sum(part.nbytes for part in parts.values())
    return num_bytes


def render(report: DemoReport, console: "Console | None" = None) -> None:
    """Print the summary of a demo."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    table = Table(title="poros demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    stats = report.stats
    exact = report.parity is not None and report.parity.exact
    table.add_row(
        "differing elements", _colored(str(report.num_differing), exact and report.same_outputs)
    )
    outputs = f"identical: {report.num_logits:,} logits bit for bit, and the same tokens"
    if not report.num_logits:
        outputs = "not compared"
    elif not report.same_outputs:
        outputs = f"DIFFERENT: {escape(str(report.logits_difference or 'generated tokens'))}"
    table.add_row("reloaded adapter", _colored(outputs, report.same_outputs))
    if stats:
        streamed = stats["device_num_bytes"]
        table.add_row(
            "frozen layer bytes on device",
            f"resident {_megabytes(report.resident_num_bytes)} ({stats['num_blocks']} blocks), "
            f"streamed {_megabytes(streamed)} ({stats['num_slots']} slots): "
            f"{report.resident_num_bytes / streamed:.1f} times less",
        )
        table.add_row("frozen layer bytes in host memory", _megabytes(stats["host_num_bytes"]))
        visits = f"{stats['num_loads']:,} loads, {stats['num_hits']:,} found in their slot"
        table.add_row("block visits", visits)
    if len(report.runs) == 2:
        table.add_row("time of a step", _step_times(report))
    for part, before in report.loss_before.items():
        after = report.loss_after.get(part, float("nan"))
        fell = after <= before - MIN_LOSS_DROP
        name = f"{part.replace('_', '-')} loss"
        table.add_row(name, _colored(f"{before:.4f} before, {after:.4f} after", fell))
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.phase_s.items())
    table.add_row("time", f"{sum(report.phase_s.values()):.1f} s on {report.device}: {times}")
    for name, path in report.files.items():
        table.add_row(name, escape(quoted(str(path), is_bare=True, limit=1000)))
    console.print(table)
    if len(report.runs) == 2:
        _show_curves(report, console)
    if report.completions:
        _show_lines(report, console)
    verdict = "PASSED" if report.passed else "FAILED: " + "; ".join(_failures(report))
    console.print(_colored(escape(verdict), report.passed), highlight=False)


def _step_times(report: DemoReport) -> str:
    streamed, resident = (report.runs[name].median_ms for name in ("streamed", "resident"))
    return (
        f"streamed {streamed:.0f} ms, resident {resident:.0f} ms: {streamed / resident:.2f} times "
        "as long. Streaming recomputes each layer in backward; this model is too small for its "
        "times to predict those of a large one"
    )


def _show_curves(report: DemoReport, console: "Console") -> None:
    """The losses of both runs, and what the marks mean."""
    streamed, resident = (report.runs[name].losses for name in ("streamed", "resident"))
    equal = "the same to the last bit" if report.same_losses else "NOT the same"
    console.print("\nloss of each step", style="bold")
    console.print(draw(streamed, resident), markup=False, highlight=False)
    console.print(
        f"{STREAMED} streamed, {RESIDENT} resident, {BOTH} both: {len(resident)} of the "
        f"{len(streamed)} steps also ran resident, with losses {equal}\n",
        markup=False,
        highlight=False,
    )


def _show_lines(report: DemoReport, console: "Console") -> None:
    """What the model says to the questions of the lesson, without its adapter and with it."""
    names = ("base", "streamed")
    for (question, expected), *said in zip(
        LESSON, *(report.completions[name] for name in names), strict=True
    ):
        lines = {"before": said[0], "after": said[1]}
        if said[1] != expected:
            lines["to learn"] = expected
        console.print(question, style="bold", highlight=False)
        for name, line in lines.items():
            console.print(f"{name:>10}: {line or '(blanks alone)'}", markup=False, highlight=False)


def _failures(report: DemoReport) -> list[str]:
    if report.parity is None or not report.parity.exact:
        return ["streamed and resident training were not shown to be equal; the demo stopped there"]
    failures = []
    if not report.same_outputs:
        failures.append("the reloaded resident model gives other outputs")
    if not report.same_losses:
        failures.append("a resident run has other losses")
    if not report.loss_fell:
        failures.append(f"a loss did not fall by {MIN_LOSS_DROP} or more")
    return failures


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _colored(text: str, good: bool) -> str:
    return f"[{'green' if good else 'bold red'}]{text}[/]"
