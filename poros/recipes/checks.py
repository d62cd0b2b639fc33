"""Checks a recipe's settings together, and the files they name."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poros.errors import MissingPackageError, RecipeError, quoted, reason_of, refuse_all
from poros.io.writing import why_not_writable
from poros.loaders.names import is_local
from poros.recipes.reading import Draft
from poros.recipes.recipe import Recipe
from poros.recipes.sources import SUFFIXES, Kind, files_of, kind_of, suffix_of

TEMPLATES = ("chatml", "llama3")
"""Chat templates of our own, by name."""
_OF_METHOD: dict[str, dict[str, Any]] = {
    # Preferences want smaller steps than examples.
    "dpo": {"learning_rate": 2e-5},
    # Its KL term pairs each prompt of a micro-batch with another one's answer.
    "kto": {"learning_rate": 2e-5, "per_device_train_batch_size": 2},
    "reward": {"learning_rate": 1e-4},  # TRL's
}
"""Defaults of a method that are not those of examples."""
_OF_VALIDATION = (
    *("eval_steps", "eval_strategy", "eval_on_start", "load_best_model_at_end"),
    "early_stopping_patience",
)


def checked(draft: Draft, *, is_read: bool = False) -> Recipe:
    """Check a draft and return its recipe, with the output folder filled in.

    Where it ``is_read`` alone, the merged model of a run that has ended may be there.

    Raises:
        RecipeError: With every problem: those that reading found, settings that contradict each
            other, files that are not there.
    """
    for key, what in (("model.source", "the base"), ("data.source", "the rows to train on")):
        is_wrong = any(f"{key}:" in each for each in draft.problems)
        if key not in draft.values and not is_wrong:
            draft.problem(
                key,
                f"expected {what}, found nothing; give it in the recipe, or as in "
                "`poros finetune MODEL DATA`",
            )
    recipe = draft.recipe()
    if recipe.output.folder is None:
        first, *others = recipe.data.sources
        data = Path(first.removesuffix(".gz")).stem + (f"+{len(others)}" if others else "")
        folder = Path("runs") / f"{Path(recipe.model.source).name}-{data}-{recipe.training.method}"
        recipe = replace(recipe, output=replace(recipe.output, folder=str(folder)))
    _check_model(draft, recipe)
    _check_data(draft, recipe)
    _check_training(draft, recipe)
    _check_folders(draft, recipe, is_read=is_read)
    refuse_all(RecipeError, draft.problems)
    own = {
        name: value
        for name, value in _OF_METHOD.get(recipe.training.method, {}).items()
        if f"training.{name}" not in draft.values
    }
    return replace(recipe, training=replace(recipe.training, **own))


def _check_model(draft: Draft, recipe: Recipe) -> None:
    source, path = recipe.model.source, Path(recipe.model.source).expanduser()
    shown = quoted(str(path.absolute()), limit=400)
    is_one = path.suffix == ".safetensors" or (path / "config.json").is_file() or _is_store(path)
    if source and is_local(source) and not path.exists():
        what = f"expected a checkpoint, found no file or folder {shown}; check it"
        draft.problem("model.source", what)
    elif source and is_local(source) and not is_one:
        draft.problem(
            "model.source",
            f"expected a folder with a config.json, or a .safetensors file, found {shown}; of an "
            "adapter or a run give its base, of GGUF, .bin and .pt the original checkpoint",
        )
    if recipe.model.host_budget and not (recipe.model.store or _is_store(path)):
        draft.problem(
            "model.host_budget",
            "expected a store on disk to read the rest from, found none; add a folder as "
            "model.store (--store)",
        )
    if recipe.model.store and _is_store(path):
        what = "expected a store to write, found a model that is a store already; remove it"
        draft.problem("model.store", what)


def _is_store(path: Path) -> bool:
    return (path / "slabs.bin").is_file()


def _check_data(draft: Draft, recipe: Recipe) -> None:
    data, method = recipe.data, recipe.training.method
    sources = [("data.source", each) for each in data.sources if each]
    if isinstance(data.validation, str):
        sources.append(("data.validation", data.validation))
    is_split = bool(data.split or data.config)
    kinds = {kind_of(source, is_split=is_split) for _, source in sources}
    for key, source in sources:
        wrong = _problem_with_rows(source, is_split=is_split) if is_local(source) else None
        if wrong is not None:
            draft.problem(key, wrong)
    if data.split and kinds == {Kind.FILES}:
        what = "expected a data set on the hub to split, found a file; remove it"
        draft.problem("data.split", what)
    if data.config and kinds and Kind.NAMED not in kinds:
        what = "expected a data set on the hub to configure, found others; remove it"
        draft.problem("data.config", what)
    weights, num_sources = data.weights, len(data.sources)
    if weights is not None and not 1 < len(weights) == num_sources:
        draft.problem(
            "data.weights",
            f"expected a weight for each of several sources, found {len(weights)} for "
            f"{num_sources}; list the sources in data.source, or remove it",
        )
    wrong = _problem_with_template(data.chat_template)
    if wrong is not None:
        draft.problem("data.chat_template", wrong)
    if method != "sft" and data.loss_on not in ("auto", "completion"):
        what = f"expected completion or auto with {method}, found {data.loss_on}; remove it"
        draft.problem("data.loss_on", what)


def _problem_with_template(template: str) -> str | None:
    names = ("model", *TEMPLATES)
    if template in names:
        return None
    if not template.endswith((".jinja", ".j2")):
        return (
            f"expected one of {', '.join(names)} or a .jinja file, found {quoted(template)}; for "
            "the model's own leave it out"
        )
    path = Path(template).expanduser().absolute()
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return (
            f"expected a file of UTF-8 to read, found {quoted(str(path), limit=400)}: "
            f"{reason_of(error)}; check the path, or save it as UTF-8"
        )
    return None


def _problem_with_rows(source: str, *, is_split: bool) -> str | None:
    """Return what is wrong with files or folders of rows; None if nothing is."""
    path = Path(source).expanduser()
    shown = quoted(str(path.absolute()), limit=400)
    if not path.exists():
        return f"expected rows, found no file or folder {shown}; check the path"
    if kind_of(source, is_split=is_split) is not Kind.FILES:
        return None
    suffixes = sorted({suffix_of(each) for each in files_of(path)})
    if len(suffixes) == 1 and suffixes[0]:
        return None
    found = f": {' and '.join(suffixes)}" if len(suffixes) > 1 else ""
    return (
        f"expected files of one kind, which end in {', '.join(SUFFIXES)}, found {shown}{found}; "
        "name those to read (data.source: [a.jsonl, b.csv]), or write one JSON object a line"
    )


def _check_training(draft: Draft, recipe: Recipe) -> None:
    training, given = recipe.training, draft.values
    if "training.num_train_epochs" in given and training.max_steps is not None:
        draft.problem(
            "training.max_steps",
            "expected either num_train_epochs (--epochs) or max_steps (--steps), found both; "
            "remove one of them",
        )
    if given.get("training.packing") and training.method != "sft":
        what = f"expected method sft with it, found {training.method}; remove it"
        draft.problem("training.packing", what)
    batch = "training.per_device_train_batch_size"
    if training.method == "kto" and given.get(batch) == 1:
        what = "expected at least 2 rows with kto, which compares them, found 1; set it to 2"
        draft.problem(batch, what)
    if training.adapter_kernels == "grouped" and recipe.adapter.use_dora:
        what = "expected LoRA with grouped, found DoRA; choose fused, or remove it"
        draft.problem("training.adapter_kernels", what)
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if training.more.get(name) and not training.more.get("dataloader_num_workers"):
            what = "expected processes that load rows, found none; set dataloader_num_workers, or "
            draft.problem(f"training.{name}", f"{what}remove it")
    if training.more.get("push_to_hub"):
        from huggingface_hub import get_token

        if get_token() is None:
            draft.problem(
                "training.push_to_hub",
                "expected a token to send the adapter with, found none; `hf auth login` keeps one, "
                "or set HF_TOKEN",
            )
    for name in _OF_VALIDATION:
        is_asked = given.get(f"training.{name}") not in (None, False, "no")
        if is_asked and not recipe.data.validation:
            draft.problem(
                f"training.{name}",
                "expected rows to validate on, found none; add data.validation (--validation 0.05)",
            )
    chosen = [name for name in ("resident", "vram", "slots") if getattr(recipe.memory, name)]
    if len(chosen) > 1:
        what = f"expected one of resident, vram and slots, found {' and '.join(chosen)}; remove one"
        draft.problem(f"memory.{chosen[1]}", what)


def _check_folders(draft: Draft, recipe: Recipe, *, is_read: bool) -> None:
    """Check that the folders that a run writes can be made: before it, not behind it."""
    output, store = recipe.output, recipe.model.store
    run = Path(output.folder or "").expanduser().absolute()
    has_ended = is_read and (run / "adapter").exists()
    for key, named in (
        ("output.folder", output.folder),
        ("output.merged", output.merged),
        ("model.store", None if store and _is_store(Path(store).expanduser()) else store),
    ):
        if named is None:
            continue
        path = Path(named).expanduser()
        reason = why_not_writable(path)
        if reason is None and key == "output.merged" and path.exists() and not has_ended:
            reason = "it is there already, perhaps from an earlier run (to renew it, move it away)"
        if reason is None and key == "model.store":
            if not path.parent.is_dir():
                reason = "the folder above it is not there"
            elif path.is_dir() and any(path.iterdir()):
                reason = "there is something else in it"
        if reason is None and key != "output.folder" and path.absolute() in (run, run / "adapter"):
            reason = "the run writes other files there"
        if reason is not None:
            found = f"found {quoted(str(path))}: {reason}"
            draft.problem(key, f"expected a new folder, {found}; give another folder")


def require_packages() -> None:
    """Check that the packages for training are installed.

    Raises:
        MissingPackageError: If one is missing; the message has the line that installs them.
    """
    missing = [name for name in ("trl", "datasets") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"expected the packages {' and '.join(missing)} to train with, "
            "found none; in a clone of Poros: pip install '.[finetune]'"
        )
