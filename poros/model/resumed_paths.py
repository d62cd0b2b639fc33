"""Orders of LoRA's products in checkpoints: a run resumes with those that it was begun with.

A Trainer saves a PEFT model by its ``save_pretrained`` and resumes by its ``load_adapter``. The
first writes a file beside the adapter if the order is not PEFT's, the second compares. The first
also writes where the base comes from (``poros.model.origin``).
"""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from poros.errors import CheckpointFormatError, PolicyError
from poros.io.writing import write_json
from poros.kernels.adapters import tally_of
from poros.kernels.paths import PEFT
from poros.model.origin import naming_source, write_origin

RECORD = "poros_lora_paths.json"
_CHECKPOINT = "trainer_state.json"
"""Only a Trainer's checkpoint has it; from a folder without it nothing is resumed."""


class _Method:
    """Stands in the ``__dict__`` of a model, which it holds weakly, for a method of its class."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model(),)


class _SavePretrained(_Method):
    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        model, file = self._model(), Path(save_directory) / RECORD
        with naming_source(model):
            type(model).save_pretrained(model, save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_origin(model, Path(save_directory))
            file.unlink(missing_ok=True)
            if _paths_of(model) != PEFT:
                write_json(file, {"lora_paths": _paths_of(model)})


class _LoadAdapter(_Method):
    def __call__(
        self,
        model_id: Any,
        adapter_name: str,
        is_trainable: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model = self._model()
        if is_trainable:
            for folder in (Path(model_id), Path(model_id).parent):  # adapters may have their own
                if (folder / _CHECKPOINT).is_file():
                    _require_same(folder, _paths_of(model))
        own = type(model).load_adapter
        return own(model, model_id, adapter_name, is_trainable, *args, **kwargs)


def methods(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """By name, what a model has to call instead of its own methods.

    They raise ``PolicyError`` where a checkpoint was trained with other orders than the model has,
    before anything of it is loaded, and ``CheckpointFormatError`` if its record cannot be read.
    """
    if not isinstance(model, PeftModel):
        return {}
    return {"save_pretrained": _SavePretrained(model), "load_adapter": _LoadAdapter(model)}


def record(model: nn.Module) -> None:
    """Have a resident model call ``methods``."""
    model.__dict__.update(methods(model))


def forget(model: nn.Module) -> None:
    """Undo ``record``."""
    for name in methods(model):
        model.__dict__.pop(name, None)


def _paths_of(model: nn.Module) -> str:
    tally = tally_of(model)
    return PEFT if tally is None else tally.lora_paths


def _require_same(checkpoint: Path, paths: str) -> None:
    file = checkpoint / RECORD
    try:
        found = json.loads(file.read_text("utf-8"))["lora_paths"] if file.exists() else PEFT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(
            f"{file}: expected the lora_paths of a checkpoint, found {type(error).__name__}: "
            f"{error}; resume from another checkpoint"
        ) from error
    if found != paths:
        raise PolicyError(
            f"lora_paths: expected {found!r}, with which {checkpoint} was trained, found "
            f"{paths!r}; resume with the same, and a measured table with the same rows"
        )
