"""Random files: whatever they say, they are read as the library reads them, or refused.

Properties: no exception but ``CheckpointFormatError``, no hang, memory bounded by the size of the
file, nothing left open; and what is accepted here is accepted by safetensors, with the same form
and bytes. The last is checked on inputs that are often right, and a count in the tests makes sure
that both outcomes occur.

A few seconds and the same examples at every run by default. POROS_FUZZ=50 draws fifty times as
many from a fresh seed, and prints the smallest one that fails:

    POROS_FUZZ=50 python -m pytest tests/test_fuzz.py -q
"""

import functools
import hashlib
import json
import operator
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from poros.errors import CheckpointFormatError
from poros.layout import BlockLayout
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import DTYPES, Header, open_regular, parse_json, read_header
from poros.loaders.manifest import Manifest, read_manifest, write_manifest
from tests.checkpoints import FIRST, INDEX, SECOND, file_bytes, mappings, open_files, write_sharded

FACTOR = int(os.environ.get("POROS_FUZZ", "1"))


def examples(number: int) -> settings:
    """Settings of a test that draws so many by default; the same ones at every run of CI."""
    return settings(
        max_examples=number * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def read(content: bytes) -> Header | None:
    """The header of a file of that content; None if it is refused, in the way it should be."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(content)
        before = open_files()
        descriptor, _ = open_regular(file)
        try:
            return read_header(descriptor, file)
        except CheckpointFormatError as error:
            assert "x.safetensors: " in str(error) and len(str(error)) < 3000
            return None
        finally:
            os.close(descriptor)
            assert open_files() == before


def library_reads(content: bytes) -> dict[str, tuple[str, list[int]]] | None:
    """What safetensors says of the same file: dtype and shape by name; None if it refuses."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(content)
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
        except SafetensorError:
            return None


SIZES = st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**400])
NUMBERS = SIZES | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
NAMES = st.text(max_size=5) | st.sampled_from(["a", "layers.0.weight", "__metadata__", "\0"])
ANY_JSON = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


@st.composite
def right_headers(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file as a writer would make it."""
    names = draw(st.lists(st.text(max_size=6), unique=True, max_size=5))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        begin, end = end, end + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    items = draw(st.permutations(list(header.items())))
    return dict(items), draw(st.binary(min_size=end, max_size=end))


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """A right file with one to three things changed: a value of the header, or bytes."""
    header, data = draw(right_headers())
    for _ in range(draw(st.integers(0, 2))):
        if header and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(header)))
            if isinstance(header[name], dict) and draw(st.booleans()):
                key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
                header[name] = {**header[name], key: draw(ANY_JSON)}
            else:
                header[name] = draw(ANY_JSON)
        else:
            header[draw(NAMES)] = draw(ANY_JSON)
    content = bytearray(file_bytes(header, data))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content) - 1))
        content[at] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, 20))
    return bytes(content[: len(content) - cut] if draw(st.booleans()) and cut else content)


@examples(150)
@given(right_headers())
def test_what_a_writer_makes_is_read(file: tuple[dict[str, Any], bytes]) -> None:
    header, data = file
    content = file_bytes(header, data)
    found = read(content)
    assert found is not None
    assert found.tensors.keys() == header.keys()
    for name, entry in found.tensors.items():
        begin, end = header[name]["data_offsets"]
        assert list(entry.shape) == header[name]["shape"]
        assert DTYPES[header[name]["dtype"]] is entry.dtype
        assert content[entry.offset :][: entry.num_bytes] == data[begin:end]


def test_what_is_accepted_is_what_the_library_reads() -> None:
    outcomes: list[tuple[bool, bool]] = []

    @examples(400)
    @given(damaged_headers())
    def check(content: bytes) -> None:
        ours, library = read(content), library_reads(content)
        outcomes.append((ours is not None, library is not None))
        if ours is not None:
            names = {dtype: name for name, dtype in DTYPES.items()}
            assert library == {
                name: (names[each.dtype], list(each.shape)) for name, each in ours.tensors.items()
            }

    check()
    # The other direction does not hold: the library takes keys that it does not know.
    assert outcomes.count((True, True)) > 20 and outcomes.count((False, False)) > 100


@examples(200)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda text: file_bytes(text)))
def test_random_bytes_are_refused(content: bytes) -> None:
    found = read(content)
    assert found is None or content[8:].strip().startswith(b"{")


@examples(200)
@given(ANY_JSON | st.dictionaries(NAMES, ANY_JSON))
def test_random_json_is_parsed_as_the_library_parses_it_or_refused(value: Any) -> None:
    text = json.dumps(value).encode()
    try:
        found = parse_json(text, Path("x.json"))
    except CheckpointFormatError:
        return
    assert json.dumps(found) == json.dumps(value) and isinstance(value, dict)


PATHS = st.sampled_from(
    [
        FIRST,
        SECOND,
        f"./{FIRST}",
        "../model.safetensors",
        "/dev/zero",
        "/etc/passwd.safetensors",
        "a/../../b.safetensors",
        "config.json",
        "pytorch_model.bin",
    ]
)
RIGHT = {f"layers.{index}.weight": FIRST if index < 2 else SECOND for index in range(4)}
CHANGES = st.dictionaries(st.sampled_from([*RIGHT, "layers.4.weight"]) | NAMES, PATHS | ANY_JSON)


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    """An index that is right but for a few entries, or that is no index."""
    weight_map = {**RIGHT, **(draw(CHANGES) if draw(st.booleans()) else {})}
    for name in draw(st.lists(st.sampled_from(sorted(RIGHT)), max_size=1)):
        weight_map.pop(name, None)
    document = {**draw(st.dictionaries(NAMES, ANY_JSON, max_size=2)), "weight_map": weight_map}
    if draw(st.integers(0, 4)) == 0:
        document["weight_map"] = draw(ANY_JSON)
    text = json.dumps(document).encode()
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 4)) == 0 else text


def test_a_random_index_opens_the_checkpoint_that_it_describes_or_none(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    opened: list[bool] = []

    @examples(300)
    @given(indexes())
    def check(text: bytes) -> None:
        (tmp_path / INDEX).write_bytes(text)
        before = open_files()
        try:
            with Checkpoint.open(tmp_path) as checkpoint:
                weight_map = json.loads(text)["weight_map"]
                assert weight_map.keys() == set(checkpoint.names) == RIGHT.keys()
                for name, shard in weight_map.items():
                    assert checkpoint.entry(name).file == tmp_path / shard
            opened.append(True)
        except CheckpointFormatError as error:
            assert str(tmp_path) in str(error) and len(str(error)) < 3000
            opened.append(False)
        assert open_files() == before and mappings(tmp_path) == []

    check()
    assert opened.count(True) > 20 and opened.count(False) > 100


def write_sealed(file: Path, store: Any) -> None:
    """A manifest with the right SHA-256 of whatever it says."""
    text = json.dumps(store, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "store": store}))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_a_random_manifest_says_what_fits_or_is_refused(tmp_path: Path) -> None:
    """Sealed again after the change: the SHA-256 finds accidents, not a manifest made up."""
    manifest = Manifest(
        [layout_of("a", "b"), layout_of("c")],
        ["0" * 64] * 2,
        {"h": ("F32", (2,))},
        "1" * 64,
        {"config.json": ""},
    )
    file = tmp_path / "manifest.json"
    file.write_bytes(write_manifest(manifest))
    assert read_manifest(file) == manifest
    text = json.dumps(json.loads(file.read_bytes())["store"])
    everywhere = list(places(json.loads(text)))
    accepted: list[bool] = []

    @examples(400)
    @given(st.lists(st.tuples(st.sampled_from(everywhere), ANY_JSON), min_size=1, max_size=2))
    def check(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        store = json.loads(text)
        for (*parents, last), value in changes:
            with suppress(TypeError, LookupError):  # an earlier change took the place away
                functools.reduce(operator.getitem, parents, store)[last] = value
        write_sealed(file, json.loads(json.dumps(store)))  # every key is a text after that
        try:
            found = read_manifest(file)
        except CheckpointFormatError as error:
            assert "manifest.json: " in str(error) and len(str(error)) < 3000
            accepted.append(False)
            return
        accepted.append(True)
        for layout in found.layouts:
            for spec in layout.tensors:
                assert min(spec.shape, default=0) >= 0 <= spec.offset
                assert spec.offset + spec.num_bytes <= layout.num_bytes

    check()
    assert accepted.count(True) > 10 and accepted.count(False) > 100


def layout_of(*names: str) -> BlockLayout:
    return BlockLayout.pack([(name, torch.ones(3)) for name in names])


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"{", b'"a":{},'),
        (b'{"a":[', b"[],"),
        (b'{"a":[', b"{},"),
        (b'{"a":[', b"0,"),
        (b'{"a":[', b"1e9,"),
        (b'{"a":[', b'"",'),
        (b'{"a":[', b"[[[[],[]],[]]],"),
    ],
    ids=str,
)
def test_memory_is_bounded_by_the_file(tmp_path: Path, start: bytes, unit: bytes) -> None:
    """The JSON that takes the most memory takes less than 60 bytes for each of its own."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_bytes(start + unit * (10**6 // len(unit))))
    descriptor, _ = open_regular(file)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError, match="found text that is none"):
            read_header(descriptor, file)
        peak = tracemalloc.get_traced_memory()[1]
        print(start, unit, peak)
    finally:
        tracemalloc.stop()
        os.close(descriptor)
    assert 10**6 < peak < 60 * 10**6
