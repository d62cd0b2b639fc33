"""``poros plan``: forecasts memory and time of a training step from ``config.json`` alone."""

import atexit
import gc
import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from poros.cli.imports import quick_imports
from poros.cli.shared import (
    NOT_HELD,
    DtypeName,
    dtype_named,
    field_and_value,
    readable_errors,
    with_options,
)
from poros.config import parse_num_bytes
from poros.loaders.names import require_source
from poros.planning.cards import Card, card_of, find_card
from poros.planning.request import PlanRequest, optimizer_cost, require_positive

if TYPE_CHECKING:
    from poros.planning.report import Device

_OPTIONS = {
    "source": "MODEL",
    "seq_len": "--seq",
    "vram_budget": "--vram",
    "batch_size": "--batch",
    "micro_batches": "--accumulate",
    "accumulation": "--accumulate",
}
"""Options of fields that have another name."""
_VALUES = {"true": True, "false": False, "none": None}


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder or OWNER/NAME on the hub; only config.json is read.")
    ],
    seq: Annotated[
        int | None, typer.Option(help="Tokens per row.", show_default="2048, or the model's most")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            help="GPU memory budget, such as 22GiB: 24GiB is 24 x 2^30 bytes, 24G and 24GB are "
            "24 x 10^9.",
            show_default="the card's",
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            help="Card to plan for, such as rtx4090, by its published memory, link and rates.",
            show_default="the GPU of this machine",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help="Host memory, such as 64G.", show_default="this machine's"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Micro-batch size: rows per micro-batch.")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank, on every linear layer of the blocks.")] = 16,
    adapter_dtype: Annotated[
        DtypeName | None,
        typer.Option(help="Dtype of the adapters: fp32, bf16, fp16.", show_default="PEFT's choice"),
    ] = None,
    vision: Annotated[
        Literal["keep", "drop"], typer.Option(help="Vision towers: keep or drop them.")
    ] = "keep",
    accumulate: Annotated[
        int,
        typer.Option(help="Gradient accumulation: micro-batches per step, which share each block."),
    ] = 1,
    other: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set another field of poros.plan, such as loss=reference, slots=4, "
            "stream_embedding=true, self_check=false; may be repeated.",
        ),
    ] = None,
    terms: Annotated[
        bool, typer.Option("--terms", help="Also print the memory term by term.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Forecast whether a training step fits, the longest rows that fit, and the time of a step.

    Only config.json is downloaded. Every figure is a forecast.

    Exit code: 0 if it fits (or no budget was given), 1 if it does not, 2 for bad input.
    """
    with readable_errors(_OPTIONS):
        require_source(model, "MODEL")
        require_positive("rank", rank)
        chosen = None if card is None else find_card(card)
        host_num_bytes = None if ram is None else parse_num_bytes(ram, "--ram")
        fields = {
            "vram_budget": vram if chosen is None or vram is not None else chosen.budget,
            "accumulation": accumulate,
            "micro_batches": accumulate,
            "self_check": True,
            "library_num_bytes": None if chosen is None else chosen.library_num_bytes,
            **dict(map(_field, other or ())),
        }
        tokens = 2048 if seq is None else seq
        request = PlanRequest.of(seq_len=tokens, batch_size=batch, **fields)
        optimizer_cost(request, ())  # raises here if the optimizer is unknown
    from rich.console import Console

    is_alone = "torch" not in sys.modules
    # Imports and plans take seconds. Without a terminal, the status shows nothing.
    with readable_errors(_OPTIONS), Console(stderr=True).status("planning"):
        with quick_imports():
            from poros.host.limits import host_memory
            from poros.planning.planner import Planner
            from poros.planning.report import fit_report, format_report

        if is_alone:
            # This process ends before there is garbage. Looking for it takes a third of the time.
            gc.disable()
            atexit.register(gc.freeze)
        planner = Planner(
            model,
            rank=rank,
            adapter_dtype=dtype_named(adapter_dtype),
            vision=vision,
        )
        if seq is None:
            request = request.override(seq_len=min(tokens, planner.max_seq_len or tokens))
        request, place = _place(request, chosen)
        report = fit_report(planner, request, place, host_num_bytes or host_memory())
        report["advice"] = with_options(report["advice"], _OPTIONS)
    if request.seq_len < tokens:
        typer.echo(f"rows of {request.seq_len} tokens, the model's positions (--seq)", err=True)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        Console().print(format_report(report, with_terms=terms), highlight=False)
    raise typer.Exit(0 if report["fits"] else NOT_HELD)


def _field(text: str) -> tuple[str, Any]:
    """Parse ``FIELD=VALUE`` into a field of a plan and its value."""
    name, value = field_and_value(text, "seq_len", "batch_size", "policy", "speeds")
    if re.fullmatch(r"[0-9]+", value):
        return name, int(value)
    return name, _VALUES.get(value, value)


def _place(request: PlanRequest, card: Card | None) -> "tuple[PlanRequest, Device]":
    """Give the request a budget and describe its device: a named card, this GPU, or a budget."""
    from poros.planning.report import Device

    title = None
    if card is None and request.budget is None:
        budget, title, card = _gpu_here()
        request = request.override(vram_budget=budget)
    elif card is not None:
        title = f"an {card.title}" + ("" if "GB" in card.title else f" ({card.memory_gib} GB)")
        if request.budget != card.budget:
            title = f"{_size(request)} of {title}"
    title = title or ("a card" if request.budget is None else f"a budget of {_size(request)}")
    if card is not None:
        return request, Device(title, card.speeds, f"the published rates of an {card.title}")
    return request, Device(title)


def _gpu_here() -> tuple[int | None, str | None, Card | None]:
    """Return what ``poros.prepare`` would take as the budget, the GPU's name, and its card."""
    import torch

    from poros.utils.devices import free_budget

    if not torch.cuda.is_available():
        return None, None, None
    name = torch.cuda.get_device_name()
    return free_budget(), f"this machine's {name}", card_of(name)


def _size(request: PlanRequest) -> str:
    budget = request.policy.vram_budget
    return budget if isinstance(budget, str) else f"{(request.budget or 0) / 2**30:.1f} GiB"
