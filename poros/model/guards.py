"""Guards against calls on a prepared model that would bypass the host copy.

The guards sit on the modules above the layers as instance attributes, so that a refused call has
not changed anything yet.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from poros.errors import PreparedModelError
from poros.model.added_adapters import guard_initialisation
from poros.model.origin import naming_source, write_origin
from poros.stream.boundary import refuse_compiling, refuse_copy, require_harmless

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
