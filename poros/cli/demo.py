"""``poros demo``: shows the whole of Poros on a small model."""

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from poros.cli.shared import NOT_HELD, readable_errors
from poros.io.writing import require_empty_folder


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="New or empty folder to write to.", show_default="a temporary folder"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of fine-tuning steps.", show_default="30")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Device: cpu or cuda.", show_default="cuda if available"),
    ] = None,
) -> None:
    """Fine-tune a small model on real text, offline, streamed and resident, and compare the bits.

    Exit code: 0 if no bit differs and the loss fell, 1 if not, 2 for bad input.
    """
    with readable_errors():
        if out is not None:
            require_empty_folder(out, "--out")
    from poros.examples.demo import run_demo

    given: dict[str, Any] = {} if steps is None else {"num_steps": steps}
    with readable_errors():
        out_dir = out or Path(tempfile.mkdtemp(prefix="poros-demo-"))
        report = run_demo(out_dir, **given, device=device)
    raise typer.Exit(0 if report.passed else NOT_HELD)
