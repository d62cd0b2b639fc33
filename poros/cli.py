"""The command line: ``poros demo``, ``check``, ``load`` and ``plan``.

Exit codes: 0 when everything that a command claims held, 1 when something did not, 2 for bad input.
Whatever is slow to import is imported inside the command that needs it.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros import commands
from poros.commands import NOT_HELD, quieten_libraries, readable_errors
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.errors import quoted
from poros.output import require_file

if TYPE_CHECKING:
    from poros.loaders.limits import Limits

_POLICY = StreamingPolicy()

_Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Raise a bound on what files may ask for, by the name that an error gave.",
    ),
]

app = typer.Typer(
    help="Exact fine-tuning of adapters on models that do not fit on the GPU.",
    no_args_is_help=True,
    add_completion=False,
)


def main() -> None:
    """Run the command line."""
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
    pass


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Empty or new folder to write to.", show_default="a temporary folder"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Fine-tuning steps.", show_default="90")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
) -> None:
    """Show the whole on real text, offline, in a few minutes: load, check, fine-tune, compare.

    Exit code: 0 if no bit differs and the loss fell, 1 if not, 2 for bad input.
    """
    from dataclasses import replace

    from poros.examples.demo import DemoSettings, run_demo
    from poros.examples.demo_report import render

    quieten_libraries()
    settings = DemoSettings()
    if steps is not None:
        settings = replace(settings, num_steps=steps)
    with readable_errors():
        out_dir = out or Path(tempfile.mkdtemp(prefix="poros-demo-"))
        report = run_demo(out_dir, settings=settings, device=device)
    render(report)
    raise typer.Exit(0 if report.passed else NOT_HELD)


@app.command()
def check(
    model_dir: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder to check.", show_default=False)
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Check a small random model of this architecture, such as qwen2."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Check this kind of adapter, such as vera.", show_default="lora"),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Check it in every mode of the registry, and write its record there."
        ),
    ] = False,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered", help="List architectures and adapters on record; check nothing."
        ),
    ] = False,
    fuzz: Annotated[
        bool,
        typer.Option("--fuzz", help="Draw training programs and run each resident and streamed."),
    ] = False,
    resident_kernels: Annotated[
        bool,
        typer.Option(
            "--resident-kernels",
            help="Compare with a resident run with our adapter kernels, not a streamed one.",
        ),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="With --fuzz: for how long.", show_default="10")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --fuzz.", show_default="0")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps.", show_default="20; 3 for a checkpoint"),
    ] = None,
    slots: Annotated[int, typer.Option(help="Device slots.")] = _POLICY.slots or MIN_SLOTS,
    block_size: Annotated[int, typer.Option(help="Layers per transfer.")] = _POLICY.block_size,
    out: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
) -> None:
    """Train resident and streamed from the same bytes and compare every bit, on this machine.

    With --fuzz what is trained, and how, is drawn: hooks, penalties, autocast, adapters, edits,
    exceptions. Each program has to end in equal bits, or in an error before a wrong update.

    Exit code: 0 if no bit differs, 1 if one does (or a listed record is stale), 2 for bad input.
    """
    if registered:
        if record or any(option is not None for option in (model_dir, architecture, adapter)):
            raise typer.BadParameter("--registered lists what is on record and takes no other")
        commands.list_registered()
    if fuzz:
        if record or model_dir is not None or architecture is not None or steps is not None:
            raise typer.BadParameter("--fuzz draws its models, and takes --minutes, --seed, --out")
        commands.fuzz(10.0 if minutes is None else minutes, seed or 0, out)
    if minutes is not None or seed is not None:
        raise typer.BadParameter("--minutes and --seed go with --fuzz")
    if (model_dir is None) == (architecture is None):
        raise typer.BadParameter("give either MODEL_DIR or --architecture NAME")
    if resident_kernels and record:
        raise typer.BadParameter("--resident-kernels checks one mode, and records nothing")
    if record:
        chosen = (slots, block_size) != (_POLICY.slots or MIN_SLOTS, _POLICY.block_size)
        if architecture is None or steps is not None or out is not None or chosen:
            raise typer.BadParameter(
                "--record takes --architecture NAME (and --adapter KIND) alone: the registry "
                "sets the modes"
            )
        commands.record(architecture, adapter)

    from poros.gates import parity
    from poros.gates.report import render

    quieten_libraries()
    settings: dict[str, Any] = {"slots": slots, "block_size": block_size}
    settings["resident_kernels"] = resident_kernels
    if steps is not None:
        settings["num_steps"] = steps
    if adapter is not None:
        settings["adapter"] = adapter
    with readable_errors():
        # Inside the gate a policy that cannot work would count as a failure of streaming.
        StreamingPolicy(slots=slots, block_size=block_size)
        if out is not None:
            require_file(out, "--out")
        if model_dir is not None:
            report = parity.check_model_dir(model_dir, **settings)
        else:
            report = parity.check_architecture(str(architecture), **settings)
    render(report)
    if out is not None:
        with readable_errors():
            report.write(out)
        typer.echo(f"report: {out}")
    raise typer.Exit(0 if report.exact else NOT_HELD)


@app.command()
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
    limit: _Limit = None,
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

            with open_store(source, verify=True, limits=_limits(limit)) as store:
                shown = quoted(source, is_bare=True)
                typer.echo(f"{shown}: {len(store.layouts)} layers, every byte as written")
            return
        from poros.loaders.load import load as load_model

        if quantization == "none":
            said["quantization"] = None
        load_model(source, store=out, limits=_limits(limit), **said)
        typer.echo(f"store: {out}")


@app.command()
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
    limit: _Limit = None,
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
            limits=_limits(limit),
            adapter_dtype=_dtype("--adapter-dtype", adapter_dtype),
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


def _dtype(option: str, name: str | None) -> Any:
    """The floating-point dtype of that name."""
    from poros.nf4 import DTYPES

    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(DTYPES)}, found {name!r}")
    return None if name is None else DTYPES[name]


def _limits(values: list[str] | None) -> "Limits | None":
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
