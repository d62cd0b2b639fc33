"""What steps take, for tests that plan equal ones again and again."""

from dataclasses import fields
from typing import Any

import pytest

from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe

_KNOWN: dict[str, CostModel] = {}


def costs_computed_once(patch: pytest.MonkeyPatch) -> None:
    """Compute them once for recipes that say the same, as a planner does for its own recipe."""

    def known(recipe: Recipe) -> Any:
        parts = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
        parts["adapters"] = {name: each.to_dict() for name, each in recipe.adapters.items()}
        text = recipe.config.get_text_config(decoder=True)
        said = repr([parts, recipe.config._attn_implementation, text._attn_implementation])
        if said not in _KNOWN:
            _KNOWN[said] = CostModel(recipe)
        return _KNOWN[said]

    patch.setattr("poros.planning.planner.CostModel", known)
