"""Runs the command line, in this process or in one of its own."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner, Result

from poros.cli.app import app
from tests.children import run_python

SLOW = (  # to import
    *("torch", "numpy", "transformers", "peft", "bitsandbytes", "huggingface_hub"),
    *("datasets", "trl"),
)

# Runs commands one after the other in one process, and says after each what came in.
_RUNNER = f"""
import json, os, sys
from typer.testing import CliRunner
from poros.cli.app import app, main
os.chdir(sys.argv[1])
os.environ["HF_HUB_OFFLINE"] = "1"
for arguments in json.loads(sys.argv[2]):
    result = CliRunner().invoke(app, arguments, env={{"COLUMNS": "400"}})
    slow = sorted(set({SLOW!r}) & set(sys.modules))
    print(json.dumps([result.exit_code, result.output, slow]), flush=True)
"""


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


def run_apart(commands: list[str], cwd: Path) -> list[tuple[int, str, list[str]]]:
    """Exit code, output and slow modules after each command, in a process of their own."""
    done = run_python(_RUNNER, str(cwd), json.dumps([each.split() for each in commands]))
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
