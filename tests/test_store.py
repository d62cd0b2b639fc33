"""Stores on disk: the bytes come back, and what is not as it was written does not open."""

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import same_bits

from poros.digests import sha256
from poros.errors import CheckpointFormatError, PorosError
from poros.host.store import HostStore
from poros.layout import PAGE_NUM_BYTES, BlockLayout, view
from poros.loaders.header import open_regular, read_header
from poros.loaders.manifest import MANIFEST, REST, SLABS, write_manifest
from poros.loaders.store import OpenStore, is_store, open_store
from poros.loaders.store_writer import StoreWriter, write_store

ABOUT = {"source": "a1b2", "quantization": {"quant_type": "nf4"}, "num_threads": 1}
FILES = {"config.json": b'{"model_type": "qwen2"}', "generation_config.json": b"{}"}


def some_layouts(num_layers: int = 3) -> list[BlockLayout]:
    return [
        BlockLayout.pack(
            [
                (f"layers.{index}.weight", torch.empty(40_000 + index, 1, dtype=torch.uint8)),
                (f"layers.{index}.absmax", torch.empty(77)),
                (f"layers.{index}.norm", torch.empty(64, dtype=torch.bfloat16)),
                (f"layers.{index}.empty", torch.empty(0, 3)),
            ]
        )
        for index in range(num_layers)
    ]


def some_rest() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.rand(50, 8, generator=generator).bfloat16(),
        "norm.weight": torch.rand(8, generator=generator),
        "offset": torch.tensor(0.25),
        "empty": torch.empty(0, 2),
        "flags": torch.tensor([True, False]),
        "transposed": torch.rand(4, 6, generator=generator).T,
    }


def fill(host: HostStore, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slab in host.slabs:
        for spec in slab.layout.tensors:
            flat = view(slab.bytes, spec).reshape(-1).view(torch.uint8)
            flat.copy_(torch.randint(256, flat.shape, dtype=torch.uint8, generator=generator))


def filled(num_layers: int = 3, seed: int = 0) -> HostStore:
    host = HostStore.allocate(some_layouts(num_layers))
    fill(host, seed)
    return host


def written(directory: Path, seed: int = 0) -> HostStore:
    host = filled(seed=seed)
    assert write_store(directory, host, some_rest(), ABOUT, FILES) == directory
    return host


def read(opened: OpenStore) -> HostStore:
    host = HostStore.allocate(opened.layouts)
    opened.read_into(host)
    opened.check()
    return host


def assert_same_store(left: HostStore, right: HostStore) -> None:
    for one, other in zip(left.slabs, right.slabs, strict=True):
        assert one.layout == other.layout and same_bits(one.bytes, other.bytes)


@pytest.mark.parametrize("mapped", [True, False])
def test_everything_comes_back(mapped: bool, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    expected = filled()
    if mapped:
        with StoreWriter(directory, some_layouts()) as writer:
            fill(writer.host)
            assert not directory.exists()
            writer.commit(some_rest(), ABOUT, FILES)
    else:
        written(directory)
    assert is_store(directory) and [each.name for each in tmp_path.iterdir()] == ["store"]
    with open_store(directory, verify=True) as opened:
        assert_same_store(expected, read(opened))
        found, rest = opened.rest(), some_rest()
        assert found.keys() == rest.keys()
        assert all(same_bits(found[name], rest[name]) for name in rest)
        assert dict(opened.manifest.about) == ABOUT
        assert {name: opened.text(name) for name in FILES} == FILES
        # The data are the bytes of the arena: any part of them is mapped or read as it is.
        assert opened.data_offset % PAGE_NUM_BYTES == 0
        for slab in expected.slabs:
            start = opened.data_offset + slab.offset
            data = opened.slabs.read_bytes()[start : start + slab.layout.num_bytes]
            assert data == slab.bytes.numpy().tobytes()
    assert same_bits(found["norm.weight"], rest["norm.weight"])  # it outlives the store


def test_the_first_slabs_alone(tmp_path: Path) -> None:
    expected = written(tmp_path / "store")
    with open_store(tmp_path / "store") as opened:
        host = HostStore.allocate(opened.layouts[:2])
        opened.read_into(host)
    assert_same_store(HostStore(expected.slabs[:2]), host)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    host = written(tmp_path / "store")
    slabs = load_file(tmp_path / "store" / SLABS)
    for index, slab in enumerate(host.slabs):
        assert same_bits(slabs[f"slab.{index:05d}"][: slab.layout.num_bytes], slab.bytes)
    rest = load_file(tmp_path / "store" / REST)
    assert all(same_bits(rest[name], each.contiguous()) for name, each in some_rest().items())


def test_the_source_is_compared(tmp_path: Path) -> None:
    written(tmp_path / "store")
    with open_store(tmp_path / "store") as opened:
        opened.require_source("a1b2")
        with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint c3"):
            opened.require_source("c3")


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes what the manifest says, with a SHA-256 that fits."""

    def apply(store: Path) -> None:
        document = json.loads((store / MANIFEST).read_text())
        change(document["store"])
        text = json.dumps(document["store"], sort_keys=True, separators=(",", ":"))
        document["sha256"] = sha256(text.encode())
        (store / MANIFEST).write_text(json.dumps(document))

    return apply


def cut_off(name: str, num_bytes: int = 1) -> Callable[[Path], None]:
    return lambda store: os.truncate(store / name, (store / name).stat().st_size - num_bytes)


def replace(name: str, text: bytes) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / name).write_bytes(text)

    return apply


def another_header(store: Path) -> None:
    data = bytearray((store / SLABS).read_bytes())
    at = data.index(b"slab.00001")
    data[at : at + 10] = b"slab.00007"
    (store / SLABS).write_bytes(data)


def another_name(store: Path) -> None:
    data = (store / REST).read_bytes().replace(b"norm.weight", b"norm.height")
    (store / REST).write_bytes(data)


def folder_for(name: str) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / name).unlink()
        (store / name).mkdir()

    return apply


def fifo_for(name: str) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / name).unlink()
        os.mkfifo(store / name)

    return apply


def loop_for(name: str) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        (store / name).unlink()
        (store / name).symlink_to(name)

    return apply


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda store: (store / MANIFEST).unlink(), MANIFEST),
    "no slabs": (lambda store: (store / SLABS).unlink(), SLABS),
    "no rest": (lambda store: (store / REST).unlink(), REST),
    "no config": (lambda store: (store / "config.json").unlink(), "config.json"),
    "empty manifest": (replace(MANIFEST, b""), MANIFEST),
    "no JSON": (replace(MANIFEST, b"{"), MANIFEST),
    "other JSON": (replace(MANIFEST, b"[1]"), MANIFEST),
    "another object": (replace(MANIFEST, b'{"weights": 1}'), MANIFEST),
    "manifest cut off": (cut_off(MANIFEST), MANIFEST),
    "slabs cut off": (cut_off(SLABS), SLABS),
    "slabs cut to nothing": (lambda store: os.truncate(store / SLABS, 0), SLABS),
    "rest cut off": (cut_off(REST), REST),
    "slabs too long": (
        lambda store: os.truncate(store / SLABS, (store / SLABS).stat().st_size + 1),
        SLABS,
    ),
    "another slab header": (another_header, SLABS),
    "another name in the rest": (another_name, "norm."),
    "another config": (replace("config.json", b"{}"), "config.json"),
    "manifest is a folder": (folder_for(MANIFEST), "regular file"),
    "slabs are a folder": (folder_for(SLABS), "regular file"),
    "rest is a pipe": (fifo_for(REST), "regular file"),
    "slabs are a loop of links": (loop_for(SLABS), SLABS),
    "another version": (rewrite(lambda store: store.update(version=1)), "version 1"),
    "another format": (rewrite(lambda store: store.update(format="tar")), "'tar'"),
    "an unknown key": (rewrite(lambda store: store.update(extra=1)), "keys"),
    "a missing key": (rewrite(lambda store: store.pop("rest")), "keys"),
    "an unknown dtype": (
        rewrite(lambda store: store["slabs"][0]["tensors"][0].__setitem__(1, "U9")),
        "U9",
    ),
    "a negative offset": (
        rewrite(lambda store: store["slabs"][0]["tensors"][0].__setitem__(3, -256)),
        "-256",
    ),
    "a crooked offset": (
        rewrite(lambda store: store["slabs"][0]["tensors"][1].__setitem__(3, 40_193)),
        "aligned",
    ),
    "an overlap": (
        rewrite(lambda store: store["slabs"][0]["tensors"][1].__setitem__(3, 256)),
        "over its neighbour",
    ),
    "a tensor outside": (
        rewrite(lambda store: store["slabs"][0].update(num_bytes=256)),
        "tensors up to",
    ),
    "a shape beyond all bounds": (
        rewrite(lambda store: store["slabs"][0]["tensors"][0].__setitem__(2, [2**40, 2**40])),
        "size",
    ),
    "sizes beyond all bounds": (
        rewrite(lambda store: store["slabs"][0].update(num_bytes=2**61)),
        "bytes",
    ),
    "true for a size": (
        rewrite(lambda store: store["slabs"][0].update(num_bytes=True)),
        "True",
    ),
    "a tensor twice": (
        rewrite(lambda store: store["slabs"][1]["tensors"][0].__setitem__(0, "layers.0.weight")),
        "two places",
    ),
    "a slab less": (rewrite(lambda store: store["slabs"].pop()), SLABS),
    "a file outside": (
        rewrite(lambda store: store["files"].update({"../config.json": "00"})),
        "../config.json",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_a_typed_error_that_names_it(defect: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    written(store)
    damage, expected = DEFECTS[defect]
    damage(store)
    before = open_files()
    with pytest.raises(CheckpointFormatError) as caught:
        open_store(store)
    assert isinstance(caught.value, PorosError) and isinstance(caught.value, ValueError)
    assert expected in str(caught.value) and str(store) in str(caught.value)
    del caught
    assert open_files() == before


def test_defects_are_injected_into_a_store_that_opens(tmp_path: Path) -> None:
    """The control: rewriting the manifest as it was does no harm."""
    written(tmp_path / "store")
    rewrite(lambda store: None)(tmp_path / "store")
    open_store(tmp_path / "store", verify=True).close()


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON document with every key or index of it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    found = [(value, key) for key, _ in inside]
    for container, key in list(found):
        if isinstance(container[key], dict | list):
            found += places(container[key])
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_a_manifest_says_it_opens_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a SHA-256 that fits, so that the text gets as far as it can."""
    store = tmp_path_factory.getbasetemp() / "fuzzed"
    if not store.exists():
        written(store)
    sound = (store / MANIFEST).read_text()

    def change(document: dict[str, Any]) -> None:
        container, key = data.draw(st.sampled_from(places(document)))
        if isinstance(container, dict) and data.draw(st.booleans()):
            container[data.draw(st.text(max_size=9))] = container.pop(key)
        else:
            container[key] = data.draw(values)

    try:
        rewrite(change)(store)
        with suppress(CheckpointFormatError):
            open_store(store).close()
    finally:
        (store / MANIFEST).write_text(sound)


@settings(max_examples=150, deadline=None)
@given(text=st.binary(max_size=200), at=st.integers(0, 3000), cut=st.integers(0, 200))
def test_whatever_bytes_a_manifest_is_of_it_is_refused(
    text: bytes, at: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = tmp_path_factory.getbasetemp() / "bytes"
    if not store.exists():
        written(store)
    sound = (store / MANIFEST).read_bytes()
    damaged = sound[:at] + text + sound[at + cut :]
    try:
        (store / MANIFEST).write_bytes(damaged)
        if says_the_same(damaged, sound):
            open_store(store).close()
        else:
            with pytest.raises(CheckpointFormatError):
                open_store(store)
    finally:
        (store / MANIFEST).write_bytes(sound)


def says_the_same(damaged: bytes, sound: bytes) -> bool:
    """Whether nothing but white space between the words of the text has changed."""
    try:
        texts = [json.dumps(json.loads(each)) for each in (damaged, sound)]
    except ValueError:
        return False
    return texts[0] == texts[1]


@pytest.mark.parametrize("name", [SLABS, REST, MANIFEST, "config.json"])
def test_one_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    written(store)
    file = store / name
    sound = file.read_bytes()
    generator = random.Random(name)
    # Every kind of byte: header, tensors, padding.
    places = [0, 9, len(sound) - 1, *(generator.randrange(len(sound)) for _ in range(20))]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointFormatError, match=name):
            open_store(store, verify=True)
    file.write_bytes(sound)
    open_store(store, verify=True).close()


def test_a_flipped_bit_is_named_by_its_slab(tmp_path: Path) -> None:
    store = tmp_path / "store"
    host = written(store)
    with open_store(store) as opened:
        at = opened.data_offset + host.slabs[1].offset + 300
    with (store / SLABS).open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))
    with open_store(store) as opened:  # which does not read the bytes
        with pytest.raises(CheckpointFormatError, match=r"'slab\.00001'.*bytes changed"):
            opened.verify()
        with pytest.raises(CheckpointFormatError, match=r"'slab\.00001'.*bytes changed"):
            read(opened)


@pytest.mark.parametrize("name", [SLABS, REST])
def test_one_flipped_bit_is_found_where_it_is_read(name: str, tmp_path: Path) -> None:
    """In tensors and padding; the header of the slabs is compared as it is opened."""
    store = tmp_path / "store"
    written(store)
    sound = (store / name).read_bytes()
    generator = random.Random(name)
    with open_store(store) as opened:
        first = opened.data_offset if name == SLABS else opened._header.data_offset
    for place in [
        first,
        len(sound) - 1,
        *(generator.randrange(first, len(sound)) for _ in "x" * 9),
    ]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        (store / name).write_bytes(damaged)
        with open_store(store) as opened:
            opened.rest()
            with pytest.raises(CheckpointFormatError, match=rf"{name}.*bytes changed"):
                read(opened)
    (store / name).write_bytes(sound)
    with open_store(store) as opened:  # the control
        opened.rest()
        read(opened)


def test_a_read_error_while_filling_is_typed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    written(store)
    with open_store(store) as opened:
        os.truncate(store / SLABS, opened.data_offset + 100)
        with pytest.raises(CheckpointFormatError, match="found the end"):
            read(opened)


def test_a_header_starts_the_data_on_a_page(tmp_path: Path) -> None:
    written(tmp_path / "store")
    file = tmp_path / "store" / SLABS
    descriptor, _ = open_regular(file)
    header = read_header(descriptor, file)
    os.close(descriptor)
    assert header.data_offset % PAGE_NUM_BYTES == 0
    assert all(each.offset % PAGE_NUM_BYTES == 0 for each in header.tensors.values())


def test_a_store_of_no_layers(tmp_path: Path) -> None:
    write_store(tmp_path / "store", HostStore.allocate([]), some_rest(), {})
    with open_store(tmp_path / "store", verify=True) as opened:
        assert opened.layouts == [] and len(opened.rest()) == len(some_rest())
        assert write_manifest(opened.manifest) == (tmp_path / "store" / MANIFEST).read_bytes()


def open_files() -> list[str]:
    return sorted(
        os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{each}")
    )
