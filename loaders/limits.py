"""Bounds on what a checkpoint's files may ask for.

A configuration of a few bytes can ask for a billion layers, and a sparse file that takes no room on
the disk can have any length. The bounds leave room for every known model.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poros.errors import quoted
from poros.loaders.header import defect, open_regular, read_at

MAX_CONFIG_NUM_BYTES = 4 * 2**20
"""Limit for ``config.json`` and for each other file of settings."""
MAX_INDEX_NUM_BYTES = 100_000_000
"""Limit for the index of a sharded checkpoint."""
MAX_AUXILIARY_NUM_BYTES = 256 * 2**20
"""Limit for each tokenizer file, and each other small file that goes into a store."""

# What is built once per unit: "num_hidden_layers", "n_layer", "decoder_layers", "depth".
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depths?|stages?)$")
_EXPERTS = re.compile(r"(^|_)experts$")
_MOST = {_LAYERS: 4096, _EXPERTS: 200_000, re.compile(r"(^|_)labels$"): 100_000}
"""The largest numbers in a configuration, by the ends of their names."""
_MAX_DEPTH = 64
"""The deepest nesting of a configuration; those of models have up to five levels."""


def read_small(file: Path, most: int = MAX_CONFIG_NUM_BYTES) -> bytes:
    """Read a file of at most ``most`` bytes."""
    with open_regular(file) as (descriptor, status):
        if not 0 < status.st_size <= most:
            kind = " of JSON" if file.suffix == ".json" else ""
            raise defect(file, f"expected 1 to {most} bytes{kind}, found {status.st_size}")
        return bytes(read_at(descriptor, status.st_size, 0, file))


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
