"""Assembles the commands."""

import os
from typing import Annotated

import typer

from poros.cli import chat, check, demo, finetune, load, merge, plan, report
from poros.cli.shared import quieten_libraries

app = typer.Typer(
    help="Fine-tune adapters exactly on models that do not fit on the GPU.",
    no_args_is_help=True,
)


def main() -> None:
    """Run the command line.

    A layer's work for several micro-batches is queued at once, and more of it than CUDA has room
    for by default: the host would wait for the device, and later the device for the host. CUDA
    reads how much room it is to have as a process begins to use it.
    """
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from poros import __version__

        typer.echo(f"poros {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    quieten_libraries()


app.command(context_settings={"token_normalize_func": finetune.known_option})(finetune.finetune)
_COMMANDS = (plan.plan, report.report, chat.chat, merge.merge, load.load, check.check, demo.demo)
for _command in _COMMANDS:
    app.command()(_command)
