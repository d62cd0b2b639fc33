"""Finds and drops towers for images or sound beside a language model; leaves adapters out of them.

No family is special: the language model is what ``get_decoder`` gives, with the embeddings at both
ends; every other part with parameters of a model whose configuration has one of its own for text is
a tower, or the projector behind one. They stay on the device, frozen, or are left away for text.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from poros.errors import DroppedTowerError


class DroppedTower(nn.Module):
    """Replaces a tower that was left out: it has no tensors, and raises when it is used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._why = (
            f"{name}: expected text alone, since the model was loaded with vision='drop', found "
            "other inputs; load it with vision='keep'"
        )

    def forward(self, *_: Any, **__: Any) -> Any:
        raise DroppedTowerError(self._why)

    def __getattr__(self, name: str) -> Any:
        if name == "_why" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        raise DroppedTowerError(self._why)


def base_of(model: Any) -> Any:
    """Return the transformers model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_towers(model: Any) -> dict[str, nn.Module]:
    """Find the towers and projectors of a model by their names in its base.

    None if its configuration is that of a language model alone. What stands in the place of one
    that was left away counts.
    """
    base = base_of(model)
    config = getattr(base, "config", None)
    if config is None or config.get_text_config(decoder=True) is config:
        return {}
    ends = (
        *(base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings()),
        *_heads_for_classes(base),
    )
    kept = {id(each) for end in ends if end is not None for each in end.modules()}
    return dict(_beside(base, kept, ""))


def _heads_for_classes(base: Any) -> list[nn.Module]:
    """Return what stands behind the decoder of a classifier or reward model."""
    if not is_classifier(base):
        return []
    return [child for child in base.children() if child is not base.base_model]


def is_classifier(base: Any) -> bool:
    """Whether a transformers model has a head for classes."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    return type(base).__name__ in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()


def drop_towers(model: Any) -> None:
    """Remove the towers from a model."""
    for name in find_towers(model):
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, DroppedTower(name))


def are_dropped(model: Any) -> bool:
    """Whether a model was loaded without its towers."""
    return any(isinstance(module, DroppedTower) for module in model.modules())


def _beside(module: nn.Module, kept: set[int], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in kept:
            continue
        if any(id(each) in kept for each in child.modules()):
            yield from _beside(child, kept, f"{prefix}{name}.")
        elif isinstance(child, DroppedTower) or next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


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
