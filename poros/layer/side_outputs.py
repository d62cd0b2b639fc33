"""What a layer hands on besides its result: shared states and recorded outputs.

Two known families of models let layers talk past their return values. Gemma 4 passes one mutable
mapping through all layers, in which some leave their keys and values for later ones. Mixtures of
experts have their router logits recorded by transformers from inside the layer, for the auxiliary
loss. Left alone, what a recomputed layer writes there would carry no gradient, silently.

So a streamed layer reads the mapping's tensors as inputs, runs on a fresh copy of it and on a
private record, and hands everything written to either back as further results. ``publish`` then
puts those, now outputs of the recomputed layer, where its caller expects them.

Source:
    transformers: ``cache_utils.KVSharingDict`` (older versions: ``collections.UserDict``) and
    ``utils.output_capturing``.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers.utils.output_capturing import _active_collector

from poros.layer.args import tree_flatten, tree_unflatten

_FROM_RESULTS = "hidden_states"
"""Recorded from what layers return, so nothing needs to be done about it."""
RECORDABLE = ("router_logits",)
"""Recorded inside a layer from one tensor per call, which can be an output like any other."""


def recorded_outputs() -> list[str]:
    """What transformers records inside layers at the moment."""
    collected = _active_collector.get() or ()
    return [key for key in collected if key != _FROM_RESULTS and not key.startswith("_")]


def is_recording() -> bool:
    """Whether transformers records anything of what layers give or do at the moment."""
    return any(not key.startswith("_") for key in _active_collector.get() or ())


def shared_mappings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a layer's keyword arguments that are mappings which layers share."""
    return {key: value for key, value in kwargs.items() if _is_shared_mapping(value)}


class SideOutputs:
    """What one call of one layer reads from and writes to besides its arguments and its result.

    Args:
        kwargs: The layer's keyword arguments.
        name: The layer's qualified name.
        tensors: Extended by the tensors that the mappings hold now.
    """

    def __init__(self, kwargs: Mapping[str, Any], name: str, tensors: list[torch.Tensor]) -> None:
        self._mappings = shared_mappings(kwargs)
        self._types = {key: type(value) for key, value in self._mappings.items()}
        self._held = {
            key: {
                entry: tree_flatten(value, f"{key}[{entry!r}] given to {name}", tensors)
                for entry, value in mapping.items()
            }
            for key, mapping in self._mappings.items()
        }
        self._recorded = recorded_outputs()

    @property
    def names(self) -> Collection[str]:
        """The keyword arguments that are shared mappings."""
        return self._types

    def entries(self) -> list[Any]:
        """What the mappings hold now."""
        return [value for mapping in self._mappings.values() for value in mapping.values()]

    def run(
        self, run: Callable[[Mapping[str, Any]], Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """Call ``run`` with fresh mappings by name; its result and all it wrote by the side."""
        given = {
            key: {entry: tree_unflatten(value, tensors) for entry, value in held.items()}
            for key, held in self._held.items()
        }
        fresh = {key: self._types[key](entries) for key, entries in given.items()}
        record: dict[str, list[Any]] = {key: [] for key in self._recorded}
        token = _active_collector.set(record)
        try:
            returned = run(fresh)
        finally:
            _active_collector.reset(token)
        written = tuple(
            (key, entry, value)
            for key, mapping in fresh.items()
            for entry, value in mapping.items()
            if value is not given[key].get(entry)
        )
        return returned, written, tuple((key, tuple(values)) for key, values in record.items())

    def publish(self, result: tuple[Any, ...]) -> Any:
        """Write what ``run`` brought back to the real places, once; the layer's own result."""
        returned, written, recorded = result
        # What is written has a graph that holds this object: it must not hold them in turn.
        mappings, self._mappings = self._mappings, {}
        for key, entry, value in written:
            mappings[key][entry] = value
        collector = _active_collector.get()
        for key, values in recorded:
            collector[key].extend(values)
        return returned


def _is_shared_mapping(value: Any) -> bool:
    """A mapping of tensors and nothing else; of other classes what a copy would lose is unknown."""
    modules = ("collections", "transformers.cache_utils")
    return isinstance(value, UserDict) and type(value).__module__ in modules
