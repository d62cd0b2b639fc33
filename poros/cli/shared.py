"""What commands share: exit codes, how errors are shown, options that several of them take."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros.errors import PorosError, quoted

if TYPE_CHECKING:
    from poros.loaders.limits import Limits

NOT_HELD = 1
BAD_INPUT = 2
"""Exit codes: something that a command claims did not hold; or what it was given cannot be used."""

LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Raise a bound on what files may ask for, by the name that an error gave.",
    ),
]


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
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)


def dtype_named(option: str, name: str | None) -> Any:
    """The floating-point dtype of that name."""
    from poros.nf4 import DTYPES

    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(DTYPES)}, found {name!r}")
    return None if name is None else DTYPES[name]


def limits_from(values: list[str] | None) -> "Limits | None":
    """From ``NAME=NUMBER``."""
    from dataclasses import fields

    from poros.loaders.limits import Limits

    if not values:
        return None
    names = {field.name for field in fields(Limits)}
    chosen: dict[str, int] = {}
    for value in values:
        name, _, number = value.partition("=")
        if name not in names or not number.isdecimal():
            raise typer.BadParameter(
                f"--limit: expected NAME=NUMBER with a name among {', '.join(sorted(names))}, "
                f"found {quoted(value)}"
            )
        chosen[name] = int(number)
    return Limits(**chosen)
