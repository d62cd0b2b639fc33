"""Bounds on what a checkpoint's files may ask for.

A configuration of a few bytes can ask for a billion layers, and a file that takes no room on the
disk can be as long as it likes. Each bound here has a name, which its error shows,
and can be raised: ``poros.load(..., limits=poros.Limits(num_layers=10_000))``.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from poros.errors import PolicyError, quoted
from poros.loaders.header import defect, open_regular, read_at

MAX_DEPTH = 64
"""The deepest nesting of a configuration; those of models have up to five levels."""

# What is built once per unit: "num_hidden_layers", "n_layer", "decoder_layers", "depth".
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depths?|stages?)$")
_EXPERTS = re.compile(r"(^|_)experts$")
_LABELS = re.compile(r"(^|_)labels$")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what a checkpoint may ask for. The defaults leave room for every known model.

    Args:
        config_num_bytes: Of ``config.json`` and ``generation_config.json``, each.
        index_num_bytes: Of the index of a sharded checkpoint.
        extra_num_bytes: Of a tokenizer file, or another small file that goes into a store, each.
        num_layers: Decoder layers, and whatever else a configuration counts as layers or stages.
        num_experts: Experts of all layers together.
        num_labels: Labels of a classifier, each of which gets a name.

    Raises:
        PolicyError: If one is no positive whole number.
    """

    config_num_bytes: int = 4 * 2**20
    index_num_bytes: int = 100_000_000
    extra_num_bytes: int = 256 * 2**20
    num_layers: int = 4096
    num_experts: int = 200_000
    num_labels: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PolicyError(
                    f"limits: expected {field.name} as a positive whole number, found {value!r}"
                )

    def read(self, file: Path, limit: str) -> bytes:
        """Read a small file that is no larger than the limit of that name.

        Raises:
            CheckpointFormatError: If it is empty, larger, unreadable or no regular file.
        """
        descriptor, status = open_regular(file)
        try:
            most = getattr(self, limit)
            if not 0 < status.st_size <= most:
                kind = " of JSON" if file.suffix == ".json" else ""
                raise defect(
                    file,
                    f"expected 1 to {most} bytes{kind}, found {status.st_size}",
                    remedy=f"fetch it again{_or_raise(limit) if status.st_size else ''}",
                )
            return read_at(descriptor, status.st_size, 0, file)
        finally:
            os.close(descriptor)

    def require_config(self, config: Mapping[str, Any], file: Path) -> None:
        """Refuse a configuration that exceeds the limits.

        Raises:
            CheckpointFormatError: If it does; the message names the field and the limit.
        """
        most = {"layers": 1, "experts": 1}
        for name, value in _items(config, file):
            kind = None
            if _LABELS.search(name):
                self._require(name, value, "num_labels", file)
            elif _LAYERS.search(name):
                kind = "layers"
            elif _EXPERTS.search(name):
                kind = "experts"
            if kind is None:
                continue
            self._require(name, value, f"num_{kind}", file)
            if type(value) is int:
                most[kind] = max(most[kind], value)
        together = most["layers"] * most["experts"]
        if most["experts"] > 1:
            self._require("layers times experts", together, "num_experts", file)

    def _require(self, name: str, value: Any, limit: str, file: Path) -> None:
        most = getattr(self, limit)
        if isinstance(value, int | float) and value > most:
            raise defect(
                file,
                f"expected {quoted(name, is_bare=True)} of at most {most}, found {quoted(value)}",
                remedy=f"check the file{_or_raise(limit)}",
            )


def checked_limits(limits: object) -> Limits:
    """Return the given bounds, or the defaults.

    Raises:
        PolicyError: If it is something else.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise PolicyError(f"limits: expected poros.Limits, found {quoted(limits)}")
    return limits or Limits()


def _or_raise(limit: str) -> str:
    return f", or raise the bound with limits=poros.Limits({limit}=...)"


def _items(value: Any, file: Path, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration, nested ones too; items of a list have its name."""
    if depth > MAX_DEPTH:
        raise defect(file, f"expected at most {MAX_DEPTH} levels, found it nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _items(inner, file, str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _items(inner, file, name, depth + 1)
    else:
        yield name, value
