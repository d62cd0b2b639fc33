"""The table of damaged stores, as they are opened and as they are loaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.loaders.manifest import REST, SLABS
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
    manifest_text,
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
    """Name, dtype or shape of a tensor in a slab."""
    return sealed(name, lambda s: s["layouts"][slab][tensor].__setitem__(field, value), says)


def loaded(name: str, break_it: Break, says: str | None) -> Case:
    """Refused by ``poros.load``."""
    return Case(name, "store", break_it, says)


def weights(value: Any) -> Break:
    return about(weights=value)


def bare(folder: Path) -> None:
    """The tensors without a manifest, as releases before version 4 wrote them."""
    save_file(load_file(folder / REST), folder / REST)


STORES = [
    opened("no manifest", bare, "version None.*poros load"),
    opened("no slabs", drop(SLABS), SLABS),
    opened("no rest", drop(REST), REST),
    opened("no config", drop(CONFIG), CONFIG),
    opened("empty rest", put(REST, b""), REST),
    opened("empty manifest", manifest_text(""), REST),
    opened("no JSON", manifest_text("{"), REST),
    opened("other JSON", manifest_text("[1]"), REST),
    opened("another object", manifest_text('{"weights": 1}'), REST),
    opened("slabs cut off", cut(SLABS), SLABS),
    opened("slabs cut to nothing", size(SLABS, lambda _: 0), SLABS),
    opened("rest cut off", cut(REST), REST),
    opened("slabs too long", size(SLABS, lambda found: found + 1), SLABS),
    opened("another slab header", text(SLABS, b"slab.00001", b"slab.00007"), SLABS),
    opened("another name in the rest", text(REST, b"norm.weight", b"norm.height"), REST),
    opened("another config", put(CONFIG, b"{}"), CONFIG),
    opened("rest is a folder", instead(REST, os.mkdir), "regular file"),
    opened("slabs are a folder", instead(SLABS, os.mkdir), "regular file"),
    opened("rest is a pipe", instead(REST, os.mkfifo), "regular file"),
    opened("slabs are a loop", instead(SLABS, lambda f: f.symlink_to(SLABS)), SLABS),
    opened("another version", manifest(lambda s: None, version="1"), "version '1'.*poros load"),
    opened("another format", manifest(lambda s: None, format="tar"), "'tar'"),
    sealed("an unknown key", lambda s: s.update(extra=1), "extra"),
    sealed("a missing key", lambda s: s.pop("about"), "about"),
    place("an unknown dtype", 0, 0, 1, "U9", "U9"),
    place("a negative size", 0, 0, 2, [-256], "-256"),
    place("true for a size", 0, 0, 2, [True], "True"),
    place("a shape beyond all bounds", 0, 0, 2, [2**40, 2**40], REST),
    place("sizes beyond all bounds", 0, 0, 2, [2**61], f"{SLABS}.*bytes"),
    place("a name that is no text", 0, 0, 0, 7, "the tensor 7"),
    sealed("a digest that is no text", lambda s: s["slab_digests"].insert(0, 7), "digest"),
    sealed("a digest less", lambda s: s["slab_digests"].pop(), "digest"),
    sealed("a slab less", lambda s: [s["layouts"].pop(), s["slab_digests"].pop()], SLABS),
    sealed(
        "a file outside", lambda s: s["files"].update({"../config.json": "00"}), "../config.json"
    ),
    loaded("as it should be", manifest(lambda store: None), None),
    loaded("no rest", drop(REST), REST),
    loaded("rest of zeros", sparse(REST, 2**20, bytes(1)), "begins with"),
    loaded("rest without end", size(REST, lambda _: 10**12), "expected the file to end"),
    loaded("a header without end", sparse(REST, 10**12, b"\0\0\0\0\1"), "at most 100000000"),
    loaded("one bit of the manifest", flip(REST, 200), f"{REST}: expected"),
    loaded("another version", manifest(lambda s: None, version="9"), "of version '9'.*poros load"),
    loaded(
        "a tensor twice",
        manifest(lambda s: s["layouts"][1][0].__setitem__(0, s["layouts"][0][0][0])),
        "expected layer 1",
    ),
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
