"""``poros plan``: does it fit, how long may rows be, how fast is it; from ``config.json`` alone."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from poros.cli.shapes_only import leave_out, run_whole
from poros.cli.shared import (
    NOT_HELD,
    SIZES,
    LimitOption,
    dtype_name,
    dtype_named,
    in_options,
    limits_from,
    quieten_libraries,
    readable_errors,
)
from poros.config import parse_count, parse_num_bytes
from poros.errors import UnsupportedModelError, VRAMBudgetError
from poros.loaders.names import require_source
from poros.planning.cards import CARDS, Card, find_card
from poros.planning.optimizers import optimizer_cost
from poros.planning.request import PlanRequest, Speeds, require_positive

if TYPE_CHECKING:
    from poros.planning.answer import Device, Host

_OPTIONS = {
    "source": "MODEL",
    "seq_len": "--seq",
    "vram_budget": "--vram",
    "batch_size": "--batch",
    "rank": "--rank",
    "accumulation": "--accumulation",
    "micro_batches": "--accumulate",
    "block_size": "--block-size",
    "slots": "--slots",
    "num_slots": "--slots",
    "optimizer": "--optimizer",
    "optimizer_num_bytes": "the size of its state to poros.plan, in Python",
    "offload_boundaries": "--offload-boundaries",
    "stream_embedding": "--stream-embedding",
    "stream_head": "--stream-head",
    "loss": "--loss",
    "adapter_kernels": "--adapter-kernels",
    "cuda_graphs": "--cuda-graphs",
    "share_dense": "--share-dense",
    "vision": "--vision",
    "copy_gb_per_s": "--copy-gb-per-s",
    "tflop_per_s": "--tflop-per-s",
    "device": "--device",
}
"""What the fields that messages name are called here."""


def _cards(incomplete: str) -> list[str]:
    return [name for name in CARDS if name.startswith(incomplete)]


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder or OWNER/NAME on the hub; only config.json is read.")
    ],
    seq: Annotated[int, typer.Option(help="Tokens per row.")] = 2048,
    vram: Annotated[
        str | None,
        typer.Option(help=f"Budget, such as 22GiB: {SIZES}.", show_default="the card's"),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="A card that is not here, such as rtx4090: its memory, link and rates.",
            autocompletion=_cards,
            show_default="the GPU of this machine",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help="Host memory, such as 64G.", show_default="this machine's"),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, such as 5M, for the time of all.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows per micro-batch.")] = 1,
    rank: Annotated[int, typer.Option(help="Of LoRA on every linear layer of the blocks.")] = 16,
    adapter_dtype: Annotated[
        str | None,
        typer.Option(help="Of the adapters: fp32, bf16, fp16.", show_default="what PEFT takes"),
    ] = None,
    vision: Annotated[
        str, typer.Option(help="Of towers for images: keep them, or drop them.")
    ] = "keep",
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
    share_dense: Annotated[
        bool | None,
        typer.Option(
            help="With --accumulate: one layer's weights in 16 bit, for all micro-batches.",
            show_default="where there is room",
        ),
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
    terms: Annotated[
        bool, typer.Option("--terms", help="Show the plan's memory too, term by term.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    limit: LimitOption = None,
) -> None:
    """Say whether a training step fits, how long rows may be, and how long it takes.

    Nothing is downloaded but config.json. Every figure is a forecast.

    Exit code: 0 if it fits (or no budget was given), 1 if it does not, 2 for bad input.
    """
    if (copy_gb_per_s is None) != (tflop_per_s is None):
        raise typer.BadParameter("give both --copy-gb-per-s and --tflop-per-s, or neither")
    if measure and copy_gb_per_s is not None:
        raise typer.BadParameter("give either the rates or --measure")
    if measure and card is not None:
        raise typer.BadParameter("give either --card, for a card that is not here, or --measure")
    if device is not None and not measure:
        raise typer.BadParameter("--device is where to --measure")
    dtype_name("--adapter-dtype", adapter_dtype)
    with readable_errors(_OPTIONS):
        bounds = limits_from(limit)
        require_source(model, "MODEL")
        require_positive("rank", rank)
        chosen = None if card is None else find_card(card)
        given = None if copy_gb_per_s is None else Speeds(copy_gb_per_s, tflop_per_s or 0.0)
        host_num_bytes = None if ram is None else parse_num_bytes(ram, "--ram")
        num_tokens = None if tokens is None else parse_count(tokens, "--tokens")
        request = PlanRequest(
            seq_len=seq,
            batch_size=batch,
            vram_budget=vram if chosen is None or vram is not None else chosen.budget,
            accumulation=accumulate or accumulation,
            micro_batches=1 if accumulate is None else accumulate,
            block_size=block_size,
            num_slots=slots,
            optimizer=optimizer,
            offload_boundaries=offload_boundaries,
            stream_embedding=stream_embedding,
            loss=loss,
            stream_head=stream_head,
            adapter_kernels=adapter_kernels,
            cuda_graphs=cuda_graphs,
            share_dense=share_dense,
            self_check=self_check,
            library_num_bytes=None if chosen is None else chosen.library_num_bytes,
            speeds=given,
        )
        optimizer_cost(request, ())  # refused here if nobody knows it
    quieten_libraries()
    from rich.console import Console

    # Imports and plans take seconds; nothing is shown where nobody watches.
    with readable_errors(_OPTIONS), Console(stderr=True).status("planning"):
        is_light = not measure and leave_out()
        try:
            from poros.planning.answer import answer
            from poros.planning.answer_text import render
            from poros.planning.planner import Planner
            from poros.planning.planner import render as render_terms

            planner = Planner(
                model,
                rank=rank,
                limits=bounds,
                adapter_dtype=dtype_named("", adapter_dtype),
                vision=vision,
            )
            if measure:
                given = planner.measure(seq_len=seq, batch_size=batch, device=device)
            request, place = _place(request, chosen, given, "measured" if measure else "given")
            found = answer(planner, request, place, _host(host_num_bytes), num_tokens)
        except (UnsupportedModelError, ImportError, AttributeError, RuntimeError) as error:
            if not is_light or isinstance(error, VRAMBudgetError):
                raise
            raise typer.Exit(run_whole()) from error
    found = replace(found, advice=in_options(found.advice, _OPTIONS))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        console = Console()
        render(found, console)
        if terms:
            console.print(render_terms(found.plan))
    raise typer.Exit(0 if found.fits else NOT_HELD)


def _place(
    request: PlanRequest, card: Card | None, given: Speeds | None, how: str
) -> "tuple[PlanRequest, Device]":
    """The request with a budget, and what it is for: a card by name, the GPU here, or a budget.

    Args:
        request: With a budget, if ``--vram`` or ``--card`` said one.
        card: If one was named.
        given: Rates, if they were given or measured.
        how: Which of the two.
    """
    from poros.planning.answer import Device

    title = None
    if card is None and request.vram_budget is None:
        budget, title, card = _gpu_here()
        request = replace(request, vram_budget=budget)
    elif card is not None:
        title = f"an {card.title}" + ("" if "GB" in card.title else f" ({card.memory_gib} GB)")
        if request.budget != card.budget:
            title = f"{_size(request)} of {title}"
    title = title or ("a card" if request.vram_budget is None else f"your {_size(request)}")
    if given is not None:
        speeds = given

        def rates(num_tokens: int) -> Speeds:
            return speeds

        return request, Device(title, rates, f"rates {how} for rows of {request.seq_len} tokens")
    if card is not None:
        return request, Device(title, card.speeds, f"the published rates of an {card.title}")
    return request, Device(title)


def _gpu_here() -> tuple[int | None, str | None, Card | None]:
    """What ``poros.prepare`` would take of this machine's GPU, its name, and whether it is known.

    Nothing, if there is no GPU.
    """
    import torch

    from poros.errors import PolicyError
    from poros.planning.cards import budget_of

    if not torch.cuda.is_available():
        return None, None, None
    free, whole = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    try:
        known = find_card(name)
    except PolicyError:
        known = None
    return budget_of(free, whole), f"this machine's {name}", known


def _size(request: PlanRequest) -> str:
    budget = request.vram_budget
    return budget if isinstance(budget, str) else f"{(request.budget or 0) / 2**30:.1f} GiB"


def _host(num_bytes: int | None) -> "Host":
    """The host memory that was said, or this machine's."""
    from poros.host.limits import host_memory, host_memory_left
    from poros.planning.answer import Host

    if num_bytes is not None:
        return Host(num_bytes)
    left = host_memory_left()
    return Host(host_memory(), None if left is None else left.num_bytes)
