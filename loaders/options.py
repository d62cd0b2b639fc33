"""The options of ``poros.load``: each is honoured, or refused by its name.

An option that is not set differs from one that is set to the default: only what was set can
contradict the store or the checkpoint that is opened.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import torch

from poros.errors import PolicyError, quoted
from poros.kernels.nf4 import QUANT_TYPES, Format, double_quantization
from poros.loaders.settings import AUTO_CLASSES
from poros.utils.devices import default_device, usable_device

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    from poros.loaders.store import About


class Unset(Enum):
    """The type of ``UNSET``."""

    UNSET = "default"

    def __repr__(self) -> str:
        return "<default>"


UNSET: Final = Unset.UNSET
"""The default of an option that a store or a checkpoint may answer."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that a model can be loaded in."""

_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")

_SEE = "leave it out, and see device, store and host_budget"
_REFUSED = {
    "trust_remote_code": "code from a checkpoint is never run; install a release of transformers "
    "that knows the model",
    "use_safetensors": "a pickle can run code and is never opened; convert the checkpoint to "
    "safetensors",
    "config": "pass the fields that differ, such as rope_parameters={...}",
    "gguf_file": "load the safetensors checkpoint that the GGUF file was made from",
    "torch_dtype": "pass dtype",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "pass quantization='nf4'"),
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "low_cpu_mem_usage"), _SEE),
}
"""Refused before anything is fetched, with what to do instead. Any other argument that is no field
of the configuration is refused as such."""
_HOLDS = {"trust_remote_code": False, "use_safetensors": True, "low_cpu_mem_usage": True}
"""Values of these that hold anyway; None does too."""


@dataclass(frozen=True)
class LoadOptions:
    """The options of one call, checked as far as that needs no file."""

    quantization: Any
    dtype: "torch.dtype | str | Unset"
    device: torch.device | str | None
    hub: Mapping[str, Any]
    """Arguments of ``huggingface_hub.snapshot_download``."""
    vision: str | None = None
    """``"keep"`` or ``"drop"``."""
    auto_class: str | None = None
    """A name of ``AUTO_CLASSES``."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to change."""

    @classmethod
    def of(
        cls,
        quantization: Any,
        dtype: Any,
        device: torch.device | str | None,
        others: Mapping[str, Any],
        vision: Any = None,
        auto_class: Any = None,
    ) -> "LoadOptions":
        """Parse the arguments of ``poros.load``."""
        left = dict(others)
        if vision not in (None, "keep", "drop"):
            raise PolicyError(f"vision: expected 'keep' or 'drop', found {quoted(vision)}")
        if "quantization_config" in left:
            if quantization is not UNSET:
                raise PolicyError(
                    "quantization_config: expected it or quantization, found both; leave one out"
                )
            quantization = left.pop("quantization_config")
        _refuse(left)
        hub = {key: left.pop(key) for key in _HUB if key in left}
        chosen = _auto_class(auto_class)
        options = cls(quantization, loadable_dtype(dtype), device, hub, vision, chosen, left)
        if quantization is not UNSET:
            options.wanted(torch.bfloat16)  # refused here if it makes no sense
        return options

    @property
    def chosen_dtype(self) -> torch.dtype:
        """The dtype to load in, unless it is "auto"."""
        return self.dtype if isinstance(self.dtype, torch.dtype) else torch.bfloat16

    def wanted(self, dtype: torch.dtype) -> "BitsAndBytesConfig | None":
        """The quantization for a dense checkpoint."""
        quantization = "nf4" if self.quantization is UNSET else self.quantization
        return bits_and_bytes(quantization, dtype)

    def require_format(self, stored: "BitsAndBytesConfig | None", where: str) -> None:
        """Refuse another quantization than a checkpoint has already, if one was asked for."""
        if self.quantization is UNSET:
            return
        wanted = self.wanted(self.chosen_dtype)
        if isinstance(self.quantization, str) or wanted is None or stored is None:
            same = format_of(wanted) == format_of(stored)
        else:
            same = _comparable(wanted) == _comparable(stored)
        if not same:
            raise PolicyError(
                f"quantization: expected that of {where}, which is quantized already "
                f"({format_of(stored)}), found {quoted(self.quantization)}; leave it out, or load "
                "the checkpoint that it was made from"
            )

    def require_store(self, about: "About", where: str) -> None:
        """Refuse a store that was made with other options than the ones that are set."""
        dtype = about.dtype
        expected: dict[str, Any] = {"vision": self.vision, "auto_class": self.auto_class}
        expected = {name: value for name, value in expected.items() if value is not None}
        if isinstance(self.dtype, torch.dtype):
            expected["dtype"] = dtype_name(self.dtype)
            dtype = expected["dtype"]
        if self.quantization is not UNSET and not about.is_prequantized:
            wanted = self.wanted(getattr(torch, dtype))
            expected["quantization"] = wanted and wanted.to_dict()
        if self.device is not None and about.quantization and not about.is_prequantized:
            expected["device"] = device_name(quantizing_device(self.device))
        for name, value in expected.items():
            found = getattr(about, name)
            if found != value:
                if isinstance(found, dict) and isinstance(value, dict):
                    value = {each: value[each] for each in value if value[each] != found.get(each)}
                    found = {each: found.get(each) for each in value}
                raise PolicyError(
                    f"store: expected one with {name} {quoted(value)}, found {where} with "
                    f"{quoted(found)}; choose another folder, or pass what it was made with"
                )

    def refuse_for_a_folder(self, source: "str | os.PathLike[str]") -> None:
        """Refuse options of the hub for what lies on this machine."""
        for name in ("revision", "force_download"):
            is_set = self.hub.get(name) not in (None, False, "main")
            if is_set and os.path.lexists(source):
                raise PolicyError(
                    f"{name}: expected it with a hub repository; {quoted(os.fspath(source))} is a "
                    f"local path, found {quoted(self.hub[name])}; leave it out"
                )


def format_of(config: "BitsAndBytesConfig | None") -> Format | None:
    """Return the memory format of 4-bit weights under a configuration."""
    if config is None:
        return None
    return Format(
        config.bnb_4bit_quant_type,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_storage,
    )


def quantizing_device(device: torch.device | str | None) -> torch.device:
    """Choose where to quantize; None is the current GPU, or the CPU if there is none."""
    return default_device() if device is None else usable_device(device)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The name of the quantizing device in a store: bytes may depend on it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _refuse(options: dict[str, Any]) -> None:
    """Refuse options that cannot be honoured; drop those that hold anyway."""
    for name, value in _HOLDS.items():
        if options.get(name) in (None, value):
            options.pop(name, None)
    for name in sorted(_REFUSED.keys() & options.keys()):
        expected = _HOLDS.get(name, "options of from_pretrained that poros.load honours")
        raise PolicyError(
            f"{name}: expected {expected}, found {quoted(options[name])}; {_REFUSED[name]}"
        )


def loadable_dtype(value: Any) -> "torch.dtype | str | Unset":
    """Parse a dtype to load in."""
    if value is UNSET or value == "auto":
        return "auto" if value == "auto" else UNSET
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype) and dtype in DTYPES:
        return dtype
    names = ", ".join(map(dtype_name, DTYPES))
    raise PolicyError(f"dtype: expected {names} or 'auto', found {quoted(value)}")


def _auto_class(value: Any) -> str | None:
    if value is None:
        return None
    name = getattr(value, "__name__", value)
    if not isinstance(name, str) or name not in AUTO_CLASSES:
        raise PolicyError(
            f"auto_class: expected transformers' {' or '.join(AUTO_CLASSES)}, found "
            f"{quoted(name)}; leave it out for a language model"
        )
    return name


def bits_and_bytes(quantization: Any, dtype: torch.dtype) -> "BitsAndBytesConfig | None":
    """Return the 4-bit configuration that ``quantization`` asks for; None for dense weights."""
    if quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    if isinstance(quantization, str) and quantization in QUANT_TYPES:
        return double_quantization(dtype, quantization)
    if isinstance(quantization, BitsAndBytesConfig) and quantization.load_in_4bit:
        return copy.deepcopy(quantization)
    if isinstance(quantization, BitsAndBytesConfig):
        quantization = "a BitsAndBytesConfig of 8 bits"
    raise PolicyError(
        "quantization: expected 'nf4', 'fp4', a 4-bit BitsAndBytesConfig or None, found "
        f"{quoted(quantization)}; no other format can be streamed"
    )


def _comparable(config: "BitsAndBytesConfig") -> object:
    skipped = config.llm_int8_skip_modules
    return format_of(config), config.bnb_4bit_compute_dtype, skipped and sorted(skipped)
