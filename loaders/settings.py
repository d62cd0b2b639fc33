"""Parses a model's settings from texts: configuration, generation, quantization.

transformers reads them from a folder. It gets a temporary folder with the very texts that were
checked (and that a store keeps), so that a file which changes meanwhile changes nothing. This
happens before any weight is read, so that errors in them come early.

A configuration of a few bytes can ask for a billion layers; the bounds here leave room for every
known model.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from poros.errors import PolicyError, UnsupportedModelError, quoted
from poros.kernels.nf4 import QUANT_TYPES
from poros.loaders.header import defect, parse_json, shown
from poros.loaders.source import CONFIG, GENERATION

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedConfig

CLASSIFIER = "AutoModelForSequenceClassification"
AUTO_CLASSES = {
    "AutoModel": "MODEL_MAPPING",
    CLASSIFIER: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
"""Auto classes for other models than language models, with the mapping that each looks up."""

_MAX_SAID = 10_000  # characters that are looked at

# What is built once per unit: "num_hidden_layers", "n_layer", "decoder_layers", "depth".
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depths?|stages?)$")
_EXPERTS = re.compile(r"(^|_)experts$")
_MOST = {_LAYERS: 4096, _EXPERTS: 200_000, re.compile(r"(^|_)labels$"): 100_000}
"""The largest numbers in a configuration, by the ends of their names."""
_MAX_DEPTH = 64
"""The deepest nesting of a configuration; those of models have up to five levels."""

# transformers takes these for any configuration, whether it has such a field or not.
_ALWAYS_FIELDS = frozenset(
    (
        "attn_implementation",
        "experts_implementation",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "tie_word_embeddings",
        "use_cache",
    )
)


def configuration(
    path: Path,
    texts: Mapping[str, bytes],
    options: Mapping[str, Any],
) -> "PreTrainedConfig":
    """Parse the configuration of a checkpoint, with those options that are its fields.

    Args:
        path: Folder of the checkpoint, for messages and as the model's name.
        options: Fields of the configuration to change.

    Raises:
        CheckpointFormatError: If transformers makes no configuration of it, or it asks for more
            than the bounds allow.
        PolicyError: If an option is no field of the configuration.
    """
    fields = parse_json(texts[CONFIG], path / CONFIG, strict=False)
    require_bounded({**fields, **options}, path / CONFIG)
    with _folder_of(texts) as folder:
        config = _parsed(path, folder, {})
        _refuse_hub_kernels(path, config)
        if options:
            known = config.to_dict().keys() | config.attribute_map.keys() | _ALWAYS_FIELDS
            unknown = sorted(options.keys() - known)
            if unknown:
                raise PolicyError(
                    f"{quoted(', '.join(unknown), is_bare=True)}: found neither an option of "
                    f"poros.load nor a field of {type(config).__name__}; leave it out"
                )
            config = _parsed(path, folder, options)
    config.name_or_path = str(path)
    return config


def require_bounded(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a configuration that asks for more than the bounds allow."""
    most = dict.fromkeys(_MOST, 1.0)
    for name, value in _items(config, file):
        for pattern, bound in _MOST.items():
            if isinstance(value, int | float) and pattern.search(name):
                _require_at_most(bound, name, value, file)
                most[pattern] = max(most[pattern], value)
    product = most[_LAYERS] * most[_EXPERTS]
    _require_at_most(_MOST[_EXPERTS], "layers times experts", int(product), file)


def _require_at_most(most: int, name: str, value: float, file: Path) -> None:
    if value > most:
        raise defect(
            file,
            f"expected {quoted(name, is_bare=True)} of at most {most}, found {quoted(value)}",
            remedy="check the file",
        )


def _items(value: Any, file: Path, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration, nested ones too; items of a list have its name."""
    if depth > _MAX_DEPTH:
        raise defect(file, f"expected at most {_MAX_DEPTH} levels, found it nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _items(inner, file, str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _items(inner, file, name, depth + 1)
    else:
        yield name, value


def _refuse_hub_kernels(path: Path, config: Any) -> None:
    """Refuse an attention that transformers would fetch from the hub and run."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        found = getattr(part, "_attn_implementation", None)
        if isinstance(found, str) and "/" in found:
            raise defect(
                path / CONFIG,
                f"expected an attention that is installed, found a kernel of the hub, "
                f"{quoted(found)}",
                remedy="remove attn_implementation from the file",
            )


def generation_settings(path: Path, texts: Mapping[str, bytes]) -> "GenerationConfig":
    """Parse the generation settings, from their file or from the configuration."""
    from transformers import GenerationConfig

    name = GENERATION if GENERATION in texts else CONFIG
    if name == GENERATION:
        parse_json(texts[name], path / name, strict=False)
    options = {} if name == GENERATION else {"config_file_name": CONFIG, "_from_model_config": True}
    with _folder_of(texts) as folder:
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True, **options)
        except Exception as error:
            raise defect(
                path / name,
                "expected settings of generation that transformers takes, found "
                f"{describe_error(error)}",
                remedy="fix the file, or remove it to use the defaults",
            ) from error
    return generation


def stored_quantization(path: Path, config: Any) -> "BitsAndBytesConfig | None":
    """Take the quantization of the checkpoint out of its configuration.

    Raises:
        CheckpointFormatError: If it makes no sense.
        UnsupportedModelError: If the weights are quantized, but not to 4 bits by bitsandbytes.
    """
    from transformers import BitsAndBytesConfig

    stored: Any = None
    for owner in (config, config.get_text_config(decoder=True)):
        settings = getattr(owner, "quantization_config", None)
        if settings is not None:
            stored = stored or settings
            del owner.quantization_config
    if not stored:
        return None
    if not isinstance(stored, dict):
        raise defect(path / CONFIG, f"expected a quantization_config, found {quoted(stored)}")
    method = stored.get("quant_method")
    if method not in (None, "bitsandbytes") or not stored.get("load_in_4bit"):
        kind = "8 bits of bitsandbytes" if stored.get("load_in_8bit") else quoted(method)
        raise UnsupportedModelError(
            f"{shown(path / CONFIG)}: expected weights that are dense or 4-bit of bitsandbytes, "
            f"found quantization_config of {kind}; load the checkpoint that it was made from, "
            "which Poros quantizes itself"
        )
    try:
        quantization = BitsAndBytesConfig.from_dict(stored)
    except Exception as error:
        raise defect(
            path / CONFIG, f"expected a quantization_config, found {describe_error(error)}"
        ) from error
    if quantization.bnb_4bit_quant_type not in QUANT_TYPES:
        raise defect(
            path / CONFIG,
            "expected bnb_4bit_quant_type 'nf4' or 'fp4', found "
            f"{quoted(quantization.bnb_4bit_quant_type)}",
        )
    return quantization


def model_class_of(config: Any, auto_class: str | None = None) -> tuple[Any, Any]:
    """Choose the model class of a checkpoint, and return it with its configuration.

    That is the one with a vision tower if ``architectures`` names it, else what
    ``AutoModelForCausalLM`` chooses, else what ``AutoModelForImageTextToText`` does.

    Args:
        auto_class: A name of ``AUTO_CLASSES``, which chooses instead.

    Raises:
        UnsupportedModelError: If transformers has none.
    """
    from transformers.models.auto import modeling_auto

    named: list[Any] = []
    if auto_class is not None:
        classes = _classes(getattr(modeling_auto, AUTO_CLASSES[auto_class]), config)
    else:
        text_classes = _classes(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, config)
        with_towers = _classes(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)
        every, names = [*with_towers, *text_classes], config.architectures or ()
        named = [candidate for candidate in every if candidate.__name__ in names]
        classes = text_classes or every
    if not classes:
        wanted = "a causal language model of transformers" if auto_class is None else auto_class
        raise UnsupportedModelError(
            f"expected {wanted}, found model_type {quoted(config.model_type)}, which has none"
        )
    chosen = (named or classes)[0]
    text_class = getattr(config, "sub_configs", {}).get("text_config")
    if text_class is not None and chosen.config_class == text_class:
        config = config.get_text_config()
    return chosen, config


def classifier_of(config: Any) -> Any:
    """The class of a classifier or reward model that ``architectures`` names; None if none."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return known if known and known.__name__ in (config.architectures or ()) else None


def refuse_classifier(config: "PreTrainedConfig", path: Path) -> None:
    """Refuse to drop the head of a classifier without a word, by UnsupportedModelError."""
    known = classifier_of(config)
    if known is not None:
        raise UnsupportedModelError(
            f"{shown(path / CONFIG)}: expected a language model, found architectures of "
            f"{known.__name__}; pass auto_class=AutoModelForSequenceClassification to poros.load, "
            "or train it by `poros finetune` with method reward (--method reward)"
        )


def refuse_code(error: BaseException, source: str) -> None:
    """Raise if transformers would have to run code that came with the files.

    Args:
        error: What transformers raised under ``trust_remote_code=False``.
        source: The folder or the name on the hub that it was reading.

    Raises:
        UnsupportedModelError: If that is why.
    """
    if "trust_remote_code" in str(error):
        raise UnsupportedModelError(
            f"{source}: expected files that transformers reads by itself, found that they bring "
            "code of their own (auto_map), which is never run; install a release of transformers "
            "that knows this model, or take another one"
        ) from error


def _classes(mapping: Any, config: Any) -> list[Any]:
    found = mapping.get(type(config), [])
    return list(found) if isinstance(found, list | tuple) else [found]


def describe_error(error: BaseException) -> str:
    """Format another library's error, bounded, on one line."""
    text = " ".join(str(error)[:_MAX_SAID].split())
    return f"{type(error).__name__}: {quoted(text, is_bare=True, limit=400)}"


def _parsed(path: Path, folder: str, options: Mapping[str, Any]) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        config, _ = AutoConfig.from_pretrained(
            folder,
            return_unused_kwargs=True,
            local_files_only=True,
            # Left open, transformers would ask on the terminal.
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        refuse_code(error, shown(path))
        what = describe_error(error).replace(folder, shown(path))
        if options:
            raise PolicyError(
                f"{', '.join(sorted(options))}: expected values that the configuration takes, "
                f"found {what}"
            ) from error
        raise defect(
            path / CONFIG,
            f"expected the configuration of a model that transformers knows, found {what}",
            remedy="check the file, and the release of transformers",
        ) from error
    parsed: PreTrainedConfig = config
    return parsed


@contextmanager
def _folder_of(texts: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a temporary folder with the configuration files alone."""
    with TemporaryDirectory(prefix="poros-settings-") as folder:
        for name in (CONFIG, GENERATION):
            if name in texts:
                (Path(folder) / name).write_bytes(texts[name])
        yield folder
