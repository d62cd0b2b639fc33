"""Finds modules without adapters: towers and routers."""

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from poros.model.vision import DroppedTower, base_of, find_towers


def is_router(module: nn.Module) -> bool:
    """Whether a linear layer returns scores beside its product, as routers do.

    PEFT takes it for any linear layer, and fails when the adapted module is called.
    """
    return isinstance(module, nn.Linear) and "Router" in type(module).__name__


def excluded_modules(model: Any) -> str | None:
    """PEFT's ``exclude_modules`` for adapters on the language model; None if nothing is left out.

    Left out are vision towers, which text alone does not reach, and routers.
    """
    base = base_of(model)
    routers = [name for name, module in base.named_modules() if is_router(module)]
    return _within([*find_towers(base), *routers])


def leave_out_dropped(model: Any, config: Any) -> None:
    """Exclude the towers that were left out from an adapter's configuration.

    Its target modules may be last names, which the towers of the whole model have too: PEFT would
    give those an adapter of their own where this one is loaded, or fail.

    Args:
        config: A PEFT configuration, changed in place.
    """
    towers = find_towers(model)
    pattern = _within([name for name, tower in towers.items() if isinstance(tower, DroppedTower)])
    own = getattr(config, "exclude_modules", None)
    if pattern is None or not hasattr(config, "exclude_modules") or pattern in str(own):
        return
    config.exclude_modules = with_own(pattern, own)


def with_own(pattern: str | None, own: Any) -> Any:
    """PEFT's ``exclude_modules`` for a pattern and what a user excludes: a pattern, or names."""
    if not own or pattern is None:
        return own or pattern
    if not isinstance(own, str):
        own = rf"(.*\.)?({'|'.join(map(re.escape, own))})"
    return f"({own})|{pattern}"


def _within(names: Collection[str]) -> str | None:
    """Make a pattern for the names of these modules and all in them."""
    found = "|".join(map(re.escape, names))
    return rf"({found})(\..*)?" if found else None
