"""Stores on disk: the bytes come back, and what is not as it was written does not open.

Whole files that are damaged stand in test_damage.py, manifests that are made up in test_fuzz.py.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from poros.errors import CheckpointFormatError
from poros.host.layout import PAGE_NUM_BYTES
from poros.host.store import HostStore
from poros.loaders.manifest import REST, SLABS
from poros.loaders.store import is_store, open_store
from poros.loaders.store_writer import StoreWriter
from tests.loading.checkpoints import file_bytes, header_of
from tests.loading.stores import (
    ABOUT,
    FILES,
    assert_same_store,
    fill,
    filled,
    read,
    some_layouts,
    some_rest,
    write,
    write_store,
)
from tests.support import same_bits


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store")


@pytest.mark.parametrize("mapped", [True, False])
def test_everything_comes_back(mapped: bool, tmp_path: Path) -> None:
    directory, expected = tmp_path / "store", filled()
    if mapped:
        with StoreWriter(directory, some_layouts()) as writer:
            fill(writer.host)
            assert not directory.exists()
            writer.commit(some_rest(), ABOUT, FILES)
    else:
        assert write(directory) == directory
    assert is_store(directory) and os.listdir(tmp_path) == ["store"]
    with open_store(directory, verify=True) as opened:
        assert_same_store(expected, read(opened))
        found, rest = opened.rest(), some_rest()
        assert found.keys() == rest.keys()
        assert all(same_bits(found[name], rest[name]) for name in rest)
        assert dict(opened.manifest.about) == ABOUT
        assert {name: opened.text(name) for name in FILES} == FILES
        # The data are the bytes of the arena: any part of them is mapped or read as it is.
        header = header_of(directory / SLABS)
        assert header.data_offset == opened.data_offset
        starts = [opened.data_offset, *(entry.offset for entry in header.tensors.values())]
        assert all(start % PAGE_NUM_BYTES == 0 for start in starts)
        text = opened.slabs.read_bytes()
        for slab in expected.slabs:
            start = opened.data_offset + slab.offset
            data = text[start : start + slab.layout.num_bytes]
            assert data == slab.bytes.numpy().tobytes()
    assert same_bits(found["norm.weight"], rest["norm.weight"])  # it outlives the store


def test_the_first_slabs_alone(store: Path) -> None:
    with open_store(store) as opened:
        host = HostStore.allocate(opened.layouts[:2])
        opened.read_into(host)
    assert_same_store(HostStore(filled().slabs[:2]), host)


def test_other_programs_read_the_files(store: Path) -> None:
    slabs, rest = load_file(store / SLABS), load_file(store / REST)
    for index, slab in enumerate(filled().slabs):
        assert same_bits(slabs[f"slab.{index:05d}"][: slab.layout.num_bytes], slab.bytes)
    assert all(same_bits(rest[name], part.contiguous()) for name, part in some_rest().items())


def test_a_store_of_no_layers(tmp_path: Path) -> None:
    write_store(tmp_path / "store", HostStore.allocate([]), some_rest(), {})
    with open_store(tmp_path / "store", verify=True) as opened:
        assert opened.layouts == [] and len(opened.rest()) == len(some_rest())


def test_the_source_is_compared(store: Path) -> None:
    with open_store(store) as opened:
        opened.require_source("a1b2")
        with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint c3"):
            opened.require_source("c3")


# Bits that flip.


@contextmanager
def each_flip(file: Path, first: int, number: int) -> Iterator[Iterator[int]]:
    """Flip one bit after the other, at both ends and anywhere; then the file is as it was."""
    sound, generator = file.read_bytes(), random.Random(file.name)

    def flips() -> Iterator[int]:
        places = [first, len(sound) - 1]
        places += [generator.randrange(first, len(sound)) for _ in range(number)]
        for place in places:
            damaged = bytearray(sound)
            damaged[place] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            yield place

    yield flips()
    file.write_bytes(sound)


@pytest.mark.parametrize("name", [SLABS, REST, "config.json"])
def test_one_flipped_bit_is_found(name: str, store: Path) -> None:
    """In every kind of byte: length and header, tensors, padding."""
    for first in (0, 9):
        with each_flip(store / name, first, 10) as flips:
            for _ in flips:
                with pytest.raises(CheckpointFormatError, match=name):
                    open_store(store, verify=True)
    open_store(store, verify=True).close()


@pytest.mark.parametrize("name", [SLABS, REST])
def test_one_flipped_bit_is_found_where_it_is_read(name: str, store: Path) -> None:
    """In tensors and padding; the header of the slabs is compared as it is opened."""
    with each_flip(store / name, header_of(store / name).data_offset, 9) as flips:
        for _ in flips:
            changed = pytest.raises(CheckpointFormatError, match=rf"{name}.*bytes changed")
            with open_store(store) as opened, changed:
                read(opened) if name == SLABS else opened.rest()
    with open_store(store) as opened:  # the control
        opened.rest()
        read(opened)


def test_a_flipped_bit_is_named_by_its_slab(store: Path) -> None:
    with open_store(store) as opened:
        at = opened.data_offset + filled().slabs[1].offset + 300
    data = bytearray((store / SLABS).read_bytes())
    data[at] ^= 4
    (store / SLABS).write_bytes(data)
    with open_store(store) as opened:  # which does not read the bytes
        for look in (opened.verify, lambda: read(opened)):
            with pytest.raises(CheckpointFormatError, match=r"'slab\.00001'.*bytes changed"):
                look()


def test_a_read_error_while_filling_is_typed(store: Path) -> None:
    with open_store(store) as opened:
        os.truncate(store / SLABS, opened.data_offset + 100)
        with pytest.raises(CheckpointFormatError, match="found the end"):
            read(opened)


@settings(max_examples=150, deadline=None)
@example(text=b" ", at=0, cut=0)
@given(text=st.binary(max_size=200), at=st.integers(0, 3000), cut=st.integers(0, 200))
def test_whatever_bytes_a_manifest_is_of_it_is_refused(
    text: bytes, at: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But for white space between its words; a header begins with its brace."""
    store = tmp_path_factory.getbasetemp() / "bytes"
    if not store.exists():
        write(store)
    content, start = (store / REST).read_bytes(), header_of(store / REST).data_offset
    sound = content[8:start]
    damaged = sound[:at] + text + sound[at + cut :]

    def says_the_same() -> bool:
        if not damaged.startswith(b"{"):
            return False
        try:
            return len({json.dumps(json.loads(said.decode())) for said in (damaged, sound)}) == 1
        except ValueError:
            return False

    open_it: Callable[[], None] = lambda: open_store(store).close()  # noqa: E731
    try:
        (store / REST).write_bytes(file_bytes(damaged, content[start:]))
        if says_the_same():
            open_it()
        else:
            with pytest.raises(CheckpointFormatError):
                open_it()
    finally:
        (store / REST).write_bytes(content)
