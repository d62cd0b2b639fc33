"""Builds a model through transformers, with a slab writer for its tensors."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import HostMemoryError, PorosError, quoted
from poros.loaders.header import defect, shown
from poros.loaders.settings import describe_error
from poros.loaders.slab_writer import SlabWriter
from poros.model.vision import is_classifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MAX_NAMED = 5
_REMEDY = "check that config.json and weights belong together"


def fill(
    model_class: Any,
    writer: SlabWriter,
    quantization: Any,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
) -> "PreTrainedModel":
    """Have transformers build a model and hand its tensors to ``writer``.

    Args:
        writer: It is registered with transformers already (``reading_into``).
        quantization: What ``poros.loaders.hf_quantizer.reading_into`` yielded.
        tensors: Slices of the checkpoint by name.
        options: Further arguments of ``from_pretrained``.

    Raises:
        CheckpointFormatError: If transformers builds no model of the configuration, or tensors are
            missing or left over, or do not fit.
        HostMemoryError: If there is no memory for it.
    """
    try:
        model, info = model_class.from_pretrained(
            None,
            state_dict=tensors,
            quantization_config=quantization,
            device_map={"": "cpu"},
            output_loading_info=True,
            # Reported with the rest below, whatever the release makes of them.
            ignore_mismatched_sizes=True,
            **options,
        )
    except (PorosError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _unfit(writer, error) from error
    info["missing_keys"] = set(info["missing_keys"]) - _drawn(model, info["missing_keys"])
    _require_complete(writer.path, info, writer.layers_name)
    return model


def _drawn(model: "PreTrainedModel", missing: Iterable[str]) -> set[str]:
    """Return the missing tensors that are to be trained: the head of a classifier.

    transformers has drawn it from torch's random state.
    """
    if not is_classifier(model):
        return set()
    inner = f"{model.base_model_prefix}."
    drawn = {name for name in missing if not name.startswith(inner)}
    if drawn:
        logger.warning(
            "poros: the checkpoint has no %s: drawn from torch's random state, as from_pretrained "
            'does. Train it: LoraConfig(task_type="SEQ_CLS") does',
            ", ".join(sorted(drawn)),
        )
    return drawn


def _unfit(writer: SlabWriter, error: Exception) -> PorosError:
    """Translate an error of transformers: before the plan of the settings, after it of tensors."""
    if "allocate memory" in str(error):
        return HostMemoryError(
            f"{shown(writer.path)}: expected host memory for what the configuration asks for, "
            f"found {describe_error(error)}; check its sizes, or free memory"
        )
    if not writer.store.slabs:
        return defect(
            writer.path / "config.json",
            "expected settings that transformers builds a model from, found "
            f"{describe_error(error)}",
            remedy="check the file, and the release of transformers",
        )
    return defect(
        writer.path,
        "expected tensors that fit the configuration, found that transformers could not convert "
        f"them: {quoted(str(error), is_bare=True, limit=1000)}",
        remedy=_REMEDY,
    )


def _require_complete(path: Path, info: dict[str, Any], layers_name: str) -> None:
    """Refuse what ``from_pretrained`` would fill with random numbers or leave out of a layer."""
    for name, found, expected in sorted(info["mismatched_keys"], key=str):
        raise defect(
            path,
            f"expected shape {tuple(expected)} for this configuration, found "
            f"{quoted(tuple(found))}",
            tensor=name,
            remedy=_REMEDY,
        )
    surplus = [name for name in info["unexpected_keys"] if name.startswith(f"{layers_name}.")]
    for names, problem in ((info["missing_keys"], "none of"), (surplus, "tensors without use:")):
        if names:
            first = ", ".join(quoted(name, is_bare=True) for name in sorted(names)[:_MAX_NAMED])
            raise defect(
                path,
                f"expected the tensors of the configuration, found {problem} {first} "
                f"({len(names)} in all)",
                remedy=_REMEDY,
            )


ONE_AT_A_TIME = threading.RLock()
"""Lets one thread at a time have transformers build a model.

transformers sets torch's default dtype meanwhile, switches initialisation off and on, and knows our
method of quantization. Each of these belongs to the process, not to the thread, so loads in
parallel would use each other's and leave it behind.
"""


@contextmanager
def quiet() -> Iterator[None]:
    """Switch transformers' progress bars off inside the body."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
