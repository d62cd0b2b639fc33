"""Builds the PEFT configuration of a recipe."""

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from poros.errors import RecipeError, quoted
from poros.loaders.settings import describe_error
from poros.model.vision import excluded_modules, with_own
from poros.planning.meta_model import with_adapters
from poros.recipes.passing import refusals
from poros.recipes.recipe import Recipe
from poros.recipes.values import is_name

if TYPE_CHECKING:
    from peft import PeftConfig


def adapter_config(recipe: Recipe, base: Any) -> "PeftConfig":
    """Build a recipe's adapter configuration: on the language model alone, but for a pattern.

    The head of a reward model is new: PEFT has it trained as a whole.

    Args:
        base: The model, whose towers and routers are left out.

    Raises:
        RecipeError: If PEFT refuses settings together.
    """
    from peft import LoraConfig

    task = "SEQ_CLS" if recipe.training.method == "reward" else "CAUSAL_LM"
    fields = recipe.as_dict()["adapter"] | {"lora_alpha": recipe.alpha, "task_type": task}
    del fields["dtype"]
    targets = fields["target_modules"]
    is_pattern = isinstance(targets, str) and not is_name(targets)
    if isinstance(targets, str) and is_name(targets) and targets != "all-linear":
        fields["target_modules"] = [targets]  # PEFT takes a text for a pattern of whole names
    if not is_pattern:  # which says itself whether it takes towers
        own = fields.get("exclude_modules")
        fields["exclude_modules"] = with_own(excluded_modules(base), own)
    with refusals("adapter", "PEFT"):
        return LoraConfig(**fields)


def require_targets(recipe: Recipe, base: Any, config: Any) -> list[str]:
    """Refuse modules and tokens that the model does not have, or that PEFT has no adapter for.

    Args:
        base: The model, on the meta device. It is edited.
        config: Of the adapter, as ``adapter_config`` makes it.

    Returns:
        Notes on an adapter of the embedding or of the head.

    Raises:
        RecipeError: With the setting, and what the model has.
    """
    targets = set() if isinstance(config.target_modules, str) else {*config.target_modules}
    more = recipe.adapter.more
    names = [f".{name}" for name, _ in base.named_modules()]
    linear = {name for name, each in base.named_modules() if isinstance(each, nn.Linear)}
    for key, wanted, before in (
        ("target_modules", targets, "."),
        ("exclude_modules", {*(more.get("exclude_modules") or ())}, "."),
        ("modules_to_save", {*more.get("modules_to_save", ())}, ""),  # the end of a name will do
    ):
        missing = [
            each
            for each in sorted(wanted)
            if not any(name.endswith(f"{before}{each}") for name in names)
        ]
        if missing:
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise RecipeError(
                f"adapter.{key}: expected names of modules of the model, found "
                f"{quoted(', '.join(missing))}, which match none; of linear layers there are "
                f"{', '.join(there)}{' (--target-modules)' * (key == 'target_modules')}"
            )
    _require_tokens(more.get("trainable_token_indices"), base)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    is_tied = ends[1] is not None and ends[0].weight is ends[1].weight
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(did not match any|no parameter was matched)")
            with_adapters(base, {"default": config})
    except Warning as warning:  # of PEFT, about patterns and parameters
        raise RecipeError(
            f"adapter: expected names of modules that get an adapter, found none of that name: "
            f"{quoted(str(warning), is_bare=True)}; mend or remove them"
        ) from warning
    except (ValueError, TypeError, NotImplementedError) as error:  # of PEFT
        raise RecipeError(
            f"adapter.target_modules: expected modules that get such an adapter, "
            f"found {quoted(', '.join(sorted(targets)) or config.target_modules, limit=200)}: "
            f"{describe_error(error)}; name linear layers (--target-modules)"
        ) from error
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if recipe.training.method != "sft" and hasattr(ends[1], "lora_A"):
        raise RecipeError(
            "adapter.target_modules: expected modules before the head, whose weight the loss of "
            f"{recipe.training.method} reads by itself, found the head; leave it out, or use "
            "adapter.modules_to_save"
        )
    return _notes_on_ends(recipe, ends, is_tied=is_tied)


def _require_tokens(given: Any, base: Any) -> None:
    """Refuse tokens to train that the embedding has no row for."""
    every = chain.from_iterable(given.values()) if isinstance(given, dict) else given or ()
    num_rows = base.get_input_embeddings().weight.shape[0]
    wrong = sorted({each for each in every if not 0 <= each < num_rows})
    if wrong:
        raise RecipeError(
            f"adapter.trainable_token_indices: expected tokens from 0 to {num_rows - 1}, the rows "
            f"of the model's embedding, found {quoted(wrong, limit=60)}; remove them"
        )


def _notes_on_ends(recipe: Recipe, ends: Sequence[Any], *, is_tied: bool) -> list[str]:
    """Note what an adapter on the embedding or the head means for its files and for a merge.

    Raises:
        RecipeError: If the recipe asks for a merged model that there would not be.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    notes = []
    if any(isinstance(each, BaseTunerLayer) for each in ends):
        notes.append("the adapter is on the embedding or head: PEFT saves that with it, as a whole")
    if is_tied and any(isinstance(each, BaseTunerLayer | ModulesToSaveWrapper) for each in ends):
        if recipe.output.merged is not None:
            raise RecipeError(
                "output.merged: expected an adapter that leaves alone the weight which "
                "embedding and head share, found one on it, which is not merged; remove it, or "
                "leave them out of adapter.target_modules and adapter.modules_to_save"
            )
        notes.append(
            "embedding and head share the weight that the adapter changes: `poros merge` does not "
            "merge it"
        )
    return notes
