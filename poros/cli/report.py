"""``poros report``: writes a page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from poros.cli.shared import readable_errors


def report(
    run: Annotated[Path, typer.Argument(help="Folder of the run, which contains events.jsonl.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.", show_default="RUN/report.html")
    ] = None,
) -> None:
    """Write one HTML page about a run: loss, memory, compute and copies, versions."""
    with readable_errors():
        from poros.io.writing import require_file, write_text
        from poros.reporting.events import read_run
        from poros.reporting.page import page

        found = read_run(run)
        target = out or run / "report.html"
        require_file(target, "--out")
        write_text(target, page(found))
    typer.echo(f"report: {target}")
