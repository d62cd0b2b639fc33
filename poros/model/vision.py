"""Finds and drops towers for images or sound beside a language model.

No family is special: the language model is what ``get_decoder`` gives, with the embeddings at both
ends; every other part with parameters of a model whose configuration has one of its own for text is
a tower, or the projector behind one. They stay on the device, frozen, or are left away for text.
"""

from collections.abc import Iterator
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
