"""``poros plan``: what a training step will need, from ``config.json`` alone."""

import json
from typing import Annotated

import typer

from poros.cli.shared import (
    LimitOption,
    dtype_named,
    limits_from,
    quieten_libraries,
    readable_errors,
)


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder or name on the hub; only config.json is read.")
    ],
    seq: Annotated[int, typer.Option(help="Tokens per row.")],
    vram: Annotated[str | None, typer.Option(help="Budget, such as 8GiB.")] = None,
    batch: Annotated[int, typer.Option(help="Rows per micro-batch.")] = 1,
    rank: Annotated[int, typer.Option(help="Of LoRA on every linear layer of the blocks.")] = 16,
    adapter_dtype: Annotated[
        str | None,
        typer.Option(help="Of the adapters: float32, bfloat16.", show_default="what PEFT takes"),
    ] = None,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    accumulate: Annotated[
        int | None, typer.Option(help="The same, going through the blocks together.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Layers per transfer.")] = 1,
    slots: Annotated[
        int | None, typer.Option(help="Device slots.", show_default="what the budget affords")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="As TrainingArguments.optim.")
    ] = "adamw_torch_fused",
    offload_boundaries: Annotated[
        bool | None,
        typer.Option(help="Keep layer inputs in host memory.", show_default="if nothing else fits"),
    ] = None,
    stream_embedding: Annotated[
        bool | None,
        typer.Option(help="Keep the embedding in host memory.", show_default="from 16 MiB on"),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="chunked: in slices of the vocabulary; reference: the model's own.")
    ] = "chunked",
    stream_head: Annotated[
        bool | None,
        typer.Option(
            help="Keep the head in host memory.",
            show_default="if the loss is chunked, until all blocks have slots",
        ),
    ] = None,
    adapter_kernels: Annotated[
        str,
        typer.Option(help="fused: one operator a projection; exact: not of DoRA; peft: PEFT's."),
    ] = "fused",
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(help="Record and replay layers.", show_default="where there is room"),
    ] = None,
    self_check: Annotated[
        bool, typer.Option(help="Plan for the first step too, which is checked.")
    ] = True,
    copy_gb_per_s: Annotated[
        float | None, typer.Option(help="Host to device, for the forecast of time.")
    ] = None,
    tflop_per_s: Annotated[
        float | None, typer.Option(help="Of the model's products, for the forecast of time.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure these two here, on the GPU.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where to measure.", show_default="the current GPU")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    limit: LimitOption = None,
) -> None:
    """Say what a training step needs, before anything is downloaded."""
    quieten_libraries()  # what follows imports them
    from poros.planning.planner import Planner, render
    from poros.planning.request import PlanRequest, Speeds

    if (copy_gb_per_s is None) != (tflop_per_s is None):
        raise typer.BadParameter("give both --copy-gb-per-s and --tflop-per-s, or neither")
    if measure and copy_gb_per_s is not None:
        raise typer.BadParameter("give either the rates or --measure")
    if device is not None and not measure:
        raise typer.BadParameter("--device is where to --measure")
    speeds = None
    with readable_errors():
        planner = Planner(
            model,
            rank=rank,
            limits=limits_from(limit),
            adapter_dtype=dtype_named("--adapter-dtype", adapter_dtype),
        )
        if measure:
            speeds = planner.measure(seq_len=seq, batch_size=batch, device=device)
        elif copy_gb_per_s is not None and tflop_per_s is not None:
            speeds = Speeds(copy_gb_per_s, tflop_per_s)
        request = PlanRequest(
            seq_len=seq,
            batch_size=batch,
            vram_budget=vram,
            accumulation=accumulate or accumulation,
            micro_batches=accumulate or 1,
            block_size=block_size,
            num_slots=slots,
            optimizer=optimizer,
            offload_boundaries=offload_boundaries,
            stream_embedding=stream_embedding,
            loss=loss,
            stream_head=stream_head,
            adapter_kernels=adapter_kernels,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
            speeds=speeds,
        )
        estimate = planner.plan(request)
    if as_json:
        typer.echo(json.dumps(estimate.as_dict(), indent=1))
        return
    from rich.console import Console

    Console().print(render(estimate))
