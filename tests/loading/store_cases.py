"""The table of damaged stores, as they are opened and as they are loaded."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from poros.loaders.manifest import MANIFEST, REST, SLABS
from tests.loading.damage import (
    CONFIG,
    Break,
    Case,
    about,
    config,
    cut,
    drop,
    flip,
    instead,
    kept_config,
    manifest,
    put,
    rest,
    size,
    sparse,
    text,
)
from tests.loading.model_cases import DOWN, HEAD

CODE, NESTED_CODE = f"{DOWN}.code", f"{DOWN}.nested_code"
ESCAPES = "\x1b[2J\n"


def opened(name: str, break_it: Break, says: str) -> Case:
    """Refused by ``open_store``."""
    return Case(name, "slabs", break_it, says, file=".")


def sealed(name: str, change: Callable[[dict[str, Any]], Any], says: str) -> Case:
    """What the manifest says, with a SHA-256 that fits."""
    return Case(name, "slabs", manifest(change), says, file=".")


def place(name: str, slab: int, tensor: int, field: int, value: Any, says: str) -> Case:
    """Name, dtype, shape or offset of a tensor in a slab."""
    return sealed(
        name, lambda s: s["slabs"][slab]["tensors"][tensor].__setitem__(field, value), says
    )


def first(name: str, num_bytes: Any, says: str) -> Case:
    """The size of the first slab."""
    return sealed(name, lambda s: s["slabs"][0].update(num_bytes=num_bytes), says)


def loaded(name: str, break_it: Break, says: str | None) -> Case:
    """Refused by ``poros.load``."""
    return Case(name, "store", break_it, says)


def weights(value: Any) -> Break:
    return about(weights=value)


STORES = [
    opened("no manifest", drop(MANIFEST), MANIFEST),
    opened("no slabs", drop(SLABS), SLABS),
    opened("no rest", drop(REST), REST),
    opened("no config", drop(CONFIG), CONFIG),
    opened("empty manifest", put(MANIFEST, b""), MANIFEST),
    opened("no JSON", put(MANIFEST, b"{"), MANIFEST),
    opened("other JSON", put(MANIFEST, b"[1]"), MANIFEST),
    opened("another object", put(MANIFEST, b'{"weights": 1}'), MANIFEST),
    opened("manifest cut off", cut(MANIFEST), MANIFEST),
    opened("slabs cut off", cut(SLABS), SLABS),
    opened("slabs cut to nothing", size(SLABS, lambda _: 0), SLABS),
    opened("rest cut off", cut(REST), REST),
    opened("slabs too long", size(SLABS, lambda found: found + 1), SLABS),
    opened("another slab header", text(SLABS, b"slab.00001", b"slab.00007"), SLABS),
    opened("another name in the rest", text(REST, b"norm.weight", b"norm.height"), "norm."),
    opened("another config", put(CONFIG, b"{}"), CONFIG),
    opened("manifest is a folder", instead(MANIFEST, os.mkdir), "regular file"),
    opened("slabs are a folder", instead(SLABS, os.mkdir), "regular file"),
    opened("rest is a pipe", instead(REST, os.mkfifo), "regular file"),
    opened("slabs are a loop", instead(SLABS, lambda f: f.symlink_to(SLABS)), SLABS),
    sealed("another version", lambda s: s.update(version=1), "version 1"),
    sealed("another format", lambda s: s.update(format="tar"), "'tar'"),
    sealed("an unknown key", lambda s: s.update(extra=1), "keys"),
    sealed("a missing key", lambda s: s.pop("rest"), "keys"),
    place("an unknown dtype", 0, 0, 1, "U9", "U9"),
    place("a negative offset", 0, 0, 3, -256, "-256"),
    place("a crooked offset", 0, 1, 3, 40_193, "aligned"),
    place("an overlap", 0, 1, 3, 256, "over its neighbour"),
    place("a shape beyond all bounds", 0, 0, 2, [2**40, 2**40], "size"),
    place("a tensor twice", 1, 0, 0, "layers.0.weight", "two places"),
    first("a tensor outside", 256, "tensors up to"),
    first("sizes beyond all bounds", 2**61, "bytes"),
    first("true for a size", True, "True"),
    sealed("a slab less", lambda s: s["slabs"].pop(), SLABS),
    sealed(
        "a file outside", lambda s: s["files"].update({"../config.json": "00"}), "../config.json"
    ),
    loaded("as it should be", manifest(lambda store: None), None),
    loaded("no manifest", drop(MANIFEST), MANIFEST),
    loaded("manifest of zeros", sparse(MANIFEST, 2**20), "text that is none"),
    loaded("manifest without end", sparse(MANIFEST, 10**12), "manifest_num_bytes"),
    loaded("manifest cut off", cut(MANIFEST, 100), "text that is none"),
    loaded("one bit of the manifest", flip(MANIFEST, 200), "manifest.json: expected"),
    loaded("another version", manifest(lambda s: s.update(version=9)), "of version 9"),
    loaded("another config", config(use_cache=False), "bytes changed since"),
    loaded("a config of a billion layers", kept_config(num_hidden_layers=10**9), "num_layers="),
    loaded("a config of other layers", kept_config(intermediate_size=96), "expected layer 0"),
    loaded("a config nested too deeply", kept_config(x=json.loads("[" * 99 + "]" * 99)), "levels"),
    loaded("a source with escapes", about(source=ESCAPES), None),
    loaded("a config without end", sparse(CONFIG, 10**12), "extra_num_bytes"),
    loaded("no slabs", drop(SLABS), SLABS),
    loaded("slabs of zeros", sparse(SLABS, 10**9), "expected .* bytes, found 10"),
    loaded("dtype of int8", about(dtype="int8"), "how it was made"),
    loaded("dtype is code", about(dtype="load"), "how it was made"),
    loaded("no quantization type", about(quantization={"load_in_4bit": True, "x": 1}), "layer 0"),
    loaded("quantization is a list", about(quantization=[1]), "how it was made"),
    loaded("said to be dense", about(quantization=None), "expected layer 0"),
    loaded("no weights", weights({}), "found none of"),
    loaded("weights are a list", weights([1]), "the names of its tensors"),
    loaded("weight of a dtype", weights({DOWN: ["load", 64]}), "the names of its tensors"),
    loaded("weight of block size 0", manifest(lambda s: _blocksize(s, 0)), "block"),
    loaded("weight of block size 128", manifest(lambda s: _blocksize(s, 128)), "expected shape"),
    loaded(
        "a digest with escapes",
        manifest(lambda s: s["files"].update({CONFIG: ESCAPES * 999})),
        r"digest \\x1b\[2J\\n",
    ),
    loaded("no config in it", manifest(lambda s: s["files"].pop(CONFIG)), "how it was made"),
    loaded(
        "nested code of 4",
        rest(lambda f: f.update({NESTED_CODE: f[NESTED_CODE][:4].clone()})),
        "256 entries",
    ),
    loaded("no code", rest(lambda f: f.pop(CODE)), "found it nowhere"),
    loaded(
        "an integer head",
        rest(lambda f: f.update({HEAD: f[HEAD].to(torch.int8)})),
        r"expected a tensor like torch\.bfloat16",
    ),
]


def _blocksize(store: dict[str, Any], num_elements: int) -> None:
    store["about"]["weights"][DOWN][1] = num_elements
