"""Guards against calls on a prepared model that would bypass the host copy.

The guards sit on the modules above the layers as instance attributes, so that a refused call has
not changed anything yet.

Note: Initialisations that read the base
    DoRA's magnitude and the starting values of other kinds are computed from the weight that is
    adapted, which is on the host between visits. So while PEFT makes the adapter of a module, the
    block of its layer is on the device: PEFT reads and draws what it does in a resident model. An
    initialisation that changes the base (KaSA, PiSSA), or that keeps a part of it, would lose it
    with the slot; it is refused, and the adapter removed again.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from poros.errors import PreparedModelError, UnvalidatedArchitectureError
from poros.model.adapter_kinds import adapter_kinds
from poros.model.origin import naming_source, write_origin
from poros.model.vision import leave_out_dropped
from poros.slots.schedule import Phase
from poros.stream.boundary import (
    is_streamed,
    refuse_compiling,
    refuse_copy,
    require_harmless,
    streamed_layer,
)

logger = logging.getLogger(__name__)

_MERGING = ("merge_adapter", "merge_and_unload", "unload", "unmerge_adapter")
_CHECKPOINTING = "_set_gradient_checkpointing"
"""The method that every way of switching it on calls; it also makes inputs require gradients."""


def guards_of(
    ancestors: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    renew: Callable[[], None],
) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Yield the guards of a prepared model: a module, the name of a method, and what guards it.

    Args:
        ancestors: The modules above the layers, outermost first, and the list of them.
        renew: Allocates all slots anew.
    """
    for name, module in ancestors:
        where = name or type(module).__name__
        yield module, "_apply", _guard_apply(module, where, device)
        yield module, "compile", _always(refuse_compiling, where)
        if isinstance(module, PeftModel):
            yield module, "save_pretrained", _save_with_origin(module)
        for method in ("__deepcopy__", "__reduce_ex__"):
            yield module, method, _always(refuse_copy, f"{where} of a prepared one")
        if isinstance(module, BaseTuner):
            for method in _MERGING:
                yield module, method, _always(_refuse_merging, method)
            yield module, "_create_and_replace", guard_initialisation(module, renew)
        if isinstance(module, PreTrainedModel):
            yield module, _CHECKPOINTING, _skip_checkpointing(module)
    for module in ancestors[-1][1].modules():
        if isinstance(module, BaseTunerLayer):
            for method in ("merge", "unmerge"):
                yield module, method, _always(_refuse_merging, method)


def _guard_apply(module: nn.Module, where: str, device: torch.device) -> Callable[..., nn.Module]:
    """Return ``Module._apply``, which ``to`` and ``half`` call, with a check before it."""
    reference = weakref.ref(module)  # which holds this

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own: Any = reference()
        require_harmless(fn, own.parameters(), device, where)
        applied: nn.Module = type(own)._apply(own, fn, recurse)
        return applied

    return apply


def _save_with_origin(model: PeftModel) -> Callable[..., None]:
    """Return ``save_pretrained`` that also writes where the base comes from.

    In ``poros.prepare(get_peft_model(...)).save_pretrained(folder)`` nothing holds the model once
    Python has looked the method up: a model of the same parts is saved then.
    """
    reference = weakref.ref(model)  # which holds this
    kind: Any = type(model)
    parts = dict(model.__dict__)

    def save(save_directory: Any, *args: Any, **kwargs: Any) -> None:
        own: Any = reference()
        if own is None:
            own = kind.__new__(kind)
            own.__dict__.update(parts)
        with naming_source(own):
            type(own).save_pretrained(own, save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_origin(own, Path(save_directory))

    return save


def _refuse_merging(method: str) -> NoReturn:
    raise PreparedModelError(
        f"{method}: expected a model whose base is in place, found a prepared one (its base is "
        "in the host store). Call poros.restore(model) first"
    )


def _always(refuse: Callable[[str], None], where: str) -> Callable[..., None]:
    """Return a method that refuses every call, whatever its arguments."""

    def call(*args: Any, **kwargs: Any) -> None:
        refuse(where)

    return call


def _skip_checkpointing(module: PreTrainedModel) -> Callable[..., None]:
    genuine = getattr(type(module), _CHECKPOINTING)
    reference = weakref.ref(module)  # which holds this

    # Without a parameter called "value", by which transformers knows an older form.
    def skip(enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if enable:
            logger.info(
                "poros: gradient checkpointing is ignored, because streamed layers are recomputed "
                "anyway"
            )
        else:
            genuine(reference(), enable, *args, **kwargs)

    return skip


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
