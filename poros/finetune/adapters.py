"""Builds the PEFT configuration of a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import RecipeError, quoted
from poros.loaders.settings import configuration, describe_error
from poros.loaders.source import find_config
from poros.model.targets import excluded_modules
from poros.planning.meta_model import meta_model, with_adapters
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig


def adapter_config(recipe: Recipe) -> "PeftConfig":
    """Build a recipe's adapter configuration: on the language model alone."""
    from peft import LoraConfig

    adapter = recipe.adapter
    targets = adapter.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        targets = (targets,)  # PEFT takes a text for a pattern of whole names
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_dora=adapter.kind == "dora",
        use_rslora=adapter.kind == "rslora",
        task_type="CAUSAL_LM",
        exclude_modules=_excluded(recipe.model.source),
    )


def require_targets(recipe: Recipe, base: Any) -> None:
    """Refuse target modules that the model does not have, or that PEFT has no adapter for.

    Args:
        recipe: Names the modules.
        base: The model, on the meta device. It is edited.

    Raises:
        RecipeError: If one of the names matches nothing, or something without an adapter.
    """
    config: Any = adapter_config(recipe)
    targets = config.target_modules
    if isinstance(targets, str):
        return
    names = [name for name, _ in base.named_modules()]
    missing = [
        target
        for target in sorted(targets)
        if not any(name == target or name.endswith(f".{target}") for name in names)
    ]
    if missing:
        known = {
            name.rpartition(".")[2]
            for name, each in base.named_modules()
            if isinstance(each, nn.Linear)
        }
        raise RecipeError(
            "adapter.target_modules: expected names of modules of the model, found "
            f"{quoted(', '.join(missing))}, which match none; there are "
            f"{', '.join(sorted(known))} (--target-modules)"
        )
    try:
        with_adapters(base, {"default": config})
    except (ValueError, TypeError, NotImplementedError) as error:  # of PEFT
        raise RecipeError(
            f"adapter.target_modules: expected modules that get a {recipe.adapter.kind} adapter, "
            f"found {', '.join(sorted(targets))}: {describe_error(error)}; name linear layers "
            "(--target-modules)"
        ) from error


def _excluded(source: str) -> str | None:
    """List the modules without an adapter: towers that text does not reach, and routers."""
    config = configuration(*find_config(Path(source).expanduser()), {})
    return excluded_modules(meta_model(config, None, torch.bfloat16))
