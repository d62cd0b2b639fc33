"""Builds the PEFT configuration of a recipe."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import RecipeError, quoted
from poros.loaders.settings import configuration, describe_error
from poros.loaders.source import find_config
from poros.model.vision import excluded_modules, with_own
from poros.planning.meta_model import meta_model, with_adapters
from poros.recipes.passing import refusals
from poros.recipes.recipe import Recipe
from poros.recipes.values import is_name

if TYPE_CHECKING:
    from peft import PeftConfig


def adapter_config(recipe: Recipe) -> "PeftConfig":
    """Build a recipe's adapter configuration: on the language model alone, but for a pattern.

    The head of a reward model is new: PEFT has it trained as a whole.

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
        config = configuration(*find_config(Path(recipe.model.source).expanduser()), {})
        without = excluded_modules(meta_model(config, None, torch.bfloat16))
        fields["exclude_modules"] = with_own(without, fields.get("exclude_modules"))
    with refusals("adapter", "PEFT"):
        return LoraConfig(**fields)


def require_targets(recipe: Recipe, base: Any) -> None:
    """Refuse target modules that the model does not have, or that PEFT has no adapter for.

    Args:
        base: The model, on the meta device. It is edited.
    """
    config: Any = adapter_config(recipe)
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
    if recipe.training.method != "sft" and hasattr(base.get_output_embeddings(), "lora_A"):
        raise RecipeError(
            "adapter.target_modules: expected modules before the head, whose weight the loss of "
            f"{recipe.training.method} reads by itself, found the head; leave it out, or use "
            "adapter.modules_to_save"
        )
