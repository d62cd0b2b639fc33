"""``poros load``: a checkpoint becomes a store on disk."""

from pathlib import Path
from typing import Annotated, Any

import typer

from poros.cli.shared import LimitOption, limits_from, quieten_libraries, readable_errors
from poros.errors import quoted


def load(
    source: Annotated[
        str, typer.Argument(help="Checkpoint folder, .safetensors file, or name on the hub.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the store to write; must not exist yet.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="nf4, fp4, or none for dense.", show_default="nf4")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of what is not quantized, or auto: what SOURCE says.", show_default="bfloat16"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to quantize.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte of the store SOURCE instead.")
    ] = False,
    limit: LimitOption = None,
) -> None:
    """Quantize a checkpoint into a store on disk, or verify one.

    `poros.load(STORE)` then opens it without quantizing again.
    """
    if verify == (out is not None):
        raise typer.BadParameter("give either --out DIR or --verify")
    options: dict[str, Any] = {"quantization": quantization, "dtype": dtype, "device": device}
    said = {name: value for name, value in options.items() if value is not None}
    if verify and said:
        raise typer.BadParameter(f"--verify takes no --{', --'.join(said)}: nothing is quantized")
    quieten_libraries()
    with readable_errors():
        if verify:
            from poros.loaders.store import open_store

            with open_store(source, verify=True, limits=limits_from(limit)) as store:
                shown = quoted(source, is_bare=True)
                typer.echo(f"{shown}: {len(store.layouts)} layers, every byte as written")
            return
        from poros.loaders.load import load as load_model

        if quantization == "none":
            said["quantization"] = None
        load_model(source, store=out, limits=limits_from(limit), **said)
        typer.echo(f"store: {out}")
