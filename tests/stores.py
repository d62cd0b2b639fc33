"""A stand-in for the loader: puts a loaded model's layers into one slab per layer, and says so."""

from typing import Any

import torch

from poros.host.store import HostStore, leave_store
from poros.layer.frozen import FrozenTensor
from poros.layout import BlockLayout
from poros.model.inspect import _collect, find_layers
from poros.nf4 import Part


def parts_by_layer(model: Any) -> list[list[Part]]:
    """What moves, layer by layer, in the order in which ``poros.prepare`` lists it."""
    name, layers = find_layers(model)
    found = []
    for index, layer in enumerate(layers):
        inside: dict[int, FrozenTensor] = {}
        _collect(f"{name}.{index}", index, layer, inside)
        found.append([p for each in inside.values() if not each.stays for p in each.parts()])
    return found


def layouts_of(model: Any) -> list[BlockLayout]:
    return [
        BlockLayout.pack([(part.name, part.get()) for part in parts])
        for parts in parts_by_layer(model)
    ]


def lay_down(model: Any, store: HostStore | None = None) -> HostStore:
    """Move the layers of a base model (without adapters) into ``store``, and leave it there."""
    model.requires_grad_(False)
    store = store or HostStore.allocate(layouts_of(model))
    for parts, slab in zip(parts_by_layer(model), store.slabs, strict=True):
        for part, spec in zip(parts, slab.layout.tensors, strict=True):
            with torch.no_grad():
                target = slab.tensor(spec)
                target.copy_(part.get())
            part.put(target)
    leave_store(model, store)
    return store
