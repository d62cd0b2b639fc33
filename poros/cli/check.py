"""``poros check``: compares a resident and a streamed run, or lists recorded results."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from poros.cli.imports import quick_imports
from poros.cli.shared import NOT_HELD, readable_errors
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.errors import UnsupportedModelError, quoted
from poros.io.writing import require_file

_POLICY = StreamingPolicy()


def check(
    model_dir: Annotated[
        Path | None,
        typer.Argument(
            help="Checkpoint folder to check; with --registered, a part of a name.",
            show_default=False,
        ),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Check a small random model of this architecture, such as qwen2."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Kind of adapter to check, such as vera.", show_default="lora"),
    ] = None,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered",
            help="List the recorded results of earlier checks, or those whose name contains "
            "MODEL_DIR. Checks nothing.",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of optimizer steps.", show_default="20; 3 for a checkpoint"
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(help="Device slots: blocks on the GPU at a time.")
    ] = _POLICY.slots or MIN_SLOTS,
    block_size: Annotated[int, typer.Option(help="Layers per transfer.")] = _POLICY.block_size,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the report to.")] = None,
) -> None:
    """Train resident and streamed from the same bytes on this machine and compare every bit.

    Exit code: 0 if no bit differs, 1 if one does (with --registered: if no record has the name), 2
    for bad input.
    """
    if registered:
        if architecture is not None or adapter is not None:
            what = "--registered lists recorded results and takes only a part of a name"
            raise typer.BadParameter(what)
        _list_registered(None if model_dir is None else str(model_dir))
    if (model_dir is None) == (architecture is None):
        raise typer.BadParameter("give either MODEL_DIR or --architecture NAME")
    with readable_errors():
        # Inside the gate, an invalid policy would count as a failure of streaming.
        StreamingPolicy(slots=slots, block_size=block_size)
        if model_dir is not None and not (model_dir / "config.json").is_file():
            raise UnsupportedModelError(
                "MODEL_DIR: expected a checkpoint folder with a config.json, found none at "
                f"{quoted(str(model_dir), is_bare=True)}; to check an architecture instead of a "
                "checkpoint, use `poros check --architecture NAME`"
            )
        if out is not None:
            require_file(out, "--out")

    with quick_imports():
        from poros.gates import parity
        from poros.gates.report import render

    given = {"num_steps": steps, "adapter": adapter}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings |= {"slots": slots, "block_size": block_size}
    with readable_errors():
        if model_dir is not None:
            report = parity.check_model_dir(model_dir, **settings)
        else:
            report = parity.check_architecture(str(architecture), **settings)
        render(report)
        if out is not None:
            report.write(out)
            typer.echo(f"report: {out}")
    raise typer.Exit(0 if report.exact else NOT_HELD)


def _list_registered(part: str | None) -> NoReturn:
    from poros.gates.registry import read_registry

    with readable_errors():
        lines = list(read_registry().lines(part))
    for line in lines:
        typer.echo(line)
    if not lines:
        typer.echo(
            f"no record has {quoted(part)} in its name, so it is untested: it trains with a "
            "warning and the check of the first step; if transformers knows it, `poros check "
            "--architecture NAME` checks it"
        )
    raise typer.Exit(0 if lines else NOT_HELD)
