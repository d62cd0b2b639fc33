"""A saved adapter: its files, read and checked, and the model they are loaded into."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from poros.errors import PorosError, UnsupportedModelError, quoted
from poros.loaders.checkpoint import Shard
from poros.loaders.header import defect, parse_json, shown
from poros.loaders.settings import AUTO_CLASSES, describe_error, require_bounded
from poros.loaders.source import read_small
from poros.model.origin import RECORD, Origin

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASKS = {"SEQ_CLS": "AutoModelForSequenceClassification", "FEATURE_EXTRACTION": "AutoModel"}
_HEADS = (".score.weight", ".classifier.weight")
"""The ends of the names of heads for classes, in a decoder of transformers."""
_MEND = "fix the file, or save the adapter again"


class SavedAdapter:
    """The files of an adapter.

    Args:
        folder: As ``adapter_folder`` gives it.

    Attributes:
        config: PEFT's configuration.
        weights: Tensors by their names in the file, finite, in memory.
        base: The base that its configuration names.
        auto_class: The auto class of the model that it was trained on, as in ``poros.load``; None
            for a language model.
        revision: Revision of the base, if that is a repository of the hub.
        origin: The bytes of the base that it was trained on, if Poros recorded them beside it.

    Raises:
        CheckpointFormatError: If a file is malformed; it names the file, and the field or tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / CONFIG
        fields = parse_json(read_small(file), file, strict=False)
        require_bounded(fields, file)
        base = fields.get("base_model_name_or_path")
        self.base = base if isinstance(base, str) and base else None
        revision = fields.get("revision")
        self.revision = revision if isinstance(revision, str) and revision else None
        self.origin = _origin(folder / RECORD)
        self.weights = _weights(folder / WEIGHTS)
        self.config: Any = _config(file)
        self._require_rank(file)
        self.auto_class = _auto_class(self.config)
        if self.config.task_type is None and self.config.auto_mapping is None:
            logger.warning(
                "poros: %s has neither a task_type nor the class that was trained: taken as an "
                "adapter of a language model; of others write the task_type there, SEQ_CLS or "
                "FEATURE_EXTRACTION",
                shown(file),
            )

    def _require_rank(self, file: Path) -> None:
        """Refuse a rank of LoRA that no tensor has, before PEFT allocates matrices of it."""
        if self.config.peft_type != "LORA":
            return  # the tensors of other kinds may be smaller than r
        most = max((max(each.shape, default=1) for each in self.weights.values()), default=0)
        pattern = self.config.rank_pattern
        ranks = pattern.values() if isinstance(pattern, dict) else ()
        for rank in (self.config.r, *ranks):
            if isinstance(rank, int) and rank > most:
                raise defect(
                    file,
                    f"expected a rank r of at most {most}, the longest side of the tensors in "
                    f"{WEIGHTS}, found {rank}",
                    remedy=_MEND,
                )

    @property
    def is_classifier(self) -> bool:
        return self.auto_class == "AutoModelForSequenceClassification"

    @property
    def num_labels(self) -> int | None:
        """The classes of the head that was trained as a whole, if one was."""
        heads = [each for name, each in self.weights.items() if name.endswith(_HEADS)]
        return len(heads[0]) if len(heads) == 1 and heads[0].dim() == 2 else None

    def attach(self, model: Any) -> Any:
        """Attach the adapter to ``model``, as ``PeftModel.from_pretrained`` does.

        Raises:
            UnsupportedModelError: If it does not fit the model.
        """
        from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel

        self.require_family(model)
        kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(self.config.task_type, PeftModel)
        self.config.inference_mode = True
        with self.fitting():
            adapted = kind(model, self.config)
            self.fill(adapted)
        return adapted.eval()

    def require_family(self, model: Any) -> None:
        """Refuse a model of another family than the adapter was trained on, if that is noted.

        Raises:
            UnsupportedModelError: If it is another, whose shapes may be equal.
        """
        noted = self.config.auto_mapping
        module = str(noted.get("parent_library") if isinstance(noted, dict) else None).split(".")
        found = type(model).__module__.split(".")
        if module[:2] == found[:2] == ["transformers", "models"] and module[2:3] != found[2:3]:
            raise UnsupportedModelError(
                f"adapter: expected a base of the family {quoted(module[2], is_bare=True)}, on "
                f"which it was trained, found {found[2]}; name its own base with --base"
            )

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Make PEFT's errors typed while it puts the adapter on a model.

        Raises:
            UnsupportedModelError: In place of PEFT's errors; those of Poros pass.
        """
        try:
            yield
        except PorosError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"adapter: expected one that fits the base, found {describe_error(error)}; name "
                f"its own base with --base, or fix {CONFIG}"
            ) from error

    def fill(self, adapted: Any) -> None:
        """Put the weights into a model with the adapter.

        Raises:
            UnsupportedModelError: If they are others than PEFT saves of that model, or its scaling
                is not finite.
        """
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

        unexpected = set_peft_model_state_dict(adapted, dict(self.weights)).unexpected_keys
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        missing = expected - self.weights.keys()
        strange = sorted((set(unexpected) - expected) or missing)
        if strange:
            raise UnsupportedModelError(
                f"adapter: expected in {quoted(str(self.folder / WEIGHTS))} the matrices of the "
                f"modules that {CONFIG} names, found one too {'few' if missing else 'many'}: "
                f"{quoted(strange[0])}; name its own base with --base"
            )
        for name, module in adapted.named_modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict) and not all(map(_is_finite, scaling.values())):
                raise UnsupportedModelError(
                    f"adapter: expected a finite scaling (lora_alpha, r) of {quoted(name)}, found "
                    f"{quoted(scaling)}; {_MEND}"
                )


def adapter_folder(path: Path) -> Path:
    """Find the folder of an adapter: ``path``, or ``adapter`` in the folder of a run."""
    for folder in (path, path / "adapter"):
        if os.path.isfile(folder / CONFIG) and os.path.isfile(folder / WEIGHTS):
            return folder
    raise defect(
        f"adapter: {quoted(str(path))}",
        f"expected a folder with {CONFIG} and {WEIGHTS}, or a run's, found none",
        remedy="give the folder that training has written",
    )


def _auto_class(config: Any) -> str | None:
    from transformers.models.auto import modeling_auto

    task, mapping = getattr(config.task_type, "value", config.task_type), config.auto_mapping
    if task is not None:
        return _TASKS.get(task)
    found = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    for name, each in AUTO_CLASSES.items():
        if found in getattr(modeling_auto, f"{each}_NAMES").values():
            return name
    return None


def _origin(file: Path) -> Origin | None:
    if not os.path.lexists(file):
        return None
    found = parse_json(read_small(file), file)
    return Origin.of(found, shown(file))


def _config(file: Path) -> Any:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(str(file.parent))
    except Exception as error:
        what = f"expected an adapter that PEFT knows, found {describe_error(error)}"
        raise defect(file, what, remedy=_MEND) from error


def _is_finite(value: Any) -> bool:
    """Whether a value is finite or not a number at all."""
    try:
        return not isinstance(value, int | float) or math.isfinite(value)
    except OverflowError:  # of a whole number
        return False


def _weights(file: Path) -> dict[str, torch.Tensor]:
    shard = Shard.open(file)
    found = {name: shard.read(name, entry) for name, entry in shard.header.tensors.items()}
    shard.check_unchanged()
    for name, value in found.items():
        if not (value.is_floating_point() and bool(torch.isfinite(value.float()).all())):
            raise defect(
                file,
                f"expected finite floating point, found {value.dtype} with NaN or an infinity",
                tensor=name,
                remedy=f"{_MEND}, or train it again from before the loss went wrong",
            )
    return found
