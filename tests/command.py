"""Runs the command line in this process."""

import io
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console
from typer.testing import CliRunner, Result

from poros.cli.app import app


def poros_command(*arguments: str, columns: int | None = None) -> Result:
    """Run a command; an exception that is not an exit is raised, not swallowed."""
    environment = {} if columns is None else {"COLUMNS": str(columns)}
    result = CliRunner().invoke(app, arguments, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def text(result: Result) -> str:
    """What was printed, without the colors that some CI machines ask for."""
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def rendered(render: Callable[[Any, Console], object], report: Any) -> str:
    """What a report prints on a wide terminal."""
    console = Console(file=io.StringIO(), width=200)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
