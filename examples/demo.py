"""The demo: ``poros finetune`` on real text, offline, in a few minutes on two CPU cores.

It makes a checkpoint and rows (``poros.examples.demo_data``), and trains an adapter as ``poros
finetune`` does, once streamed and once with the whole base on the device: the losses of all steps
and the bytes of both adapters have to be the same.
"""

from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.config import MIN_SLOTS
from poros.examples.demo_data import ModelSize, write_base, write_rows
from poros.io.writing import require_empty_folder
from poros.reporting.events import Run, read_run
from poros.utils.devices import default_device, usable_device
from poros.utils.formatting import size as shown_size

if TYPE_CHECKING:
    from rich.console import Console

MIN_LOSS_DROP = 0.1
"""In nats per token. A tenth of a nat less is a perplexity lower by a tenth."""


@dataclass(frozen=True)
class DemoReport:
    """What the demo found; ``passed`` is its result."""

    streamed: Run
    """The run whose base lies in host memory."""
    resident: Run
    """The same with the whole base on the device."""
    has_same_adapter: bool
    """Whether both have left the same bytes."""

    @property
    def is_exact(self) -> bool:
        """Whether both runs have the same losses and the same adapter, bit for bit."""
        return losses(self.streamed) == losses(self.resident) and self.has_same_adapter

    @property
    def has_learned(self) -> bool:
        """Whether the loss fell clearly on rows that were not trained on."""
        before, after = held_out(self.streamed)
        return after <= before - MIN_LOSS_DROP

    @property
    def passed(self) -> bool:
        """Whether every claim of the demo held."""
        return self.is_exact and self.has_learned


def losses(run: Run) -> list[float]:
    """Return the loss of each step."""
    return [each["loss"] for each in run.logs]


def held_out(run: Run) -> tuple[float, float]:
    """Return the loss on rows that are not trained on, before and after."""
    first, *_, last = [each["eval_loss"] for each in run.evaluations]
    return first, last


def run_demo(
    out_dir: Path,
    *,
    num_steps: int = 30,
    size: ModelSize | None = None,
    device: str | None = None,
    console: "Console | None" = None,
) -> DemoReport:
    """Run the demo and write everything it makes to ``out_dir``.

    Args:
        out_dir: Folder to write to; made if it is not there, and has to be empty.
        num_steps: Optimizer steps of the fine-tuning.
        size: Of the model; None is the default.
        device: ``"cpu"`` or ``"cuda"``; None is the GPU if there is one.
        console: Where to tell what happens; None is standard output.

    Returns:
        The report. A claim that does not hold is in it rather than raised.

    Raises:
        MissingPackageError: If the packages of ``poros finetune`` are not there.
        PorosError: If the folder is not empty, the device is not there, or Python was installed
            without its documentation topics.
    """
    from rich.console import Console

    from poros.recipes.checks import require_packages

    console, size = console or Console(), size or ModelSize()
    device = usable_device(device or default_device()).type
    require_packages()
    require_empty_folder(out_dir, "out")
    base, rows = out_dir / "base", out_dir / "rows.jsonl"
    write_base(base, write_rows(rows), size)
    adapters = {}
    for name in ("streamed", "resident"):
        console.rule(f"fine-tuning, {name}", align="left")
        adapters[name] = _train(out_dir / name, base, rows, num_steps, size, device, console)
    is_same = adapters["streamed"] == adapters["resident"]
    report = DemoReport(read_run(out_dir / "streamed"), read_run(out_dir / "resident"), is_same)
    render(report, console)
    return report


def _train(
    folder: Path,
    base: Path,
    rows: Path,
    num_steps: int,
    size: ModelSize,
    device: str,
    console: "Console",
) -> bytes:
    """Train as ``poros finetune`` does, and return the adapter; its output goes to a file."""
    from rich.console import Console

    from poros.finetune.data import read_data
    from poros.finetune.run import finetune
    from poros.recipes.checks import checked
    from poros.recipes.reading import read_recipe

    on_cpu = device == "cpu"
    settings: dict[str, Any] = {
        "model.source": base,
        # Few CPUs have fast bf16. On a GPU the other attention kernels add up in any order in
        # backward, and two runs differ.
        **({"model.dtype": "float32"} if on_cpu else {"model.attention": "eager"}),
        "data.source": rows,
        "data.validation": 0.02,
        "adapter.lora_dropout": 0.05,
        "training.learning_rate": 5e-3,
        "training.max_steps": num_steps,
        "training.max_length": size.num_tokens,
        "training.packing": False,
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": 1,
        "training.eval_on_start": True,
        "training.eval_steps": num_steps,
        "memory.device": device,
        "output.folder": folder,
        # On a large GPU a small model would not stream unless it is told to.
        **({"memory.resident": True} if folder.name == "resident" else {"memory.slots": MIN_SLOTS}),
    }
    recipe = checked(read_recipe(None, {key: str(value) for key, value in settings.items()}))
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log, redirect_stdout(log):
        # It takes the log for a terminal, so that there is a progress bar.
        printed = Console(file=log, force_terminal=True, color_system=None, width=100)
        adapter = finetune(recipe, *read_data(recipe), printed)
    console.print(f"{adapter}; its summary: {log.name}", markup=False, highlight=False)
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def render(report: DemoReport, console: "Console") -> None:
    """Print the summary of a demo."""
    from rich.table import Table

    table = Table("", "streamed", "resident", title="poros demo")
    runs = (report.streamed, report.resident)
    table.add_row("first loss", *(f"{losses(each)[0]:.9f}" for each in runs))
    table.add_row("last loss", *(f"{losses(each)[-1]:.9f}" for each in runs))
    for place, when in enumerate(("before", "after")):
        table.add_row(f"held-out loss {when}", *(f"{held_out(each)[place]:.4f}" for each in runs))
    for key, name in (("device_num_bytes", "layers on the device"), ("host_num_bytes", "in host")):
        table.add_row(name, *(shown_size((each.end or {}).get(key, 0)) for each in runs))
    console.print(table)
    failed = [] if report.is_exact else ["streamed and resident runs differ"]
    if not report.has_learned:
        failed.append(f"the held-out loss did not fall by {MIN_LOSS_DROP} or more")
    number = len(losses(report.streamed))
    passed = f"PASSED: the losses of {number} steps and the adapters are the same to the last bit"
    verdict = "FAILED: " + "; ".join(failed) if failed else passed
    console.print(verdict, style="bold red" if failed else "green", highlight=False)
