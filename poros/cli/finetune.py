"""``poros finetune``: from a data set to an adapter."""

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from poros.cli.imports import quick_imports
from poros.cli.merge import merge_with_bar
from poros.cli.shared import field_and_value, readable_errors
from poros.errors import RecipeError, quoted
from poros.recipes.recipe import Recipe, named, settings
from poros.recipes.values import shown

_OPTIONS = {"vram_budget": "--vram", "seq_len": "--max-length", "batch_size": "--batch-size"}
_RECIPES = (".yaml", ".yml")
ADAPTERS = ("lora", "dora", "rslora")
"""Values of ``--adapter``; a recipe has ``use_dora`` and ``use_rslora``."""


def finetune(
    model: str | None,
    data: str | None,
    dpo: bool,
    adapter: str | None,
    set: list[str] | None,
    dry_run: bool,
    print_recipe: bool,
    show: int | None,
    **given: str | bool | None,
) -> None:
    """Train an adapter: poros finetune MODEL DATA, or poros finetune recipe.yaml.

    Started again after an interruption, the same command goes on where it was.
    Every option is also a setting of a recipe (--print-recipe shows them),
    and replaces what a recipe says.

    Exit code: 0 with an adapter, 2 for bad input, 128 + N if signal N came.
    """
    # Everything that can be wrong is found before a library is imported that takes seconds.
    from poros.recipes.checks import checked, require_packages
    from poros.recipes.reading import read_recipe

    file = None
    if model is not None and model.endswith(_RECIPES):
        file, model = Path(model), None
    asked = [field_and_value(each) for each in set or ()]
    asked += [
        (name.replace("__", "."), str(value).lower() if isinstance(value, bool) else value)
        for name, value in {**given, "model__source": model, "data__source": data}.items()
        if value is not None
    ]
    if dpo:
        asked.append(("training.method", "dpo"))
    if adapter is not None:
        asked += [(f"adapter.use_{each}", str(each == adapter).lower()) for each in ADAPTERS[1:]]
    flags: dict[str, str] = {}
    for key, value in asked:
        if flags.setdefault(key, value) != value:
            found = f"{quoted(flags[key], limit=60)} and {quoted(value, limit=60)}"
            raise typer.BadParameter(f"{key}: expected one value, found {found}; remove one")
    with readable_errors(_OPTIONS):
        draft = read_recipe(file, flags)
        recipe = checked(draft, is_read=print_recipe or dry_run or show is not None)
        if print_recipe:
            typer.echo(recipe.as_yaml(), nl=False)
            return
        require_packages()
        try:
            _run(recipe, is_dry=dry_run, num_shown=show or 0)
        except RecipeError as error:
            raise RecipeError(draft.placed(str(error))) from error


def known_option(name: str) -> str:
    """Refuse the name of an option that other tools have for one of ours."""
    flags = [settings()[key].flag or f"--set {key}=VALUE" for key in named(name.replace("-", "_"))]
    if flags and f"--{name}" not in flags:
        raise typer.BadParameter(f"expected {flags[0]}, found --{name}")
    return name


def _run(recipe: Recipe, *, is_dry: bool, num_shown: int) -> None:
    """Do what a recipe asks for; if training has ended before, only what comes behind it."""
    from poros.finetune.hub import send
    from poros.finetune.resuming import finished, inspect_run_dir

    adapter, merged = None, recipe.output.merged
    is_sent = recipe.training.more.get("push_to_hub")
    if not (is_dry or num_shown):
        inspect_run_dir(recipe, trains=merged is None and not is_sent)
        adapter = finished(recipe)
    adapter = adapter or _trained(recipe, is_dry=is_dry, num_shown=num_shown)
    if adapter is None:
        typer.echo("dry run: nothing was loaded or written")
        return
    if merged is not None:
        merge_with_bar(adapter, Path(merged).expanduser())
    folder = shlex.quote(str(adapter))
    typer.echo(f"adapter: {adapter}")
    if recipe.training.method != "reward":  # a model of such an adapter writes no text
        typer.echo(f"try it:  poros chat {folder}")
    typer.echo(f"merged:  {merged}" if merged else f"merge:   poros merge {folder} --out FOLDER")
    if is_sent:  # at last: without a network the rest is there
        typer.echo(f"on the hub: {send(recipe, adapter)}")


def _trained(recipe: Recipe, *, is_dry: bool, num_shown: int) -> Path | None:
    from poros.finetune.data import read_data

    train, validation = read_data(recipe)
    with quick_imports():
        import datasets
        from rich.console import Console
        from transformers import logging

        from poros.finetune.run import Interrupted, finetune

    logging.set_verbosity_error()
    datasets.disable_progress_bars()  # one for each short pass
    try:
        return finetune(recipe, train, validation, Console(), is_dry=is_dry, num_shown=num_shown)
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(128 + stopped.signal) from stopped


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting of a recipe."""
    parameters = [
        _parameter("model", str | None, typer.Argument(help="Model, or a recipe (.yaml).")),
        _parameter("data", str | None, typer.Argument(help="Rows to train on.")),
    ]
    for key, setting in settings().items():
        if not setting.flag.startswith("--"):
            continue
        kind = shown(setting.hint)
        is_switch = kind.startswith("BOOL")
        option = typer.Option(
            f"{setting.flag}/--no-{setting.flag[2:]}" if is_switch else setting.flag,
            help=setting.about,
            show_default=False if setting.default in (None, "") else str(setting.default),
            rich_help_panel=key.split(".")[0],
            metavar=None if is_switch else kind,
        )
        taken = bool | None if is_switch else str | None
        parameters.append(_parameter(key.replace(".", "__"), taken, option))
    switches = {
        "dpo": "The same as --method dpo.",
        "dry_run": "Check everything, print what would be trained, and stop.",
        "print_recipe": "Print the recipe with all settings, and stop.",
    }
    for name, about in switches.items():
        flag = "--" + name.replace("_", "-")
        parameters.append(_parameter(name, bool, typer.Option(flag, help=about), False))
    about = f"Kind of adapter: {', '.join(ADAPTERS)}."
    option = typer.Option("--adapter", help=about, rich_help_panel="adapter", show_default="lora")
    parameters.append(_parameter("adapter", Literal[ADAPTERS] | None, option))
    about = "Another setting of a recipe, such as training.neftune_noise_alpha=5; may be repeated."
    option = typer.Option("--set", metavar="SECTION.NAME=VALUE", help=about)
    parameters.append(_parameter("set", list[str] | None, option))
    about = "Print so many rows, the trained-on tokens in double square brackets, and stop."
    parameters.append(_parameter("show", int | None, typer.Option("--show", min=1, help=about)))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(name: str, kind: Any, about: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
    )


finetune = _with_options(finetune)
