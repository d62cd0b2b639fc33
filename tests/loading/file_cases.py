"""The table of damaged files: headers, indexes, configurations, and what is no regular file."""

import os
from dataclasses import replace
from typing import Any

from poros.loaders.header import MAX_HEADER_NUM_BYTES as MAX
from tests.loading.checkpoints import FIRST, INDEX, SECOND, entry, good_tensors, write_index
from tests.loading.damage import (
    CONFIG,
    Break,
    Case,
    both,
    cut,
    drop,
    header,
    instead,
    one,
    pickled,
    put,
    size,
    sparse,
)

NAMES = list(good_tensors())
LAST = NAMES[3]
RIGHT_MAP = {name: FIRST if name in NAMES[:2] else SECOND for name in NAMES}
DEEP = b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ALL_WEIGHTS = (FIRST, SECOND, INDEX)
ONE, OTHER = entry(shape=[1], offsets=[0, 4]), entry(shape=[1], offsets=[4, 8])
TWO = {"t": ONE, "u": OTHER}
TWICE = b'{"t":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def shard(name: str, break_it: Break, says: str, tensor: str | None = None) -> Case:
    return Case(name, "files", break_it, says, SECOND, tensor)


def index(name: str, break_it: Any, says: str, tensor: str | None = None) -> Case:
    """Or entries of the index that are changed; None leaves the tensor out."""

    def change(folder: Any) -> None:
        files = {key: file for key, file in (RIGHT_MAP | break_it).items() if file is not None}
        write_index(folder, files)

    made = change if isinstance(break_it, dict) else break_it
    return Case(f"index {name}", "files", made, says, INDEX, tensor)


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
    shard(
        "header over the limit",
        sparse(SECOND, MAX + 10, (MAX + 1).to_bytes(8, "little")),
        f"at most {MAX}, found a header length of {MAX + 1}",
    ),
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
    shard(
        "no dtype", header({"t": {"shape": [], "data_offsets": [0, 8]}}), "expected a dtype", "t"
    ),
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
    shard(
        "overlap",
        header({**TWO, "v": entry(shape=[1], offsets=[2, 6])}),
        "4 at .*: a hole, an overlap",
        "v",
    ),
    shard("same bytes twice", header({"s": entry(), "t": entry()}), "an overlap", "t"),
    shard("hole", header({**TWO, "v": entry(offsets=[9, 17])}, bytes(17)), "a hole", "v"),
    shard("hole first", header({"t": entry(offsets=[4, 12])}, bytes(12)), "a hole", "t"),
    shard("beyond the file", one(shape=[2**40], offsets=[0, 2**42]), "the file is cut off", "t"),
    # Shards and index.
    shard("shard missing", drop(SECOND), "No such file"),
    shard(
        "tensor in two shards",
        lambda folder: (folder / SECOND).write_bytes((folder / FIRST).read_bytes()),
        f"found it in .*{FIRST} too",
        NAMES[0],
    ),
    index("has a tensor that is absent", {"a.b": SECOND}, f"in '{SECOND}', found it nowh", "a.b"),
    replace(index("leaves one out", {LAST: None}, "found it only in the shard", LAST), file=SECOND),
    index("has it elsewhere", {LAST: FIRST}, f"in '{FIRST}', found it in {SECOND}", LAST),
    index(
        "has a tensor twice",
        put(INDEX, f'{{"weight_map":{{"a":"{FIRST}","a":"{SECOND}"}}}}'.encode()),
        "found 'a' more than once",
    ),
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
    settings(
        "names weights by a number",
        put(CONFIG, b'{"transformers_weights": 3}'),
        "expected transformers_weights",
    ),
    settings(
        "names weights outside",
        put(CONFIG, b'{"transformers_weights": "../a.safetensors"}'),
        "found '../a.safetensors'",
    ),
    source(
        "no tensors at all",
        both(header({}, b""), lambda folder: (folder / SECOND).replace(folder / "o.safetensors")),
        "a checkpoint of none",
        "o.safetensors",
        file=".",
    ),
    source("only a pickle", pickled("pytorch_model.bin", *ALL_WEIGHTS), "never opened"),
    source("a pickle as source", pickled("x.pt"), "never opened", "x.pt"),
    source("another file as source", put("x.gguf", b"GGUF"), "another file", "x.gguf"),
    source("no weights", drop(*ALL_WEIGHTS), "expected model.safetensors or"),
    source(
        "other weights only",
        both(drop(SECOND, INDEX), lambda f: (f / FIRST).replace(f / "lora.safetensors")),
        "lora.safetensors",
    ),
    source("source does not exist", drop(), "found none", "absent/", file="absent"),
    source("source has a null", drop(), "found none", "a\0b", file=r"a\x00b"),
    source("source is a loop", lambda f: (f / "x").symlink_to(f / "x"), "another f", "x"),
    source("source of 5000 characters", drop(), "File name too long", "x" * 5000, file="xxx"),
]
