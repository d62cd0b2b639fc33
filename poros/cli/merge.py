"""``poros merge``: merges an adapter into its base."""

from pathlib import Path
from typing import Annotated, Any

import typer

from poros.cli.imports import quick_imports
from poros.cli.shared import DtypeName, dtype_named, readable_errors


def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter or of its run.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist yet.")],
    base: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint of the base, or the store made of it.",
            show_default="the one the adapter names",
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(help="Dtype of the merged weights.", show_default="the checkpoint's"),
    ] = None,
) -> None:
    """Merge an adapter into its base and write a checkpoint, one shard at a time.

    transformers, vLLM and other tools load the result like any checkpoint.
    """
    with readable_errors():
        merge_with_bar(adapter, out, base=base, dtype=dtype_named(dtype))
    typer.echo(f"merged: {out}")


def merge_with_bar(adapter: Path, out: Path, **options: Any) -> None:
    """As ``poros.merging.merge.merge``, with a bar on a terminal."""
    from rich.progress import Progress

    with quick_imports():
        from poros.merging.merge import merge as run

    with Progress(transient=True) as bar:
        task = bar.add_task("merging", total=None)

        def show(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole)

        run(adapter, out, progress=show, **options)
