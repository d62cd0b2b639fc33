"""``poros finetune``: from a data set to an adapter."""

from pathlib import Path
from typing import Annotated, Any

import typer

from poros.cli.shared import NOT_HELD, quieten_libraries, readable_errors

_RECIPES = (".yaml", ".yml")
_OPTIONS = {
    "vram_budget": "--vram",
    "host_budget": "--host-memory",
    "allow_unvalidated": "--allow-untested",
    "seq_len": "--max-length",
    "batch_size": "--batch",
}
"""What the fields that messages name are called here."""


def finetune(
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint's folder, store, or name on the hub; or a recipe.yaml."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(help="JSONL file, folder of them, or name on the hub.", show_default=False),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="What the run may take on the GPU, such as 22GiB.", show_default="free"),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="What the base may take in host memory, if MODEL is a store."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="runs/MODEL-DATA")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="sft, or dpo for preferences.", show_default="sft")
    ] = None,
    max_length: Annotated[
        str | None, typer.Option(help="Tokens of a row.", show_default="2048")
    ] = None,
    packing: Annotated[
        bool | None,
        typer.Option(help="Several rows in a bin of --max-length.", show_default="with sft"),
    ] = None,
    loss_on: Annotated[
        str | None, typer.Option(help="answers, or everything.", show_default="answers")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="chatml, plain or a file.", show_default="the model's"),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Share of rows to hold out, or a file of others.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="lora, rslora or dora.", show_default="lora")
    ] = None,
    rank: Annotated[str | None, typer.Option(help="Of the adapter.", show_default="16")] = None,
    target_modules: Annotated[
        str | None,
        typer.Option(help="Names, with commas between.", show_default="all-linear"),
    ] = None,
    epochs: Annotated[
        str | None, typer.Option(help="How often all rows are seen.", show_default="1")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Instead of --epochs.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Rows of a micro-batch.", show_default="1")
    ] = None,
    accumulate: Annotated[
        str | None, typer.Option(help="Micro-batches of a step.", show_default="8")
    ] = None,
    lr: Annotated[
        str | None, typer.Option(help="Learning rate.", show_default="2e-4; dpo: 5e-6")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="adamw, adamw_8bit, paged_adamw_8bit, lora_plus, schedule_free.",
            show_default="adamw",
        ),
    ] = None,
    save_every: Annotated[
        str | None, typer.Option(help="Steps between checkpoints.", show_default="a tenth")
    ] = None,
    trace_step: Annotated[
        int | None, typer.Option(min=1, help="Record this step for poros report; it takes longer.")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Of all that is drawn.")] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="Keep the base on the GPU as a whole.")
    ] = False,
    allow_untested: Annotated[
        bool, typer.Option("--allow-untested", help="Train an architecture without a record.")
    ] = False,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the recipe with its defaults, and end.")
    ] = False,
) -> None:
    """Fine-tune an adapter: MODEL and DATA, or a recipe.yaml; options go before what it says.

    Rows are {"messages": [...]}, {"prompt", "completion"}, {"text"} or, for preferences,
    {"prompt", "chosen", "rejected"}. A run that was interrupted goes on with the same command.

    Exit code: 0 if the run has ended, 1 if it was stopped and can go on, 2 for bad input.
    """
    from poros.recipes.reading import Given, Problem, read_recipe, written
    from poros.recipes.recipe import Recipe

    is_recipe = model is not None and data is None and model.endswith(_RECIPES)
    said: dict[str, tuple[str, Any]] = {
        "model": ("MODEL", None if is_recipe else model),
        "data": ("DATA", data),
        "vram": ("--vram", vram),
        "host_memory": ("--host-memory", host_memory),
        "out": ("--out", None if out is None else str(out)),
        "task": ("--task", task),
        "max_length": ("--max-length", max_length),
        "packing": ("--packing", packing),
        "loss_on": ("--loss-on", loss_on),
        "chat_template": ("--chat-template", chat_template),
        "validation": ("--validation", validation),
        "placement": ("--resident", "resident" if resident else None),
        "allow_untested": ("--allow-untested", allow_untested or None),
        "adapter.kind": ("--adapter", adapter),
        "adapter.rank": ("--rank", rank),
        "adapter.target_modules": ("--target-modules", target_modules),
        "training.epochs": ("--epochs", epochs),
        "training.steps": ("--steps", steps),
        "training.batch_size": ("--batch", batch),
        "training.accumulation": ("--accumulate", accumulate),
        "training.learning_rate": ("--lr", lr),
        "training.optimizer": ("--optimizer", optimizer),
        "training.save_every": ("--save-every", save_every),
        "training.seed": ("--seed", seed),
    }
    given = {
        name: Given(value, option) for name, (option, value) in said.items() if value is not None
    }
    rows: list[Any] = []

    def read_rows(recipe: Recipe) -> list[Problem]:
        if print_recipe:
            return []
        from poros.recipes.sources import read_data

        problems: list[Problem] = []
        rows.append(read_data(recipe, problems))
        return problems

    with readable_errors(_OPTIONS):
        recipe = read_recipe(Path(str(model)) if is_recipe else None, given, further=read_rows)
        if print_recipe:
            typer.echo(written(recipe), nl=False)
            return
        quieten_libraries()
        from poros.finetune.run import finetune as run

        adapter_folder = run(recipe, rows[0], typer.echo, trace_step=trace_step)
    if adapter_folder is None:
        raise typer.Exit(NOT_HELD)
