"""Bad checkpoints, one defect each: a typed error that names file, tensor and defect; no leak.

Every case changes one thing in a checkpoint that opens (the control is the first test). While the
error is still held, no descriptor may be open that was not before and no file of it mapped.
"""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import MAX_HEADER_NUM_BYTES
from tests.checkpoints import (
    FIRST,
    INDEX,
    SECOND,
    entry,
    file_bytes,
    good_tensors,
    mappings,
    open_files,
    write_index,
    write_sharded,
)

NAMES = list(good_tensors())
RIGHT_MAP = {name: FIRST if name in NAMES[:2] else SECOND for name in NAMES}


@dataclass(frozen=True)
class Case:
    """How to break a good sharded checkpoint, and what the message must say."""

    name: str
    break_it: Callable[[Path], Any]
    file: str
    defect: str
    tensor: str | None = None
    source: str = "."
    """What is opened, relative to the folder."""


class RunsCode:
    """Unpickling it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.file),)


def header(document: object, data: bytes = bytes(8), **options: Any) -> Callable[[Path], Any]:
    """Put a file built from a header in the place of the second shard."""
    return lambda folder: (folder / SECOND).write_bytes(file_bytes(document, data, **options))


def one(**changes: Any) -> Callable[[Path], Any]:
    """The same, with one tensor "t" that is right but for the changes."""
    return header({"t": entry(**changes)})


def put(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def drop(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def index(**changes: Any) -> Callable[[Path], Any]:
    """Change the index: a tensor's file, or None to leave the tensor out."""
    changed = {name.replace("_", "."): file for name, file in changes.items()}
    merged = {**RIGHT_MAP, **changed}
    return lambda folder: write_index(folder, {k: v for k, v in merged.items() if v is not None})


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Put something that is no file in the place of one."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def sparse(name: str, num_bytes: int, start: bytes = b"") -> Callable[[Path], Any]:
    """A large file that takes no room."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, num_bytes)

    return change


def cut(name: str, by: int) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def pickled(name: str, *gone: str) -> Callable[[Path], Any]:
    """A pickle that would leave a trace if it were loaded."""

    def change(folder: Path) -> None:
        drop(*gone)(folder)
        (folder / name).write_bytes(pickle.dumps(RunsCode(folder / "trace"), protocol=4))

    return change


def repeat(folder: Path) -> None:
    """Give the first shard's content to the second too."""
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())


TWO = {"t": entry(shape=[1], offsets=[0, 4]), "u": entry(shape=[1], offsets=[4, 8])}
DEEP = b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ALL_WEIGHTS = (FIRST, SECOND, INDEX)

CASES = [
    # The file around the header.
    Case("empty file", put(SECOND, b""), SECOND, "found an empty one"),
    Case("seven bytes", put(SECOND, bytes(7)), SECOND, "at least 8 bytes, found 7"),
    Case("length beyond the file", header({}, length=10**6), SECOND, "header length of 1000000"),
    Case("length of 64 ones", header({}, length=2**64 - 1), SECOND, f"length of {2**64 - 1}"),
    Case(
        "header over the limit",
        sparse(SECOND, MAX_HEADER_NUM_BYTES + 10, (MAX_HEADER_NUM_BYTES + 1).to_bytes(8, "little")),
        SECOND,
        f"at most {MAX_HEADER_NUM_BYTES} bytes, found one of {MAX_HEADER_NUM_BYTES + 1}",
    ),
    Case("cut in the header", lambda f: os.truncate(f / SECOND, 40), SECOND, "header length of"),
    Case("cut in the data", cut(SECOND, 1), SECOND, "the file is cut off", NAMES[3]),
    Case("bytes after the data", header(TWO, bytes(9)), SECOND, "end with its last tensor"),
    Case("archive of a pickle", put(SECOND, b"PK\x03\x04" + bytes(90)), SECOND, "found a pickle"),
    Case("bare pickle", pickled(SECOND), SECOND, "found a pickle"),
    Case(
        "pointer of git lfs",
        put(SECOND, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        SECOND,
        "the pointer that git leaves",
    ),
    # The header as JSON.
    Case("space before", header(b' {"t":0}'), SECOND, r"begins with '{', found b' {"),
    Case("array", header(b"[]"), SECOND, r"begins with '{', found b'\[\]'"),
    Case("no JSON", header(b'{"t":'), SECOND, "found text that is none"),
    Case("text after the object", header(b"{} x"), SECOND, "Extra data"),
    Case("no UTF-8", header(b'{"\xff":0}'), SECOND, "can't decode byte 0xff"),
    Case("nested deeply", header(DEEP), SECOND, "nested too deeply"),
    Case("NaN", header(b'{"t":NaN}'), SECOND, "NaN is not JSON"),
    Case("number of 5000 digits", header(b'{"t":' + b"9" * 5000 + b"}"), SECOND, "4300 digits"),
    Case("unpaired surrogate", header(b'{"\\ud800":{}}'), SECOND, "surrogates not allowed"),
    Case("tensor twice", header(b'{"t":{},"t":{}}'), SECOND, "found 't' more than once"),
    Case(
        "dtype twice",
        header(b'{"t":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'),
        SECOND,
        "found 'dtype' more than once",
    ),
    Case("metadata of numbers", header({"__metadata__": {"a": 1}}), SECOND, "__metadata__ to hold"),
    Case("metadata as text", header({"__metadata__": "a"}), SECOND, "__metadata__ to hold text"),
    # One tensor of a header.
    Case("entry is a number", header({"t": 3}), SECOND, "found 3", "t"),
    Case(
        "no dtype", header({"t": {"shape": [], "data_offsets": [0, 8]}}), SECOND, "expected d", "t"
    ),
    Case("unknown key", header({"t": {**entry(), "order": "F"}}), SECOND, "'order': 'F'", "t"),
    Case("unknown dtype", one(dtype="F31"), SECOND, "found 'F31'", "t"),
    Case("dtype of 6 bits", one(dtype="F6_E2M3"), SECOND, "found 'F6_E2M3'", "t"),
    Case("dtype is a list", one(dtype=["F32"]), SECOND, r"found \['F32'\]", "t"),
    Case("negative size", one(shape=[-2]), SECOND, r"whole numbers, found \[-2\]", "t"),
    Case("size 2.0", one(shape=[2.0]), SECOND, r"whole numbers, found \[2.0\]", "t"),
    Case("size true", one(shape=[2, True]), SECOND, r"whole numbers, found \[2, True\]", "t"),
    Case("shape is a number", one(shape=2), SECOND, "whole numbers, found 2", "t"),
    Case("size over 2**63", one(shape=[2**63]), SECOND, "whole numbers, found", "t"),
    Case("product over 2**63", one(shape=[2**32, 2**32]), SECOND, "fewer than 2", "t"),
    Case("product over, then 0", one(shape=[2**62, 2**62, 0]), SECOND, "fewer than 2", "t"),
    Case("65 dimensions", one(shape=[1] * 65), SECOND, "at most 64 whole numbers", "t"),
    Case("three offsets", one(offsets=[0, 4, 8]), SECOND, "as begin and end", "t"),
    Case("no offsets", one(offsets=None), SECOND, "as begin and end, begin first, found None", "t"),
    Case("end before begin", one(offsets=[8, 0]), SECOND, r"begin first, found \[8, 0\]", "t"),
    Case("negative offset", one(offsets=[-8, 0]), SECOND, r"begin first, found \[-8, 0\]", "t"),
    Case("too few bytes", one(offsets=[0, 4]), SECOND, "expected 8 bytes for F32 of shape", "t"),
    Case("too many bytes", one(shape=[1]), SECOND, "expected 4 bytes for F32 of shape", "t"),
    # The tensors of a file beside one another.
    Case(
        "overlap",
        header({**TWO, "v": entry(shape=[1], offsets=[2, 6])}),
        SECOND,
        "at 4 of the data, found 2: an overlap",
        "v",
    ),
    Case("same bytes twice", header({"s": entry(), "t": entry()}), SECOND, "an overlap", "t"),
    Case("hole", header({**TWO, "v": entry(offsets=[9, 17])}, bytes(17)), SECOND, "a hole", "v"),
    Case("hole first", header({"t": entry(offsets=[4, 12])}, bytes(12)), SECOND, "a hole", "t"),
    Case(
        "offsets beyond the file",
        header({"t": entry(shape=[2**40], offsets=[0, 2**42])}),
        SECOND,
        "the file is cut off",
        "t",
    ),
    # Shards and index.
    Case("shard missing", drop(SECOND), SECOND, "No such file"),
    Case("tensor absent", index(a_b=SECOND), INDEX, f"in '{SECOND}', found it nowhere", "a.b"),
    Case("tensor in two shards", repeat, SECOND, f"found it in .*{FIRST} too", NAMES[0]),
    Case(
        "tensor not in the index",
        index(layers_3_weight=None),
        SECOND,
        "found it only in the shard",
        NAMES[3],
    ),
    Case(
        "tensor in another shard",
        index(layers_3_weight=FIRST),
        INDEX,
        f"in '{FIRST}', found it in {SECOND}",
        NAMES[3],
    ),
    Case(
        "tensor twice in the index",
        put(INDEX, f'{{"weight_map":{{"a":"{FIRST}","a":"{SECOND}"}}}}'.encode()),
        INDEX,
        "found 'a' more than once",
    ),
    Case(
        "no tensors at all",
        lambda f: [header({}, b"")(f), (f / SECOND).replace(f / "one.safetensors")],
        ".",
        "a checkpoint of none",
        source="one.safetensors",
    ),
    Case("index names a parent", index(a="../x.safetensors"), INDEX, "found '../x.safetensors'"),
    Case("index hides a parent", index(a="a/../../x.safetensors"), INDEX, "found 'a/../.."),
    Case("index is absolute", index(a="/tmp/x.safetensors"), INDEX, "found '/tmp/x.safetensors'"),
    Case("index with backslashes", index(a="..\\x.safetensors"), INDEX, "in this folder, found"),
    Case("index with a null", index(a="x\0.safetensors"), INDEX, r"found 'x\\x00"),
    Case("index names a folder", index(a="."), INDEX, "found '.'"),
    Case("index with a name of 5000", index(a="x" * 5000 + ".safetensors"), INDEX, "characters"),
    Case("index with a line break", index(a="\n.safetensors"), INDEX, r"found '\\n.safe"),
    Case("index names nothing", index(a=""), INDEX, "found ''"),
    Case("index names a pickle", index(a="x.bin"), INDEX, "a pickle can run code"),
    Case("index names a number", index(a=3), INDEX, "expected a file name, found 3", "a"),
    Case("index is no JSON", put(INDEX, b"{"), INDEX, "found text that is none"),
    Case("index is a list", put(INDEX, b"[]"), INDEX, "expected a JSON object, found a list"),
    Case("index without a map", put(INDEX, b"{}"), INDEX, "expected a weight_map"),
    Case(
        "index with an empty map", index(**dict.fromkeys(RIGHT_MAP)), INDEX, "expected a weight_m"
    ),
    Case("index is empty", put(INDEX, b""), INDEX, "bytes of JSON, found 0"),
    Case("index too large", sparse(INDEX, 10**9), INDEX, "bytes of JSON, found 1000000000"),
    # What is no regular file.
    Case("shard is a pipe", instead(SECOND, os.mkfifo), SECOND, "a folder, a pipe or a device"),
    Case("shard is a folder", instead(SECOND, os.mkdir), SECOND, "a folder, a pipe or a device"),
    Case(
        "shard is a device", instead(SECOND, lambda f: f.symlink_to("/dev/zero")), SECOND, "a dev"
    ),
    Case("shard is a loop", instead(SECOND, lambda f: f.symlink_to(f)), SECOND, "symbolic links"),
    Case(
        "shard leads nowhere", instead(SECOND, lambda f: f.symlink_to("x")), SECOND, "No such file"
    ),
    Case("configuration is a pipe", instead("config.json", os.mkfifo), "config.json", "a pipe"),
    # Configuration and source.
    Case("no configuration", drop("config.json"), "config.json", "No such file"),
    Case("configuration is empty", put("config.json", b""), "config.json", "JSON, found 0"),
    Case("configuration is broken", put("config.json", b"{x"), "config.json", "text that is none"),
    Case("configuration is a number", put("config.json", b"3"), "config.json", "found a int"),
    Case("configuration too large", sparse("config.json", 10**8), "config.json", "found 100000000"),
    Case("configuration nested deeply", put("config.json", DEEP), "config.json", "too deeply"),
    Case(
        "weights named by a number",
        put("config.json", b'{"transformers_weights": 3}'),
        "config.json",
        "expected transformers_weights",
    ),
    Case(
        "weights named outside",
        put("config.json", b'{"transformers_weights": "../a.safetensors"}'),
        "config.json",
        "found '../a.safetensors'",
    ),
    Case("only a pickle", pickled("pytorch_model.bin", *ALL_WEIGHTS), ".", "never opened"),
    Case("a pickle as source", pickled("x.pt"), "x.pt", "never opened", source="x.pt"),
    Case(
        "another file as source", put("x.gguf", b"GGUF"), "x.gguf", "another file", source="x.gguf"
    ),
    Case("no weights", drop(*ALL_WEIGHTS), ".", "expected model.safetensors or"),
    Case(
        "other weights only",
        lambda f: [drop(SECOND, INDEX)(f), (f / FIRST).replace(f / "lora.safetensors")],
        ".",
        "lora.safetensors",
    ),
    Case("source does not exist", drop(), "absent", "found none", source="absent/"),
    Case("source has a null", drop(), r"a\x00b", "found none", source="a\0b"),
    Case("source is a loop", lambda f: (f / "x").symlink_to(f / "x"), "x", "another f", source="x"),
    Case("source of 5000 characters", drop(), "xxx", "File name too long", source="x" * 5000),
]


def test_the_checkpoint_that_the_cases_break_opens(tmp_path: Path) -> None:
    with Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        assert sorted(checkpoint.names) == NAMES
    assert len(CASES) >= 40 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_error_names_file_tensor_and_defect_and_nothing_leaks(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_sharded(tmp_path / "model")
    case.break_it(folder)
    before = open_files()
    source = f"{folder}/{case.source}" if case.source != "." else folder
    with pytest.raises(CheckpointFormatError, match=case.defect) as caught:
        Checkpoint.open(source)
    message = str(caught.value)
    assert (folder.name if case.file == "." else case.file) in message
    assert case.tensor is None or f"tensor '{case.tensor}'" in message
    assert len(message) < 2000 + len(str(source)) and message.isascii()
    assert open_files() == before
    assert mappings(folder) == []
    assert not (folder / "trace").exists()


def test_the_leak_checks_see_a_leak(tmp_path: Path) -> None:
    """Control: an open checkpoint is seen by both."""
    before = open_files()
    with Checkpoint.open(write_sharded(tmp_path)) as checkpoint:
        assert len(open_files()) == len(before) + 2
        assert {Path(each).name for each in mappings(tmp_path)} == {FIRST, SECOND}
        del checkpoint
    assert open_files() == before and mappings(tmp_path) == []


def test_the_pickle_would_run_code(tmp_path: Path) -> None:
    """Control: loading it does leave the trace that the cases look for."""
    pickled("x.bin")(tmp_path)
    pickle.loads((tmp_path / "x.bin").read_bytes())
    assert (tmp_path / "trace").is_dir()


def test_a_broken_last_shard_lets_go_of_those_before_it(tmp_path: Path) -> None:
    """While the error is held, its traceback holds every frame; the mappings must be gone."""
    write_sharded(tmp_path)
    put(SECOND, b"")(tmp_path)
    caught = None
    try:
        Checkpoint.open(tmp_path)
    except CheckpointFormatError as error:
        caught = error
    assert caught is not None and caught.__traceback__ is not None
    assert mappings(tmp_path) == []


def test_json_written_here_is_what_the_cases_say() -> None:
    """Guards the builder: a header that is right parses back."""
    content = file_bytes({"t": entry()})
    length = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + length])["t"]["data_offsets"] == [0, 8]
