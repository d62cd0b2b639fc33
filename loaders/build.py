"""What is asked of transformers: configuration, model class, and a model filled by an intake."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import UnsupportedModelError
from poros.loaders.checkpoint import Checkpoint, CheckpointSlice
from poros.loaders.header import defect
from poros.loaders.intake import Intake

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

_MAX_NAMED = 5
_REMEDY = "check that config.json and weights belong together"


def configuration(path: Path, options: dict[str, Any]) -> tuple["PreTrainedConfig", dict[str, Any]]:
    """The configuration, changed by those options that are its fields, and the other options."""
    from transformers import AutoConfig

    try:
        config, rest = AutoConfig.from_pretrained(
            path,
            return_unused_kwargs=True,
            local_files_only=True,
            # Left open, transformers would ask on the terminal.
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        raise defect(
            path / "config.json",
            "expected the configuration of a model that transformers knows, found "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="check the file, and the release of transformers",
        ) from error
    return config, rest


def stored_quantization(path: Path, config: Any) -> "BitsAndBytesConfig | None":
    """Take the quantization of the checkpoint out of its configuration."""
    from transformers import BitsAndBytesConfig

    found = None
    for each in (config, config.get_text_config(decoder=True)):
        stored = getattr(each, "quantization_config", None)
        if stored is not None:
            found = found or stored
            del each.quantization_config
    if not found:
        return None
    if not isinstance(found, dict):
        found = found.to_dict()
    if not found.get("load_in_4bit"):
        raise UnsupportedModelError(
            f"{path / 'config.json'}: expected weights that are dense or 4-bit of bitsandbytes, "
            f"found quantization_config of {found.get('quant_method')!r}; load a checkpoint that "
            "is not quantized"
        )
    try:
        return BitsAndBytesConfig.from_dict(found)
    except (TypeError, ValueError, AttributeError) as error:
        raise defect(
            path / "config.json", f"expected a quantization_config, found {error}"
        ) from error


def model_class_of(config: Any) -> tuple[Any, Any]:
    """The class that ``AutoModelForCausalLM`` would choose, and the configuration it takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            "expected a causal language model of transformers, found model_type "
            f"{config.model_type!r}, which has none"
        )
    chosen = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(chosen, list | tuple):
        named = [each for each in chosen if each.__name__ in (config.architectures or ())]
        chosen = (named or list(chosen))[0]
    text_class = getattr(config, "sub_configs", {}).get("text_config")
    if text_class is not None and chosen.config_class == text_class:
        config = config.get_text_config()
    return chosen, config


def fill(
    model_class: Any,
    intake: Intake,
    quantization: Any,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
) -> "PreTrainedModel":
    """Have transformers build a model and hand its tensors to ``intake``.

    Args:
        model_class: Of the model.
        intake: Known to transformers already.
        quantization: What ``poros.loaders.seam.reading_into`` yielded.
        tensors: Slices by name.
        options: Of ``from_pretrained``.

    Raises:
        CheckpointFormatError: If tensors are missing or left over, or do not fit.
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
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise  # out of memory, say
        raise defect(
            str(intake.path),
            "expected tensors that fit the configuration, found that transformers could not "
            f"convert them: {error}",
            remedy=_REMEDY,
        ) from error
    _require_complete(str(intake.path), info, intake.layers_name)
    return model


def _require_complete(path: str, info: dict[str, Any], layers_name: str) -> None:
    """Refuse what ``from_pretrained`` would fill with random numbers or leave out of a layer."""
    for name, found, expected in sorted(info["mismatched_keys"], key=str):
        raise defect(
            path,
            f"expected shape {tuple(expected)} for this configuration, found {tuple(found)}",
            tensor=name,
            remedy=_REMEDY,
        )
    surplus = [each for each in info["unexpected_keys"] if each.startswith(f"{layers_name}.")]
    for names, what in ((info["missing_keys"], "none of"), (surplus, "tensors without use:")):
        if names:
            named = ", ".join(sorted(names)[:_MAX_NAMED])
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise defect(
                path,
                f"expected the tensors of the configuration, found {what} {named}{more}",
                remedy=_REMEDY,
            )


def add_generation_config(
    model: Any, path: Path, options: dict[str, Any], *, is_there: bool = True
) -> None:
    """What ``from_pretrained`` reads beside the weights.

    Args:
        model: Gets it.
        path: The folder.
        options: Of ``from_pretrained``.
        is_there: False to look at no file but ``config.json``.
    """
    from transformers import GenerationConfig

    if not model.can_generate() or options.get("generation_config") is not None:
        return
    try:
        if not is_there:
            raise FileNotFoundError(path)
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        model.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )


class _Noted:
    """A slice of the checkpoint that says when it has been read."""

    def __init__(self, slice: CheckpointSlice, note: Callable[[], None]) -> None:
        self._slice = slice
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._slice[index]
        self._note()
        return tensor


@contextmanager
def progress(
    checkpoint: Checkpoint,
) -> Iterator[tuple[dict[str, _Noted], Callable[[], None]]]:
    """A progress bar in bytes in place of transformers' own in tensors.

    Yields:
        The slices of the checkpoint, and what to call when all that was read so far is taken.
    """
    from tqdm.auto import tqdm

    read: list[str] = []

    def note(name: str) -> None:
        read.append(name)
        bar.update(checkpoint.entry(name).num_bytes)

    def after_each() -> None:
        while read:
            checkpoint.done_with(read.pop())

    with (
        quiet() as was_enabled,
        tqdm(
            total=checkpoint.num_bytes,
            desc="poros: loading",
            unit="B",
            unit_scale=True,
            disable=not was_enabled,
        ) as bar,
    ):
        slices = checkpoint.slices()
        yield {name: _Noted(each, _bind(note, name)) for name, each in slices.items()}, after_each


@contextmanager
def quiet() -> Iterator[bool]:
    """Switch transformers' progress bars off inside the body; yields whether they were on."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield was_enabled
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _bind(note: Callable[[str], None], name: str) -> Callable[[], None]:
    return lambda: note(name)
