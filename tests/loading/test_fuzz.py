"""Random files: whatever they say, they are read as the library reads them, or refused.

Properties: no exception but ``CheckpointFormatError``, no hang, nothing left open; and what is
accepted here is accepted by safetensors, with the same form and bytes. The last is checked on
inputs that are often right, and a count in the tests makes sure that both outcomes occur.

A few seconds and the same examples at every run by default. POROS_FUZZ=50 draws fifty times as
many from a fresh seed, and prints the smallest one that fails:

    POROS_FUZZ=50 python -m pytest tests/loading/test_fuzz.py -q
"""

import functools
import json
import operator
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import DTYPES
from poros.loaders.store import REST, _read_manifest, open_store
from tests.loading.checkpoints import SINGLE, file_bytes, header_of, open_files, write, write_single
from tests.loading.damage import said_in, write_sealed

Read = dict[str, tuple[str, list[int], bytes]]
"""Dtype, shape and bytes by name."""
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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def handed_out(file: Path) -> Read | None:
    """What a checkpoint gives of a file; None if it is refused, in the way it should be."""
    before = open_files()
    try:
        with Checkpoint.open(file) as checkpoint:
            found = {}
            for name, described in checkpoint.slices().items():
                tensor = checkpoint.fetch(name)
                raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
                found[name] = (described.get_dtype(), list(tensor.shape), raw)
            return found
    except CheckpointFormatError as error:
        assert len(str(error)) < 3000
        return None
    finally:
        assert open_files() == before


def library_reads(file: Path) -> Read | None:
    """What safetensors says of the same file; None if it refuses."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            flat = {name: opened.get_tensor(name).reshape(-1) for name in slices}
    except SafetensorError:
        return None
    return {
        name: (each.get_dtype(), each.get_shape(), bytes(flat[name].view(torch.uint8).tolist()))
        for name, each in slices.items()
    }


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
def damaged_files(draw: st.DrawFn) -> bytes:
    """A right file, or one with up to two bytes changed, or cut off."""
    content = bytearray(file_bytes(*draw(right_headers())))
    for _ in range(draw(st.integers(0, 2))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.just(0) | st.integers(0, 20))
    return bytes(content[: len(content) - cut])


def test_what_is_accepted_is_what_the_library_reads(tmp_path: Path) -> None:
    file = write_single(tmp_path) / SINGLE
    outcomes: list[tuple[bool, bool]] = []
    dtypes = set[str]()

    @examples(200)
    @given(damaged_files())
    def check(content: bytes) -> None:
        file.write_bytes(content)
        ours, library = handed_out(file), library_reads(file)
        outcomes.append((ours is not None, library is not None))
        if ours is not None:
            assert library == ours
            dtypes.update(dtype for dtype, *_ in ours.values())

    check()
    # The other direction does not hold: the library takes shapes that torch does not.
    assert outcomes.count((True, True)) > 20 and outcomes.count((False, False)) > 20
    for name, dtype in DTYPES.items():
        num_bytes = 2 * dtype.itemsize
        whole = {"a": {"dtype": name, "shape": [2], "data_offsets": [0, num_bytes]}}
        check.hypothesis.inner_test(file_bytes(whole, bytes(num_bytes)))
    assert dtypes == set(DTYPES)


def test_a_random_manifest_says_what_fits_or_is_refused(tmp_path: Path) -> None:
    """Sealed again after the change: the SHA-256 finds accidents, not a manifest made up."""
    store = write(tmp_path / "store")
    text = json.dumps(said_in(store))
    everywhere = list(places(json.loads(text)))
    accepted: list[bool] = []
    change = st.tuples(st.sampled_from(everywhere), ANY_JSON | st.text(max_size=9), st.booleans())

    @examples(150)
    @given(st.lists(change, min_size=1, max_size=2))
    def check(changes: list[tuple[tuple[Any, ...], Any, bool]]) -> None:
        said = json.loads(text)
        for (*parents, last), value, is_renamed in changes:
            with suppress(TypeError, LookupError):  # an earlier change took the place away
                container = functools.reduce(operator.getitem, parents, said)
                if is_renamed and isinstance(value, str) and isinstance(container, dict):
                    container[value] = container.pop(last)
                else:
                    container[last] = value
        write_sealed(store, json.dumps(said))
        try:
            found = _read_manifest(header_of(store / REST))
        except CheckpointFormatError as error:
            assert f"{REST}: " in str(error) and len(str(error)) < 3000
            accepted.append(False)
        else:
            accepted.append(True)
            assert len(found.slabs) == len(found.layouts)
            assert all(num_bytes >= 0 for num_bytes, _ in found.slabs)
        # And nothing else, with the files beside it.
        with suppress(CheckpointFormatError), open_store(store):
            pass

    check()
    assert accepted.count(True) > 5 and accepted.count(False) > 50
