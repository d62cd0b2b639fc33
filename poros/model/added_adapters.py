"""Handles adapters that are added to a prepared model.

Note: Initialisations that read the base
    DoRA's magnitude and the starting values of other kinds are computed from the weight that is
    adapted, which is on the host between visits. So while PEFT makes the adapter of a module, the
    block of its layer is on the device: PEFT reads and draws what it does in a resident model. An
    initialisation that changes the base (KaSA, PiSSA), or that keeps a part of it, would lose it
    with the slot; it is refused, and the adapter removed again.
"""

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from poros.errors import PreparedModelError, UnvalidatedArchitectureError
from poros.model.adapter_kinds import adapter_kinds
from poros.model.vision import leave_out_dropped
from poros.slots.schedule import Phase
from poros.stream.boundary import is_streamed, streamed_layer


def require_proven(layer: nn.Module, known: Collection[str]) -> None:
    """Raise if a kind of adapters has come to ``layer`` that no check covers.

    Args:
        known: The kinds that ``poros.prepare`` found in the model.

    Raises:
        UnvalidatedArchitectureError: If there is such a kind.
    """
    from poros.gates.registry import read_registry

    kinds = adapter_kinds(layer)
    new = kinds.keys() - {*known, "lora"}
    if not new:
        return
    registry = read_registry()
    for kind in sorted(new):
        record = registry.adapter(kind)
        if record.outcome != "exact":
            raise UnvalidatedArchitectureError(
                f"expected adapters of kinds that stream exactly, found {kinds[kind]}, which came "
                f"after poros.prepare and is {record.outcome} on record ({record.reason}). Delete "
                "the adapter, or call poros.restore(model) and prepare it again: then it is "
                "refused, or the first step is checked with it"
            )


def guard_initialisation(tuner: BaseTuner, renew: Callable[[], None]) -> Callable[..., None]:
    """Return ``BaseTuner._create_and_replace``, with the weights that it adapts on the device.

    Args:
        renew: Allocates all slots anew.
    """
    reference = weakref.ref(tuner)  # which holds this

    def initialise(config: Any, adapter: str, *args: Any, current_key: str, **kwargs: Any) -> None:
        tuner: Any = reference()
        make = partial(type(tuner)._create_and_replace, tuner, config, adapter, *args, **kwargs)
        leave_out_dropped(tuner.model, config)
        layer = _layer_at(tuner.model, current_key)
        if layer is None:
            make(current_key=current_key)
            return
        streamed = streamed_layer(layer)
        before = None
        is_written = False
        complaint: PreparedModelError | None = None
        kept = False
        try:
            with streamed.weights.hold(Phase.INFERENCE) as slot:
                before, is_written = streamed.weights.bindings.device_marks(), True
                try:
                    make(current_key=current_key)
                finally:
                    now = streamed.weights.bindings.device_marks()
                    is_written = now.changed(before) is not None
            kept = _keeps_some(layer, slot)
        except PreparedModelError as error:
            if before is None:
                raise
            complaint = error
        finally:
            # Whatever else has failed: nothing may read the bytes that were written.
            if is_written:
                renew()
        if complaint is not None or kept or is_written:
            _take_out(tuner, adapter)
            raise PreparedModelError(
                f"{streamed.name}: expected an adapter whose initialisation leaves the base as it "
                f"is, found that PEFT writes to it, or keeps part of it, in {current_key!r} for "
                f"{adapter!r}; that would be lost with the slot. The adapter was taken out again. "
                "Add it before poros.prepare: call poros.restore(model), add it, and prepare again"
            ) from complaint

    return initialise


def _layer_at(model: nn.Module, key: str) -> nn.Module | None:
    """Find the streamed layer on the path from ``model`` to the module ``key``."""
    module: nn.Module | None = model
    for part in key.split("."):
        module = None if module is None else module._modules.get(part)
        if module is None or is_streamed(module):
            return module
    return None


def _keeps_some(layer: nn.Module, slot: torch.Tensor) -> bool:
    """Whether anything in ``layer`` at rest lies in ``slot``."""
    memory = slot.untyped_storage().data_ptr()
    return any(
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.untyped_storage().data_ptr() == memory
        for module in layer.modules()
        for table in (module._parameters, module._buffers, module.__dict__)
        for value in table.values()
    )


def _take_out(tuner: Any, adapter: str) -> None:
    for parent in list(tuner.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.delete_adapter(adapter)
                if not child._all_available_adapter_names():
                    setattr(parent, name, child.get_base_layer())
