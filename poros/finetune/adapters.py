"""The PEFT configuration that a recipe asks for."""

from typing import TYPE_CHECKING

from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig


def adapter_config(recipe: Recipe) -> "PeftConfig":
    """A recipe's adapter, for ``get_peft_model``."""
    from peft import LoraConfig

    adapter = recipe.adapter
    targets = adapter.target_modules
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_dora=adapter.kind == "dora",
        use_rslora=adapter.kind == "rslora",
        task_type="CAUSAL_LM",
    )
