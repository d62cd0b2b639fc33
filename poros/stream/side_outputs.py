"""What a layer hands on besides its result: shared states and recorded outputs.

Two known families of models let layers talk past their return values. Gemma 4 passes one mutable
mapping through all layers, in which some leave their keys and values for later ones. Mixtures of
experts have their router logits recorded by transformers from inside the layer, for the auxiliary
loss. Both are part of the graph of a layer's forward, so such a layer keeps that graph.

Source:
    transformers: ``cache_utils.KVSharingDict`` (older versions: ``collections.UserDict``) and
    ``utils.output_capturing``.
"""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from transformers.utils.output_capturing import _active_collector

_FROM_RESULTS = "hidden_states"
"""Recorded from what layers return, so nothing needs to be done about it."""


def recorded_outputs() -> list[str]:
    """What transformers records inside layers at the moment."""
    collected = _active_collector.get() or ()
    return [key for key in collected if key != _FROM_RESULTS and not key.startswith("_")]


def is_recording() -> bool:
    """Whether transformers records anything of what layers give or do at the moment."""
    return any(not key.startswith("_") for key in _active_collector.get() or ())


def shared_mappings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a layer's keyword arguments that are mappings which layers share."""
    return {key: value for key, value in kwargs.items() if is_shared_mapping(value)}


def is_shared_mapping(value: Any) -> bool:
    """A mapping of tensors and nothing else; of other classes what a copy would lose is unknown."""
    modules = ("collections", "transformers.cache_utils")
    return isinstance(value, UserDict) and type(value).__module__ in modules
