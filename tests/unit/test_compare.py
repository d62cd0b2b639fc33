"""The bitwise comparison: it sees every bit of every dtype, and only bits."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.self_check.compare import bits, differing
from tests.support import random_bytes

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (
    *FLOATS,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.float8_e8m0fnu,
)
SHAPES = ((), (1,), (7,), (3, 5), (2, 1, 4))


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """A copy of ``tensor`` with one bit of one element flipped, in row-major order."""
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = flat.view(torch.uint8)
    raw[element * tensor.dtype.itemsize + bit // 8] ^= 1 << (bit % 8)
    return flat.reshape(tensor.shape)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_one_flipped_bit_is_found_at_its_index(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]))
    shape = data.draw(st.sampled_from(SHAPES))
    tensor = random_bytes(dtype, shape, seed=data.draw(st.integers(0, 10_000)))
    element = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, dtype.itemsize * 8 - 1))
    found = differing(tensor, flip_bit(tensor, element, bit), "t")
    assert found is not None
    assert (found.kind, found.num_differing) == ("value", 1)
    assert found.num_elements == tensor.numel()
    index = found.first_index or ()
    assert sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(index)) == element
    assert len(index) == len(shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_and_nans_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    """+0 and -0 differ, which torch.equal accepts; NaNs are equal exactly if their payloads are."""
    plus, minus = torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([1.0, -0.0], dtype=dtype)
    assert torch.equal(plus, minus)
    found = differing(plus, minus, "z")
    assert found is not None
    assert (found.num_differing, found.first_index, found.largest) == (1, (1,), 0.0)
    nan = torch.full((2,), math.nan, dtype=dtype)
    assert not torch.equal(nan, nan.clone())
    assert differing(nan, nan.clone(), "n") is None
    other = flip_bit(nan, 1, 0)
    assert bool(other.isnan().all())
    found = differing(nan, other, "n")
    assert found is not None and (found.num_differing, found.first_index) == (1, (1,))
    assert found.expected != found.found, "both are NaN: only the bits tell them apart"


def test_largest_distance_and_first_index_are_of_different_elements() -> None:
    expected = torch.ones(4, 4)
    found = expected.clone()
    found[1, 2] = torch.nextafter(found[1, 2], torch.tensor(2.0))
    found[3, 0] = 2.0
    difference = differing(expected, found, "w")
    assert difference is not None
    assert (difference.num_differing, difference.first_index) == (2, (1, 2))
    assert difference.largest == 1.0
    text = str(difference)
    assert "w: 2 of 16 elements differ" in text and "[1, 2]" in text and "0x3f800001" in text
    mask = differing(torch.tensor([True, False]), torch.tensor([True, True]), "mask")
    assert mask is not None
    assert (mask.num_differing, mask.first_index, mask.largest) == (1, (1,), None)
    assert "False" in mask.expected and "True" in mask.found
    for other in (math.nan, math.inf):  # where there is no largest distance
        away = differing(torch.tensor([1.0, 2.0]), torch.tensor([1.5, other]), "n")
        assert away is not None and away.largest is None
        assert json.loads(json.dumps(asdict(away), allow_nan=False))["num_differing"] == 2


def test_dtype_and_shape_mismatches_are_differences_of_their_own_kind() -> None:
    zeros = torch.zeros(4)
    dtype = differing(zeros, zeros.to(torch.int32), "d")
    assert dtype is not None and dtype.kind == "dtype"
    assert str(dtype) == "d: expected dtype torch.float32, found torch.int32"
    shape = differing(zeros, zeros.reshape(2, 2), "s")
    assert shape is not None and shape.kind == "shape"
    assert str(shape) == "s: expected shape (4,), found (2, 2)"
    assert differing(zeros, zeros[:3], "s") is not None
    assert differing(torch.zeros(()), torch.zeros(1), "s") is not None


def test_tensors_without_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="materialize"):
        differing(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"), "m")
    with pytest.raises(ValueError, match="sparse"):
        bits(torch.eye(2).to_sparse())


@pytest.mark.gpu
def test_tensors_on_different_devices_are_compared() -> None:
    tensor = random_bytes(torch.bfloat16, (64, 64))
    assert differing(tensor, tensor.cuda(), "g") is None
    found = differing(tensor.cuda(), flip_bit(tensor, 100, 5), "g")
    assert found is not None and found.first_index == (1, 36)
