"""The tables of damaged files, headers, indexes, configurations, and of damaged stores."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.loaders.header import MAX_HEADER_NUM_BYTES as MAX
from poros.loaders.manifest import REST, SLABS
from tests.loading.checkpoints import FIRST, INDEX, SECOND, entry, good_tensors, write_index
from tests.loading.damage import (
    CONFIG,
    Break,
    Case,
    about,
    both,
    config,
    cut,
    drop,
    flip,
    header,
    instead,
    kept_config,
    manifest,
    manifest_text,
    one,
    pickled,
    put,
    rest,
    size,
    sparse,
    text,
)
from tests.loading.model_cases import DOWN, HEAD

NAMES = list(good_tensors())
LAST, ANOTHER = NAMES[3], "other.safetensors"
SAME = f'{{"weight_map":{{"a":"{FIRST}","a":"{SECOND}"}}}}'.encode()
RIGHT_MAP = {name: FIRST if name in NAMES[:2] else SECOND for name in NAMES}
DEEP = b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ALL_WEIGHTS = (FIRST, SECOND, INDEX)
ONE, OTHER = entry(shape=[1], offsets=[0, 4]), entry(shape=[1], offsets=[4, 8])
TWO = {"t": ONE, "u": OTHER}
MORE = sparse(SECOND, MAX + 10, (MAX + 1).to_bytes(8, "little"))
TWICE = b'{"t":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def copied(folder: Path) -> None:
    """The first shard is in the place of the second too."""
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())


def called(name: str) -> Break:
    """A shard has another name."""
    return lambda folder: (folder / SECOND).replace(folder / name)


def shard(name: str, break_it: Break, says: str, tensor: str | None = None) -> Case:
    return Case(name, "files", break_it, says, SECOND, tensor)


def index(name: str, break_it: Any, says: str, tensor: str | None = None) -> Case:
    """Or entries of the index that are changed; None leaves the tensor out."""

    def change(folder: Any) -> None:
        files = {key: file for key, file in (RIGHT_MAP | break_it).items() if file is not None}
        write_index(folder, files)

    made = change if isinstance(break_it, dict) else break_it
    return Case(f"index {name}", "files", made, says, INDEX, tensor)


def named(weights: Any) -> Break:
    """A configuration that names them."""
    return config(transformers_weights=weights)


def settings(name: str, break_it: Break, says: str) -> Case:
    return Case(f"configuration {name}", "files", break_it, says, CONFIG)


def source(name: str, break_it: Break, says: str, opened: str = ".", file: str = "") -> Case:
    return Case(name, "files", break_it, says, file or opened, source=opened)


FILES = [
    # The file around the header.
    shard("empty file", put(SECOND, b""), "found an empty one"),
    shard("seven bytes", put(SECOND, bytes(7)), "at least 8 bytes, found 7"),
    shard("length beyond the file", header({}, length=10**6), "header length of 1000000"),
    shard("length of 64 ones", header({}, length=2**64 - 1), f"length of {2**64 - 1}"),
    shard("header over the limit", MORE, f"at most {MAX}, found a header length of {MAX + 1}"),
    shard("cut in the header", size(SECOND, lambda _: 40), "header length of"),
    shard("cut in the data", cut(SECOND), "the file is cut off", LAST),
    shard("bytes after the data", header(TWO, bytes(9)), "end with its last tensor"),
    shard("archive of a pickle", put(SECOND, b"PK\x03\x04" + bytes(90)), "found a pickle"),
    shard("bare pickle", pickled(SECOND), "found a pickle"),
    shard("pointer of git lfs", put(SECOND, LFS), "the pointer that git leaves"),
    # The header as JSON.
    shard("space before", header(b' {"t":0}'), r"begins with '{', found b' {"),
    shard("array", header(b"[]"), r"begins with '{', found b'\[\]'"),
    shard("no JSON", header(b'{"t":'), "found text that is none"),
    shard("text after the object", header(b"{} x"), "Extra data"),
    shard("no UTF-8", header(b'{"\xff":0}'), "can't decode byte 0xff"),
    shard("nested deeply", header(DEEP), "nested too deeply"),
    shard("NaN", header(b'{"t":NaN}'), "NaN is not JSON"),
    shard("number of 5000 digits", header(b'{"t":' + b"9" * 5000 + b"}"), "4300 digits"),
    shard("unpaired surrogate", header(b'{"\\ud800":{}}'), "surrogates not allowed"),
    shard("tensor twice", header(b'{"t":{},"t":{}}'), "found 't' more than once"),
    shard("dtype twice", header(TWICE), "found 'dtype' more than once"),
    shard("metadata of numbers", header({"__metadata__": {"a": 1}}), "__metadata__ to hold"),
    shard("metadata as text", header({"__metadata__": "a"}), "__metadata__ to hold text"),
    # One tensor of a header.
    shard("entry is a number", header({"t": 3}), "found 3", "t"),
    shard("no dtype", one(dtype=...), "expected a dtype", "t"),
    shard("unknown key", header({"t": {**entry(), "order": "F"}}), "'order': 'F'", "t"),
    shard("unknown dtype", one(dtype="F31"), "'F31'", "t"),
    shard("dtype of 6 bits", one(dtype="F6_E2M3"), "'F6_E2M3'", "t"),
    shard("dtype is a list", one(dtype=["F32"]), r"\['F32'\]", "t"),
    shard("negative size", one(shape=[-2]), r"sizes, .*found .*\[-2\]", "t"),
    shard("size 2.0", one(shape=[2.0]), r"sizes, .*found .*\[2.0\]", "t"),
    shard("size true", one(shape=[2, True]), r"sizes, .*found .*\[2, True\]", "t"),
    shard("shape is a number", one(shape=2), "sizes, .*found .*'shape': 2", "t"),
    shard("size over 2**63", one(shape=[2**63]), "sizes, .*found", "t"),
    shard("product over 2**63", one(shape=[2**32, 2**32]), "fewer than 2", "t"),
    shard("product over, then 0", one(shape=[2**62, 2**62, 0]), "fewer than 2", "t"),
    shard("65 dimensions", one(shape=[1] * 65), "at most 64 sizes", "t"),
    shard("three offsets", one(offsets=[0, 4, 8]), r"found .*\[0, 4, 8\]", "t"),
    shard("no offsets", one(offsets=None), "found .*'data_offsets': None", "t"),
    shard("end before begin", one(offsets=[8, 0]), r"found .*\[8, 0\]", "t"),
    shard("negative offset", one(offsets=[-8, 0]), r"found .*\[-8, 0\]", "t"),
    shard("too few bytes", one(offsets=[0, 4]), r"as far apart as .*\[0, 4\]", "t"),
    shard("too many bytes", one(shape=[1]), r"as far apart as .*\[0, 8\]", "t"),
    # The tensors of a file beside one another.
    shard("overlap", header({**TWO, "v": entry(shape=[1], offsets=[2, 6])}), "4 at .*overlap", "v"),
    shard("same bytes twice", header({"s": entry(), "t": entry()}), "an overlap", "t"),
    shard("hole", header({**TWO, "v": entry(offsets=[9, 17])}, bytes(17)), "a hole", "v"),
    shard("hole first", header({"t": entry(offsets=[4, 12])}, bytes(12)), "a hole", "t"),
    shard("beyond the file", one(shape=[2**40], offsets=[0, 2**42]), "the file is cut off", "t"),
    # Shards and index.
    shard("shard missing", drop(SECOND), "No such file"),
    shard("tensor in two shards", copied, f"found it in .*{FIRST} too", NAMES[0]),
    index("has a tensor that is absent", {"a.b": SECOND}, f"in '{SECOND}', found it nowh", "a.b"),
    replace(index("leaves one out", {LAST: None}, "found it only in the shard", LAST), file=SECOND),
    index("has it elsewhere", {LAST: FIRST}, f"in '{FIRST}', found it in {SECOND}", LAST),
    index("has a tensor twice", put(INDEX, SAME), "found 'a' more than once"),
    index("names a parent", {"a": "../x.safetensors"}, "found '../x.safetensors'"),
    index("hides a parent", {"a": "a/../../x.safetensors"}, "found 'a/../.."),
    index("is absolute", {"a": "/tmp/x.safetensors"}, "found '/tmp/x.safetensors'"),
    index("with backslashes", {"a": "..\\x.safetensors"}, "in this folder, found"),
    index("with a null", {"a": "x\0.safetensors"}, r"found 'x\\x00"),
    index("names a folder", {"a": "."}, "found '.'"),
    index("with a name of 5000", {"a": "x" * 5000 + ".safetensors"}, "characters"),
    index("with a line break", {"a": "\n.safetensors"}, r"found '\\n.safe"),
    index("names nothing", {"a": ""}, "found ''"),
    index("names a pickle", {"a": "x.bin"}, "a pickle can run code"),
    index("names a number", {"a": 3}, "expected a file name, found 3", "a"),
    index("is no JSON", put(INDEX, b"{"), "found text that is none"),
    index("is a list", put(INDEX, b"[]"), "expected a JSON object, found a list"),
    index("without a map", put(INDEX, b"{}"), "expected a weight_map"),
    index("with an empty map", dict.fromkeys(RIGHT_MAP), "expected a weight_m"),
    index("is empty", put(INDEX, b""), "bytes of JSON, found 0"),
    index("too large", sparse(INDEX, 10**9), "bytes of JSON, found 1000000000"),
    # What is no regular file.
    shard("shard is a pipe", instead(SECOND, os.mkfifo), "a folder, a pipe or a device"),
    shard("shard is a folder", instead(SECOND, os.mkdir), "a folder, a pipe or a device"),
    shard("shard is a device", instead(SECOND, lambda f: f.symlink_to("/dev/zero")), "a dev"),
    shard("shard is a loop", instead(SECOND, lambda f: f.symlink_to(f)), "symbolic links"),
    shard("shard leads nowhere", instead(SECOND, lambda f: f.symlink_to("x")), "No such file"),
    settings("is a pipe", instead(CONFIG, os.mkfifo), "a pipe"),
    # Configuration and source.
    settings("is missing", drop(CONFIG), "No such file"),
    settings("is empty", put(CONFIG, b""), "JSON, found 0"),
    settings("is broken", put(CONFIG, b"{x"), "text that is none"),
    settings("is a number", put(CONFIG, b"3"), "found a int"),
    settings("is too large", sparse(CONFIG, 10**8), "found 100000000"),
    settings("is nested deeply", put(CONFIG, DEEP), "too deeply"),
    settings("names weights by a number", named(3), "expected transformers_weights"),
    settings("names weights outside", named("../a.safetensors"), "found '../a.safetensors'"),
    source("no tensors", both(header({}, b""), called(ANOTHER)), "of none", ANOTHER, "."),
    source("only a pickle", pickled("pytorch_model.bin", *ALL_WEIGHTS), "never opened"),
    source("a pickle as source", pickled("x.pt"), "never opened", "x.pt"),
    source("another file as source", put("x.gguf", b"GGUF"), "another file", "x.gguf"),
    source("no weights", drop(*ALL_WEIGHTS), "expected model.safetensors or"),
    source("other weights only", both(drop(INDEX, FIRST), called(ANOTHER)), ANOTHER),
    source("source does not exist", drop(), "found none", "absent/", file="absent"),
    source("source has a null", drop(), "found none", "a\0b", file=r"a\x00b"),
    source("source is a loop", lambda f: (f / "x").symlink_to(f / "x"), "another f", "x"),
    source("source of 5000 characters", drop(), "File name too long", "x" * 5000, file="xxx"),
]


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


def digest(value: str) -> Break:
    """Of the configuration."""
    return manifest(lambda store: store["files"].update({CONFIG: value}))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """A tensor of the rest."""
    return rest(lambda found: found.update({name: change(found[name]).clone()}))


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
    sealed("a file outside", lambda s: s["files"].update({"../a": "00"}), r"\.\./a"),
    loaded("as it should be", manifest(lambda store: None), None),
    loaded("no rest", drop(REST), REST),
    loaded("rest of zeros", sparse(REST, 2**20, bytes(1)), "begins with"),
    loaded("rest without end", size(REST, lambda _: 10**12), "expected the file to end"),
    loaded("a header without end", sparse(REST, 10**12, b"\0\0\0\0\1"), "at most 100000000"),
    loaded("one bit of the manifest", flip(REST, 200), f"{REST}: expected"),
    loaded("another version", manifest(lambda s: None, version="9"), "of version '9'.*poros load"),
    loaded("a tensor twice", manifest(lambda s: _first(s, 1, _first(s, 0))), "expected layer 1"),
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
    loaded("a digest with escapes", digest(ESCAPES * 999), r"digest \\x1b\[2J\\n"),
    loaded("no config in it", manifest(lambda s: s["files"].pop(CONFIG)), "how it was made"),
    loaded("nested code of 4", changed(NESTED_CODE, lambda t: t[:4]), "256 entries"),
    loaded("no code", rest(lambda f: f.pop(CODE)), "found it nowhere"),
    loaded("an integer head", changed(HEAD, torch.Tensor.char), r"a tensor like torch\.bfloat16"),
]


def _first(store: dict[str, Any], layer: int, name: str | None = None) -> str:
    """The name of its first tensor, or another one for it."""
    spec = store["layouts"][layer][0]
    spec[0] = name or spec[0]
    return str(spec[0])


def _blocksize(store: dict[str, Any], num_elements: int) -> None:
    store["about"]["weights"][DOWN][1] = num_elements
