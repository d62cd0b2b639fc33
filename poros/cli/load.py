"""``poros load``: quantizes a checkpoint into a store on disk."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from poros.cli.imports import quick_imports
from poros.cli.shared import DtypeName, dtype_name, readable_errors
from poros.errors import PolicyError, quoted
from poros.loaders.names import require_source

_OPTIONS = {"source": "SOURCE", "store": "--out"}


def load(
    source: Annotated[
        str,
        typer.Argument(help="Checkpoint folder, .safetensors file, or OWNER/NAME on the hub."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the store: a new one, or the store of this checkpoint."),
    ] = None,
    quantization: Annotated[
        Literal["nf4", "fp4", "none"] | None,
        typer.Option(
            help="4-bit format: nf4, fp4, or none to keep the base dense.", show_default="nf4"
        ),
    ] = None,
    dtype: Annotated[
        Literal[DtypeName, "float64", "auto"] | None,
        typer.Option(
            help="Dtype of the tensors that are not quantized: bf16, fp16, fp32, or auto for "
            "the dtype of SOURCE.",
            show_default="bf16",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device that quantizes.", show_default="the GPU, or the CPU")
    ] = None,
    vision: Annotated[
        Literal["keep", "drop"] | None,
        typer.Option(help="Vision towers: keep or drop them.", show_default="keep"),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check every byte of the store SOURCE instead of writing one."
        ),
    ] = False,
) -> None:
    """Quantize a checkpoint into a store on disk, or verify a store.

    `poros.load(STORE)` opens the store without quantizing again.
    """
    if verify == (out is not None):
        raise typer.BadParameter("give either --out DIR or --verify")
    named = None if dtype is None else dtype_name(dtype)
    options: dict[str, Any] = {"quantization": quantization, "dtype": named, "device": device}
    options["vision"] = vision
    given = {name: value for name, value in options.items() if value is not None}
    if verify and given:
        raise typer.BadParameter(f"--verify takes no --{', --'.join(given)}: nothing is quantized")
    with readable_errors(_OPTIONS):
        require_source(source, "SOURCE")
        if out is not None and out.is_file():
            raise PolicyError(f"--out: expected a new folder, found the file {quoted(str(out))}")
        if verify:
            from poros.loaders.store import open_store

            with open_store(source) as store:
                store.verify()
                shown = quoted(source, is_bare=True)
                typer.echo(f"{shown}: {len(store.manifest.slabs)} layers, every byte is as written")
            return
        with quick_imports():
            from poros.loaders.load import load as load_model

        if quantization == "none":
            given["quantization"] = None
        load_model(source, store=out, **given)
        typer.echo(f"store: {out}")
