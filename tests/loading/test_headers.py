"""A header is read as the reference reader reads it; everything else is refused.

What is refused, defect by defect, stands in test_damage.py; random headers in test_fuzz.py.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from poros.errors import CheckpointFormatError
from poros.loaders.header import DTYPES, open_regular, quoted, read_at
from tests.loading.checkpoints import entry, file_bytes, header_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_each_dtype_and_shape_is_found_where_the_library_put_it(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    file = tmp_path / "x.safetensors"
    # Values are bytes here: not every dtype can be made from numbers.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(1, num_bytes + 1, dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    save_file({"before": torch.ones(3), "it": tensor}, file)
    found = header_of(file).tensors["it"]
    assert (found.dtype, found.shape, found.num_bytes) == (dtype, shape, num_bytes)
    assert file.read_bytes()[found.offset :][:num_bytes] == bytes(raw.tolist())


def test_names_order_and_metadata_are_those_of_the_library(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {"b": torch.ones(2), "a": torch.ones(3, dtype=torch.int8), "": torch.ones(1)}
    save_file({**tensors, "w\u00f6rd \U0001f600": torch.ones(2)}, file, metadata={"format": "pt"})
    header = header_of(file)
    with safe_open(file, framework="pt") as reference:
        assert header.tensors.keys() == set(reference.keys())
        assert header.metadata == reference.metadata() == {"format": "pt"}
    offsets = [found.offset for found in header.tensors.values()]
    assert offsets == sorted(offsets) and offsets[0] == header.data_offset
    assert header.num_bytes == file.stat().st_size


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry()},
        {"a": entry(), "__metadata__": {"k": "v"}},
        json.dumps({"a": entry()}).encode() + b"   ",
        {"late": entry(offsets=(4, 8), shape=(1,)), "early": entry(offsets=(0, 4), shape=(1,))},
        {"a": entry(), "none": entry(shape=(0, 2**60), offsets=(8, 8))},
        {"a": entry(shape=(1,) * 63 + (2,))},
        {"a": entry(shape=(1, 2), dtype="I32")},
    ],
    ids=["plain", "metadata", "padding", "order", "zero bytes", "64 dimensions", "int"],
)
def test_headers_that_are_right_are_accepted_by_both(tmp_path: Path, header: object) -> None:
    """Controls of the refusals: what the bad cases vary is good before they do."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_bytes(header))
    with safe_open(file, framework="pt") as reference:
        assert header_of(file).tensors.keys() == set(reference.keys())


def test_an_empty_header_is_a_file_of_no_tensors(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_bytes({}, b""))
    assert header_of(file).tensors == {}


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tmp_path: Path) -> None:
    """Length 0x010280 begins with the two bytes of a pickle of version 2."""
    text = json.dumps({"a": entry()}).encode().ljust(0x010280)
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_bytes(text))
    assert list(header_of(file).tensors) == ["a"]


def test_messages_stay_short_whatever_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_bytes({"n" * 100_000: entry(dtype="d" * 100_000)}))
    with pytest.raises(CheckpointFormatError) as caught:
        header_of(file)
    assert len(str(caught.value)) < 1500 and "100000 characters" in str(caught.value)
    assert str(caught.value).isascii()
    assert quoted("\u00e9\n") == r"'\xe9\n'"


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"12345")
    descriptor, _ = open_regular(file)
    try:
        assert read_at(descriptor, 3, 2, file) == b"345"
        with pytest.raises(CheckpointFormatError, match=r"x: expected 2 more bytes at 5"):
            read_at(descriptor, 4, 3, file)
        os.close(descriptor)
        with pytest.raises(CheckpointFormatError, match="Bad file descriptor"):
            read_at(descriptor, 4, 0, file)
        descriptor, _ = open_regular(file)
    finally:
        os.close(descriptor)


def test_a_pipe_that_takes_the_place_of_a_file_meanwhile_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the file and its opening; an alarm ends the wait if there is one."""

    def ring(*_: object) -> None:
        raise TimeoutError("opening the pipe waits for a writer")

    os.mkfifo(tmp_path / "pipe")
    regular, ask = os.stat(__file__), os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **how: regular if path == tmp_path / "pipe" else ask(path, **how)
    )
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    try:
        with pytest.raises(CheckpointFormatError, match="expected a regular file"):
            open_regular(tmp_path / "pipe")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
