"""What stands behind commands of ``poros.cli``: the gates, and how errors are shown.

Whatever is slow to import is imported inside the function that needs it.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from poros.errors import PorosError, quoted
from poros.output import require_file

NOT_HELD = 1
BAD_INPUT = 2
"""Exit codes: something that a command claims did not hold; or what it was given cannot be used."""


def list_registered() -> NoReturn:
    """Print what is on record, and say by the exit code whether it is fresh."""
    from poros.gates.registry import read_registry
    from poros.gates.registry_table import render

    with readable_errors():
        raise typer.Exit(0 if render(read_registry()) else NOT_HELD)


def record(architecture: str, adapter: str | None) -> NoReturn:
    """Check in every mode of the registry, and write the record there."""
    from poros.gates.registry import read_registry
    from poros.gates.report import render
    from poros.gates.sweep import make_record

    quieten_libraries()
    with readable_errors():
        record = make_record(architecture, adapter=adapter, on_report=render)
        # Read after the runs: another command may have recorded something meanwhile.
        read_registry().including(record).write()
    typer.echo(f"recorded: {record.key} {record.outcome} {record.reason or ''}".rstrip())
    raise typer.Exit(0 if record.outcome == "exact" else NOT_HELD)


def fuzz(minutes: float, seed: int, out: Path | None) -> NoReturn:
    """Draw training programs for so long, and report how they ended."""
    from rich.console import Console

    from poros.gates.fuzz import campaign

    quieten_libraries()
    with readable_errors():
        if out is not None:
            require_file(out, "--out")
        tally = campaign.fuzz(minutes, seed)
    Console().print(campaign.render(tally))
    if out is not None:
        with readable_errors():
            campaign.write(tally, out)
        typer.echo(f"report: {out}")
    raise typer.Exit(NOT_HELD if tally.ends["failed"] else 0)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print an error that Poros raises on purpose as one message, without a traceback."""
    try:
        yield
    except (PorosError, OSError) as error:
        # Paths that a user gave may hold anything, and so may what a system or a library says.
        lines = (quoted(line, is_bare=True, limit=4000) for line in str(error).split("\n"))
        typer.echo("error: " + "\n".join(lines), err=True)
        raise typer.Exit(BAD_INPUT) from error


def quieten_libraries() -> None:
    """Silence what no reader of these commands can act on.

    Without an optional package bitsandbytes warns that it uses its own CPU kernel, and PEFT asks
    transformers for a property by the name it had before.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
