"""``poros tune-paths``: measures which order of LoRA's products is fastest on this machine."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from poros.cli.shared import DtypeName, dtype_named, quieten_libraries, readable_errors


def tune_paths(
    model: Annotated[str, typer.Argument(help="Folder or OWNER/NAME; only config.json is read.")],
    tokens: Annotated[list[int], typer.Option(help="Tokens of a micro-batch; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Table to write, for lora_paths='measured:TABLE'.")],
    rank: Annotated[int, typer.Option(help="LoRA rank, on every linear layer.")] = 16,
    quantization: Annotated[
        str, typer.Option(help="Quantization of the base: nf4 or none.")
    ] = "nf4",
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the base: bf16, fp16, fp32.")] = "bf16",
    adapter_dtype: Annotated[
        DtypeName, typer.Option(help="Dtype of the adapters: bf16, fp16, fp32.")
    ] = "fp32",
    dropout: Annotated[bool, typer.Option(help="Measure with dropout.")] = False,
    passes: Annotated[
        int, typer.Option(help="Passes to time; the table has their median.", min=1)
    ] = 10,
    device: Annotated[
        str | None, typer.Option(help="Device to measure on.", show_default="the GPU")
    ] = None,
) -> None:
    """Measure the orders of LoRA's matrix products for each layer shape of a model."""
    quieten_libraries()
    base, own = dtype_named(dtype), dtype_named(adapter_dtype)
    with readable_errors():
        import torch
        from peft import LoraConfig
        from peft.tuners.lora import Linear, Linear4bit

        from poros.io.writing import require_file, write_json
        from poros.kernels.paths import TABLE_FORMAT, LoraShape
        from poros.kernels.tuning import measure
        from poros.planning.meta_model import Recipe
        from poros.planning.request import require_positive
        from poros.utils.devices import default_device, usable_device

        for number in (rank, *tokens):
            require_positive("rank and tokens", number)
        require_file(out, "--out")
        place = default_device() if device is None else usable_device(device)
        adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        kind = None if quantization == "none" else quantization
        made = Recipe.of(model, kind, base, adapters, adapter_dtype=own).make()
        has_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        layers = {
            (each.in_features, each.out_features, isinstance(each, Linear4bit))
            for each in made.modules()
            if isinstance(each, Linear | Linear4bit)
        }
        rows: list[dict[str, Any]] = []
        for columns, height, is_4bit in sorted(layers):
            # An evaluation between steps has no dropout.
            for number, drops in product(sorted(set(tokens)), sorted({False, dropout})):
                shape = LoraShape(
                    number, columns, height, rank, base, own, drops, is_4bit, has_tf32
                )
                rows.append(measure(shape, place, passes))
                typer.echo(f"{shape}: {rows[-1]['order']}")
        name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
        facts = {"format": TABLE_FORMAT, "device": name, "torch": torch.__version__, "rows": rows}
        write_json(out, facts)
